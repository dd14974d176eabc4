"""What an all-reduce between two processes costs: `python -m benchmarks.all_reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.crews import Variant
from benchmarks.turns import compare, turns_parser
from tfrep_strategy.cluster.identity import horovod_is_installed

REFERENCE = "TensorFlow's ring"
_OURS, _BARE, _MEMORY = "ours, horovod", "Horovod, bare", "ours, shared memory"

WORKLOADS = {
    "20 x 1 MB": {"count": 20, "floats": 250_000, "times": 10},
    "1 x 20 MB": {"count": 1, "floats": 5_000_000, "times": 10},
    "10 floats": {"count": 1, "floats": 10, "times": 100},
}

TARGETS: dict[str, dict[tuple[str, str], float]] = {
    "20 x 1 MB": {(_OURS, _BARE): 1.15, (_OURS, REFERENCE): 0.5, (_MEMORY, _BARE): 0.9},
    "1 x 20 MB": {(_OURS, _BARE): 1.15, (_OURS, REFERENCE): 0.5, ("ours, tf", _BARE): 1.2, (_MEMORY, _BARE): 0.9},
    "10 floats": {(_MEMORY, _BARE): 0.9},
}


def variants() -> list[Variant]:
    """Lists what can be measured here.

    Returns:
        The variants, two processes each.
    """
    horovod = [
        Variant(_BARE, {"transport": "horovod"}, 2, "horovod"),
        Variant(_OURS, {"transport": "ours, horovod"}, 2, "horovod"),
        Variant("ours, horovod, bf16", {"transport": "ours, horovod, bf16"}, 2, "horovod"),
    ]
    return [
        Variant(REFERENCE, {"transport": "tensorflow"}, 2),
        *(horovod if horovod_is_installed() else []),
        Variant("ours, tf", {"transport": "ours, tf"}, 2),
        Variant("ours, tf, bf16", {"transport": "ours, tf, bf16"}, 2),
        Variant("ours, shared memory", {"transport": "ours, shared memory"}, 2),
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by workload.
    """
    parser = turns_parser("all_reduce", __doc__, rounds=15)
    parser.add_argument("--times", type=int, help="how many all-reduces make a turn")
    chosen = parser.parse_args(arguments)
    workloads = {name: {**load, "times": chosen.times or load["times"]} for name, load in WORKLOADS.items()}
    return compare(
        variants(),
        "benchmarks.all_reduce_worker",
        workloads,
        chosen,
        targets=TARGETS,
        title="Sum over two processes of {name}",
        reference=REFERENCE,
    )


if __name__ == "__main__":
    main()
