"""Which tests `pytest` runs by itself, and which wait for their lane: `pytest -m programs`, `pytest -m "full or not full"`.

Who names a file gets all tests in it.

`python tests/lanes.py COMMIT` lists the lanes in the order in which CI takes them on that commit.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

_TESTS = Path(__file__).parent

LANES = {
    "programs": ("programs/",),
    "keras": ("keras_mirror/",),
    "servers": (
        "strategies/test_parameter_server",
        "test_benchmarks_parameter_server.py",
        "test_dataset_creator.py",
        "test_notebook_parameter_server.py",
        "test_sidecar_evaluator.py",
    ),
    "launchers": (
        "running/test_function.py",
        "running/test_joining.py",
        "running/test_processes.py",
        "test_cli.py",
        "test_demo.py",
        "test_docstrings_of_runs.py",
    ),
    "faults": (
        "communicators/peers/test_monitor.py",
        "keras_integration/test_first_use.py",
        "strategies/test_late_strategy.py",
        "strategies/test_peer_failure.py",
        "tensorflow_integration/test_pipelines_at_exit.py",
    ),
    "gpus": ("gpu/", "strategies/test_nccl_graph.py", "test_horovod_build.py"),
    "benchmarks": ("test_benchmarks.py",),
    "collectives": (
        "collectives/test_collectives.py",
        "collectives/test_differing_processes.py",
        "collectives/test_errors.py",
    ),
    "loops": ("strategies/test_custom_loops.py", "test_replicator.py"),
    "input": ("strategies/test_distributed_input.py", "test_data.py"),
    "callbacks": (
        "keras_integration/test_callbacks.py",
        "keras_integration/test_empty_parts.py",
        "keras_integration/test_saving.py",
        "keras_integration/test_timed_checkpoint.py",
        "keras_integration/test_warnings.py",
    ),
    "drawn": ("strategies/test_property.py",),
    "scenarios": (),
}
"""Lanes, and the beginnings of the paths of their tests. What is in none belongs to the short lane."""

_KINDS = ("mirrored", "tf", "horovod")


def lane_of(path: Path, name: str) -> str | None:
    """Returns the lane that a test waits for; None for those of the short lane.

    Args:
        path: Of its module.
        name: With its parameters, such as `test_two_processes[tf-adam]`.
    """
    within = path.relative_to(_TESTS).as_posix()
    if within == "strategies/test_one_device_answer.py":
        return None if _kind(name) == _chosen_kind(name) else "scenarios"
    return next((lane for lane, beginnings in LANES.items() if within.startswith(beginnings)), None)


def _kind(name: str) -> str:
    return next((kind for kind in _KINDS[1:] if f"[{kind}-" in name), "mirrored")


def _chosen_kind(name: str) -> str | None:
    """Returns the kind of replicas on which the short lane runs a scenario, for every third; the lane `scenarios` has the rest."""
    scenario = name.partition("[")[2].removesuffix("]").removeprefix("tf-").removeprefix("horovod-")
    chosen = zlib.crc32(scenario.encode()) % (3 * len(_KINDS))
    return _KINDS[chosen] if chosen < len(_KINDS) else None


def in_order(commit: str) -> list[str]:
    """Returns the lanes, starting with another one on each commit."""
    lanes = list(LANES)
    first = zlib.crc32(commit.encode()) % len(lanes)
    return lanes[first:] + lanes[:first]


if __name__ == "__main__":
    print(*in_order(sys.argv[1]))
