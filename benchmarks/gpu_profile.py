"""What a step of `fit` does on a GPU, by TensorFlow's profiler: `python -m benchmarks.gpu_profile WHO NET`.

WHO is plain Keras, one replica (of `MirroredStrategy` or of `MultiWorkerStrategy`), or two replicas on halves of a GPU. It prints
one JSON object: milliseconds a step, kernels and copies a step, how long the GPU was busy, and how much copying that overlapped.
Epochs are short, so that their start counts. Without a GPU, the profiler sees no kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfrep_strategy as tfrep
from benchmarks.report import machine
from tfrep_strategy.cluster.hardware import driver_gpus
from tfrep_strategy.contrib.gpu_report.programs import halves

_HALF_MIB = 24_000


class _Event(NamedTuple):
    """What a stream of the GPU did: a kernel or a copy, from one nanosecond to another."""

    name: str
    begin: float
    end: float

    @property
    def is_copy(self) -> bool:
        return self.name.startswith("Mem")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints what was found.

    Args:
        arguments: The command line; by default this process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_profile", description=__doc__)
    parser.add_argument("who", choices=STRATEGIES)
    parser.add_argument("net", choices=NETS)
    parser.add_argument("--batch", type=int, default=64, help="examples in a global batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps in an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs that are timed (default: %(default)s)")
    parser.add_argument("--xla", action="store_true", help="jit_compile=True")
    chosen = parser.parse_args(arguments)
    strategy = STRATEGIES[chosen.who]()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model, data = NETS[chosen.net](chosen.batch, chosen.steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=chosen.xla)
    model.fit(data, verbose=0)
    seconds = [_timed(lambda: model.fit(data, verbose=0)) / chosen.steps for _ in range(chosen.rounds)]
    events = _profiled(lambda: model.fit(data, verbose=0))
    kernels, copies = ([(e.begin, e.end) for e in events if e.is_copy == kind] for kind in (False, True))
    ms_a_step = 1e6 * chosen.steps
    counted = Counter(event.name.split(" ")[0] for event in events if event.is_copy)
    found = {
        "milliseconds": round(1e3 * statistics.median(seconds), 3),
        "kernels": len(kernels) / chosen.steps,
        "copies": {name: round(count / chosen.steps, 2) for name, count in sorted(counted.items())},
        "busy_milliseconds": round(_covered(kernels) / ms_a_step, 3),
        "copying_milliseconds": round(_covered(copies) / ms_a_step, 3),
        "overlapped_milliseconds": round((_covered(kernels) + _covered(copies) - _covered(kernels + copies)) / ms_a_step, 3),
    }
    print(json.dumps(vars(chosen) | found | {"machine": machine() | {"gpus": [gpu.name for gpu in driver_gpus()]}}))


def _one(make: Callable[[], Any]) -> Callable[[], Any]:
    def strategy() -> Any:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        return make()

    return strategy


STRATEGIES: dict[str, Callable[[], Any]] = {
    "plain": _one(lambda: None),
    "mirrored": _one(lambda: tfrep.MirroredStrategy(["GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"])),
    "multi-worker": _one(lambda: tfrep.MultiWorkerStrategy("tf")),
    "halves": lambda: tfrep.MirroredStrategy(halves(_HALF_MIB)),
}


def _data(shape: Sequence[int], batch: int, steps: int) -> tf.data.Dataset:
    pictures = np.random.default_rng(0).integers(0, 255, (batch, *shape)).astype("uint8")
    whole = tf.data.Dataset.from_tensors((pictures, np.zeros(batch, "int32"))).cache().repeat(steps)
    return whole.map(lambda x, y: (tf.cast(x, tf.float32) / 255.0, y), num_parallel_calls=8).prefetch(2)


def _dense(batch: int, steps: int) -> tuple[Any, tf.data.Dataset]:
    hidden = keras.layers.Dense(64, "relu")
    return keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)]), _data([64], batch, steps)


def _convolutions(batch: int, steps: int) -> tuple[Any, tf.data.Dataset]:
    first, second = (keras.layers.Conv2D(width, 3, activation="relu") for width in (32, 64))
    middle, last = keras.layers.BatchNormalization(), [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((28, 28, 1)), first, middle, second, *last]), _data([28, 28, 1], batch, steps)


def _resnet(batch: int, steps: int) -> tuple[Any, tf.data.Dataset]:
    keras.config.set_dtype_policy("mixed_float16")
    return keras.applications.ResNet50(weights=None, classifier_activation=None), _data([224, 224, 3], batch, steps)


NETS: dict[str, Callable[[int, int], tuple[Any, tf.data.Dataset]]] = {
    "dense": _dense,
    "convolutions": _convolutions,
    "resnet": _resnet,
}


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _profiled(work: Callable[[], Any]) -> list[_Event]:
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            work()
        return [event for path in Path(folder).rglob("*.xplane.pb") for event in _events(path.read_bytes())]


def _events(profile: bytes) -> Iterator[_Event]:
    space = xplane_pb2.XSpace()
    space.ParseFromString(profile)
    for plane in (each for each in space.planes if "GPU:" in each.name):
        for line in (each for each in plane.lines if "Stream" in each.name):
            for event in line.events:
                begin = line.timestamp_ns + event.offset_ps / 1e3
                yield _Event(plane.event_metadata[event.metadata_id].name, begin, begin + event.duration_ps / 1e3)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Returns how long at least one of some intervals lasts."""
    total = end = 0.0
    for begin, until in sorted(intervals):
        if until > end:
            total += until - max(begin, end)
            end = until
    return total


if __name__ == "__main__":
    sys.exit(main())
