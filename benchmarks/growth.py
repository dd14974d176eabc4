"""What ranks pay beside their steps, by their number: `python -m benchmarks.growth`.

Arrays that `fit` reads, a checkpoint, and a callback that looks at each batch. One device stands for each in the first column.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.crews import Crew, Variant
from benchmarks.report import write_json

TITLES = {
    "arrays_cpu_s": "`fit(numpy)`: CPU seconds of an epoch, of all ranks",
    "arrays_mb": "... MB that a rank's step gets",
    "checkpoint_chief_mb": "`tf.train.Checkpoint`: MB that the chief writes",
    "checkpoint_others_mb": "... MB that another rank writes, at most",
    "checkpoint_s": "... seconds, of the slowest rank",
    "callback_ms": "a callback at each batch: ms of a step more",
    "callback_cpu_ms": "... CPU ms of a rank",
}


def measure(processes: int, communicator: str, rounds: int) -> dict[str, float]:
    """Measures all of it with some ranks.

    Args:
        processes: How many; 1 is plain Keras.
        communicator: Their transport.
        rounds: How often each is measured; the median counts.

    Returns:
        The measurements, by the keys of `TITLES`.
    """
    variant = Variant(f"{processes} processes", {"communicator": communicator if processes > 1 else None}, processes, communicator)
    samples: list[dict[str, float]] = []
    with contextlib.closing(Crew(variant, "benchmarks.growth_worker")) as crew:
        for _ in range(rounds + 1):
            with tempfile.TemporaryDirectory(prefix="tfrep-growth-") as folder:
                asked = [crew.ask_all({"do": do, "folder": folder}) for do in ("arrays", "checkpoint", "callback")]
            samples.append(_of_all(*asked))
    return {key: statistics.median(each[key] for each in samples[1:]) for key in TITLES}  # The first warms up.


def _of_all(arrays: list[Any], checkpoint: list[Any], callback: list[Any]) -> dict[str, float]:
    """Takes together what the ranks have measured."""
    return {
        "arrays_cpu_s": sum(each["cpu_s"] for each in arrays),
        "arrays_mb": max(each["mb"] for each in arrays),
        "checkpoint_chief_mb": checkpoint[0]["written_mb"],
        "checkpoint_others_mb": max((each["written_mb"] for each in checkpoint[1:]), default=0.0),
        "checkpoint_s": max(each["seconds"] for each in checkpoint),
        "callback_ms": max(each["ms"] for each in callback),
        "callback_cpu_ms": statistics.mean(each["cpu_ms"] for each in callback),
    }


def show(results: dict[str, dict[str, float]]) -> None:
    """Prints a table.

    Args:
        results: By the number of processes.
    """
    table = Table(title="What ranks pay beside their steps")
    for head in ("", *("one device" if n == "1" else f"{n} processes" for n in results)):
        table.add_column(head, justify="right" if head else "left")
    for key, title in TITLES.items():
        table.add_row(title, *(f"{measured[key]:.3g}" for measured in results.values()))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by the number of processes.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="how many processes; one run each")
    parser.add_argument("--communicator", default="shared_memory", help="their transport")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    results = {str(n): measure(n, chosen.communicator, chosen.rounds) for n in chosen.processes}
    show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
