"""The measurements of the parts of the report, each in a process with its own devices."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.hardware import driver_gpus
from tfrep_strategy.contrib.gpu_report.programs import PROGRAMS, halves, largest_difference
from tfrep_strategy.running import launch
from tfrep_strategy.strategies.mirrored import MirroredStrategy
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy

Finding = dict[str, Any]

_SHARE_OF_MEMORY = 0.4
"""How much of the memory of a GPU that is cut in two each half has."""
_ON_CPUS = ("fit", "custom loop", "embedding, Adam", "accumulation, clipping")
"""What is compared on logical CPUs, on which the report itself is tried."""
_RANK_SECONDS = 800.0


def measured(part: str, replicas: int, kind: str) -> Iterator[Finding]:
    """Measures a part of the report on devices of this process.

    Args:
        part: Its name.
        replicas: How many replicas there are.
        kind: "GPU" or "CPU".

    Yields:
        What was found, as soon as it is there.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield from _PARTS[part](replicas, kind == "GPU")


def _names(on_gpus: bool) -> list[str]:
    return list(PROGRAMS if on_gpus else _ON_CPUS)


def _devices(replicas: int, on_gpus: bool) -> list[str]:
    """Returns as many devices of this process; halves of one GPU, or of the CPU, where there are fewer."""
    if on_gpus and len(tf.config.list_physical_devices("GPU")) >= replicas:
        return [f"GPU:{number}" for number in range(replicas)]
    return halves(int(_SHARE_OF_MEMORY * min((gpu.total_bytes for gpu in driver_gpus()), default=0) / 2**20))


def _compared(name: str, make: Callable[..., Any]) -> float | str:
    """Returns how far a program on replicas is from one device, or the error that it has ended with.

    Args:
        name: Its name.
        make: Makes the strategy, given settings.
    """
    program = PROGRAMS[name]
    try:
        strategy = make(allow_plain_models=True, **program.settings)
        return largest_difference(program.run(strategy), program.run(None))
    except Exception as error:  # Others may still hold.
        return f"{type(error).__name__}: {str(error)[:300]}"


def _finding(name: str, differences: Sequence[float | str]) -> Finding:
    tolerance = PROGRAMS[name].tolerance
    return {
        "check": name,
        "expected": f"one device's numbers to {tolerance:.2g}",
        "found": ", ".join(dict.fromkeys(f"{each:.1e}" if isinstance(each, float) else each for each in differences)),
        "ok": all(isinstance(each, float) and each <= tolerance for each in differences),
    }


def one_process(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """Compares programs on the devices of one process with one device."""
    devices = _devices(replicas, on_gpus)
    for name in _names(on_gpus):  # Replicas are compared with each other too, bit by bit.
        yield _finding(name, [_compared(name, partial(MirroredStrategy, devices, check_sync_every=3))])


def deterministic_operations(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """Operations are deterministic: replicas stay equal bit by bit in each step, with sparse gradients too."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    devices = _devices(replicas, on_gpus)
    for name in ("fit", "embedding, Adam"):
        yield _finding(name, [_compared(name, partial(MirroredStrategy, devices, check_sync_every=1))])


def processes(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """Compares programs on a process for each replica with one device. Two share a GPU where there is only one."""
    names = _names(on_gpus)
    ranks = launch(_on_rank, (names,), num_replicas=replicas, strategy=None, timeout=_RANK_SECONDS)
    yield from (_finding(name, [rank[name] for rank in ranks]) for name in names)


def _on_rank(names: Sequence[str]) -> dict[str, float | str]:
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return {name: _compared(name, partial(MultiWorkerStrategy, check_sync_every=3)) for name in names}


def speed_plain(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """Plain Keras on one device, with which all others are compared."""
    yield _speed(None, "plain Keras", 1, on_gpus)


def speed_one_process(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """The devices of one process."""
    yield _speed(MirroredStrategy(_devices(replicas, on_gpus)), "one process", replicas, on_gpus)


def speed_processes(replicas: int, on_gpus: bool) -> Iterator[Finding]:
    """A process for each replica."""
    first, *_ = launch(_speed_on_rank, (replicas, on_gpus), num_replicas=replicas, strategy=None, timeout=_RANK_SECONDS)
    yield first


def _speed_on_rank(replicas: int, on_gpus: bool) -> Finding:
    return _speed(MultiWorkerStrategy(), "processes", replicas, on_gpus)


def _speed(strategy: Any, kind: str, replicas: int, on_gpus: bool) -> Finding:
    """Measures `fit`, with the same number of examples for each replica: ResNet-50; on CPUs a net of three layers."""
    net, each, steps, rounds = ("ResNet-50", 256, 20, 3) if on_gpus else ("three layers", 64, 2, 2)
    batch = each * replicas
    keras.config.set_dtype_policy("mixed_float16" if on_gpus else "float32")
    shape = (224, 224, 3) if on_gpus else (8,)
    x = np.random.default_rng(0).standard_normal((batch, *shape), np.float32)
    data = tf.data.Dataset.from_tensors((tf.constant(x, tf.float16 if on_gpus else tf.float32), tf.zeros([batch], tf.int32)))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if on_gpus:
            model = keras.applications.ResNet50(weights=None, classifier_activation=None)
        else:
            model = keras.Sequential([keras.Input(shape), *(keras.layers.Dense(width, "relu") for width in (16, 16, 2))])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    seconds = []
    for _ in range(rounds + 1):  # The first compiles.
        start = time.perf_counter()
        model.fit(data.repeat(steps), shuffle=False, verbose=0)
        seconds.append(time.perf_counter() - start)
    rate = batch * steps / statistics.median(seconds[1:])
    chosen = getattr(getattr(strategy, "communicator", None), "name", None)
    return {
        "kind": kind,
        "replicas": replicas,
        "net": net,
        "examples_a_step": batch,
        "examples_per_second": round(rate, 1),
        **({} if chosen is None else {"communicator": chosen}),
    }


_PARTS = {
    "one process": one_process,
    "processes": processes,
    "deterministic operations": deterministic_operations,
    "speed: plain Keras": speed_plain,
    "speed: one process": speed_one_process,
    "speed: processes": speed_processes,
}
