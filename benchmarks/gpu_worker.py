"""One process of `benchmarks.gpu`: everything that is looked at in one place. Prints one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep
from benchmarks.gpu_programs import PROGRAMS, Program, halves, largest_difference
from tfrep_strategy.cluster.hardware import driver_gpus

Finding = dict[str, Any]
_SHARE_OF_MEMORY = 0.4


def main() -> None:
    """Looks at the place that the command line names, and prints each finding as soon as it is there.

    Names of checks may follow that of the place: then only these are run.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for finding in PLACES[sys.argv[1]]():
        print(json.dumps(finding), flush=True)


def examined(check: str, expected: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    """Runs one check; an exception is a finding too.

    Args:
        check: Its name.
        expected: What should be found.
        look: Says whether that was found, and what was.

    Returns:
        What goes into the table.
    """
    start = time.monotonic()
    try:
        ok, found = look()
    except Exception as error:
        ok, found = False, f"{type(error).__name__}: {str(error)[:300]}"
    return {"check": check, "expected": expected, "found": found, "ok": ok, "seconds": round(time.monotonic() - start, 1)}


def compared(name: str, program: Program, strategy: Any) -> Finding:
    """Runs a program under a strategy and on one device."""

    def look() -> tuple[bool, str]:
        difference = largest_difference(program.run(strategy), program.run(None))
        return difference <= program.tolerance, f"{difference:.1e}"

    return examined(name, f"one device's numbers to {program.tolerance:.2g}", look)


def two_logical_devices() -> Iterator[Finding]:
    """One GPU cut in two, which is Colab's case; the CPU where there is none."""
    devices = _halves()
    if "GPU" in devices[0]:
        yield from placement()
    yield from programs_and_speed(devices)


def _halves() -> list[str]:
    sizes = [gpu.total_bytes for gpu in driver_gpus()]
    return halves(int(_SHARE_OF_MEMORY * min(sizes, default=0) / 2**20))


def deterministic_operations() -> Iterator[Finding]:
    """Two logical devices whose operations are deterministic: replicas stay equal bit by bit, with sparse gradients too."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    strategy = tfrep.MirroredStrategy(_halves(), check_sync_every=1, allow_plain_models=True)
    for name in ("embedding, Adam", "fit"):
        yield compared(name, PROGRAMS[name], strategy)


def several_devices() -> Iterator[Finding]:
    """All GPUs of this machine in one process."""
    yield from programs_and_speed([f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))])


def programs_and_speed(devices: list[str]) -> Iterator[Finding]:
    """Compares every program with one device, then measures."""
    for name, program in wanted_programs(sys.argv[2:]).items():
        # Replicas are compared with each other too, bit by bit.
        strategy = tfrep.MirroredStrategy(devices, check_sync_every=3, allow_plain_models=True, **program.settings)
        yield compared(name, program, strategy)
    if not sys.argv[2:] or "speed" in sys.argv[2:]:
        yield from speed(tfrep.MirroredStrategy(devices[:1]), tfrep.MirroredStrategy(devices))


def wanted_programs(checks: list[str]) -> dict[str, Program]:
    """Returns the programs that were asked for; all where nothing was."""
    return {name: program for name, program in PROGRAMS.items() if not checks or name in checks}


def placement() -> Iterator[Finding]:
    """Where a collective runs: beside its ordering token, whatever device was asked for."""

    def device_of(dtype: Any) -> tuple[bool, str]:
        number = int(dtype.as_datatype_enum)
        with tf.device("GPU:0"):
            token = tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], shared_name=f"token_{dtype.name}")
            result = tf.function(
                lambda: tf.raw_ops.CollectiveReduceV2(
                    input=tf.ones([4]), group_size=1, group_key=76 + number, instance_key=1 + number,
                    ordering_token=[token], merge_op="Add", final_op="Id", communication_hint="nccl",
                )
            )()  # fmt: skip
        found = f"token on {token.device[-5:]}, result on {result.device[-5:]}"
        return ("GPU" in token.device) == (dtype == tf.float32), found

    yield examined("float32 token", "token and collective on the GPU", lambda: device_of(tf.float32))
    yield examined("int32 token", "on the CPU: why ours is not int32", lambda: device_of(tf.int32))


def two_processes() -> Iterator[Finding]:
    """A process for each replica, over TensorFlow's collectives; they share a GPU where there is only one."""
    programs = wanted_programs(sys.argv[2:])
    results = tfrep.launch(every_program, (list(programs),), num_replicas=2, communicator="tf", strategy=None, timeout=400)
    for name, program in programs.items():
        expected = f"one device's numbers to {program.tolerance:.2g}, on both ranks"
        found = [ranks[name] for ranks in results]
        yield {
            "check": name,
            "expected": expected,
            "found": ", ".join(f if isinstance(f, str) else f"{f:.1e}" for f in found),
            "ok": all(not isinstance(f, str) and f <= program.tolerance for f in found),
            "seconds": 0.0,
        }


def every_program(names: list[str]) -> dict[str, Any]:
    """Runs on every rank: compares programs with one device, on this rank's own device."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    found: dict[str, Any] = {}
    for name, program in wanted_programs(names).items():
        try:
            strategy = tfrep.MultiWorkerStrategy("tf", check_sync_every=3, allow_plain_models=True, **program.settings)
            found[name] = largest_difference(program.run(strategy), program.run(None))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def speed(one: Any, several: Any) -> Iterator[Finding]:
    """ResNet-50 on GPUs; a net of three layers on CPUs, where the numbers say only that it runs."""
    on_gpus = bool(tf.config.list_logical_devices("GPU"))
    net, batch, steps, rounds = ("ResNet-50", 256, 20, 5) if on_gpus else ("three layers", 64, 2, 2)
    runs = {
        "plain": timed_fit(None, net, batch, steps),
        "one": timed_fit(one, net, batch, steps),
        "several": timed_fit(several, net, batch, steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):  # In turns: the machine's speed drifts.
        for name, run in runs.items():
            seconds[name].append(run())

    def of(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    rates = {name: batch * steps / statistics.median(values) for name, values in seconds.items()}
    count = several.num_replicas_in_sync
    yield {
        "check": f"speed: {net}, batch {batch}, one replica beside plain Keras",
        "expected": "at most 1.02 of its time" if on_gpus else "it runs",
        "found": f"{of('one', 'plain'):.3f} ({rates['one']:.0f} and {rates['plain']:.0f} examples/s)",
        "ok": not on_gpus or of("one", "plain") <= 1.02,
        "seconds": round(sum(seconds["one"]) + sum(seconds["plain"]), 1),
    }
    yield {
        "check": f"speed: {net}, batch {batch}, {count} replicas beside one",
        "expected": "told, not judged: they may share a device",
        "found": f"{of('several', 'one'):.3f} of its time ({rates['several']:.0f} examples/s)",
        "ok": True,
        "seconds": round(sum(seconds["several"]), 1),
    }


def timed_fit(strategy: Any, net: str, batch: int, steps: int) -> Callable[[], float]:
    """Compiles and warms up a model with Keras's defaults, and gives a function that returns the seconds of an epoch."""
    keras.config.set_dtype_policy("mixed_float16" if net == "ResNet-50" else "float32")
    shape = (224, 224, 3) if net == "ResNet-50" else (8,)
    x = tf.constant(np.random.default_rng(0).standard_normal((batch, *shape), np.float32))
    data = tf.data.Dataset.from_tensors((x, tf.zeros([batch], tf.int32))).repeat(steps)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if net == "ResNet-50":
            model = keras.applications.ResNet50(weights=None, classifier_activation=None)
        else:
            layers = [keras.layers.Dense(width, "relu") for width in (16, 16)]
            model = keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    keras.config.set_dtype_policy("float32")
    model.fit(data, verbose=0)

    def epoch() -> float:
        start = time.perf_counter()
        model.fit(data, verbose=0)
        return time.perf_counter() - start

    return epoch


PLACES: dict[str, Callable[[], Iterator[Finding]]] = {
    "two logical devices": two_logical_devices,
    "two processes": two_processes,
    "deterministic operations": deterministic_operations,
    "several devices": several_devices,
}


if __name__ == "__main__":
    main()
