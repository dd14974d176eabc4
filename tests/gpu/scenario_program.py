"""Runs scenarios on two replicas and on one device, on this machine's GPU if it has one. Prints a JSON object for each.

`python tests/gpu/scenario_program.py mirrored|processes [--xla] [NAME...]`. A GPU is cut in two, or two processes share it.
With `--xla`, `jit_compile="auto"` is on where there is no GPU too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "strategies")]

import scenarios  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras.src.trainers.trainer import Trainer, model_supports_jit  # noqa: E402
from test_one_device_answer import assert_same  # noqa: E402

import tfrep_strategy as tfrep  # noqa: E402
from tfrep_strategy.contrib.gpu_report.programs import halves  # noqa: E402

_MEMORY_MIB = 4096  # Several such programs have room on a GPU.
# Kernels of GPUs add in other orders, which depend on the size of a batch.
_TOLERANCES = (1e-5, 1e-4, 1e-3, 1e-2)


def main(place: str, names: list[str]) -> None:
    """Runs the scenarios in a place, one after the other."""
    with_xla = "--xla" in names
    names = [name for name in names if name != "--xla"] or sorted(scenarios.SCENARIOS)
    set_up(with_xla)
    for finding in mirrored(names) if place == "mirrored" else processes(names, with_xla):
        print(json.dumps(finding), flush=True)


def set_up(with_xla: bool) -> None:
    """Makes a GPU compute in float32, as a CPU does, and a CPU compile, as a GPU does."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if with_xla:
        Trainer._resolve_auto_jit_compile = lambda self: model_supports_jit(self)


def mirrored(names: list[str]) -> Iterator[dict[str, Any]]:
    """Two replicas of one process: on halves of a GPU, or on logical CPUs."""
    strategy = tfrep.MirroredStrategy(halves(_MEMORY_MIB), allow_plain_models=True)
    for name in names:
        yield {"place": "mirrored", **compared(strategy, name)}


def processes(names: list[str], with_xla: bool) -> Iterator[dict[str, Any]]:
    """Two processes over TensorFlow's collectives."""
    ranks = tfrep.launch(_on_rank, (names, with_xla), num_replicas=2, communicator="tf", strategy=None, timeout=540)
    for rank, findings in enumerate(ranks):
        yield from ({"place": f"rank {rank} of 2", **finding} for finding in findings)


def _on_rank(names: list[str], with_xla: bool) -> list[dict[str, Any]]:
    set_up(with_xla)
    strategy = tfrep.MultiWorkerStrategy("tf", allow_plain_models=True)
    return [compared(strategy, name) for name in names]


def compared(strategy: Any, name: str) -> dict[str, Any]:
    """Compares a scenario under a strategy with one device.

    Returns:
        Its name, the tolerance that holds (none if there is none), what is wrong, the device of the variables, and the
        seconds it took.
    """
    start, wrong, holds, device = time.monotonic(), "", None, ""
    try:
        with strategy.scope():
            device = tf.Variable(0.0).device
            found = scenarios.run(name)
        wrong = "one device fails"
        expected = scenarios.run(name)
        for tolerance in _TOLERANCES:
            try:
                assert_same(found, expected, name, tolerance)
                wrong, holds = "", tolerance
                break
            except AssertionError as error:
                wrong = str(error)
    except Exception as error:
        wrong = f"{wrong} {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - start, 1)
    wrong = f"{wrong[:700]} ... {wrong[-700:]}" if len(wrong) > 1400 else wrong
    return {"scenario": name, "holds": holds, "wrong": wrong, "device": device, "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
