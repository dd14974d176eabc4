"""Start-up and memory beside plain Keras: `python -m benchmarks.memory`.

The time from the start of a process to the end of its first step, its memory then and after an epoch, and what `predict` of many
rows adds, in each process.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.crews import Crew, Variant, usable_communicators
from benchmarks.report import write_json

REFERENCE = "Keras"
OUTPUTS = 32
"""How many floats are predicted for each row."""
_MEASURED = {
    "first_step_s": "first step after, s",
    "first_step_cpu_s": "... CPU s",
    "memory_mb": "memory then, MB",
    "epoch_mb": "after an epoch, MB",
    "predictions_mb": "predictions held, MB",
    "predict_left_mb": "... left without them, MB",
    "predict_peak_mb": "predict's peak, MB",
}


def variants(processes: int, replicas: int) -> list[Variant]:
    """Lists what can be measured here.

    Args:
        processes: How many processes the largest variants have; there are smaller ones of 2 and 4.
        replicas: How many mirrored replicas a variant has, beside those of 1 and 2.
    """
    numbers = [n for n in (2, 4, 8) if n < processes] + [processes]
    return [
        Variant(REFERENCE, {"strategy": "none"}),
        *(Variant(f"mirrored, {n}", {"strategy": "mirrored", "replicas": n}) for n in dict.fromkeys((1, 2, replicas))),
        *(Variant(f"{n} processes, {name}", {"strategy": name}, n, name) for name in usable_communicators() for n in numbers),
        *(
            Variant(f"{n} processes, tf, on the chief", {"strategy": "tf", "chief_only": True}, n)
            for n in numbers
            if n >= min(4, processes)
        ),
        Variant("stock mirrored, 2", {"strategy": "stock mirrored"}),
    ]


def measure(variant: Variant, rows: int) -> list[dict[str, float]]:
    """Starts the processes of a variant, trains and predicts.

    Args:
        variant: What they are.
        rows: How many rows are predicted.

    Returns:
        The measurements of each process, by the keys of the table.
    """
    with contextlib.closing(Crew(variant, "benchmarks.memory_worker")) as crew:
        trained = crew.ask_all({"do": "train"})
        predicted = crew.ask_all({"do": "predict", "rows": rows})
    return [{**one, **other} for one, other in zip(trained, predicted, strict=True)]


def show(results: dict[str, Any], rows: int) -> None:
    """Prints a table. Of several processes it shows the mean, and the most where they differ by more than a tenth."""
    table = Table(title=f"Start-up and memory of each process; {rows:,} rows predicted, {rows * OUTPUTS * 4 / 1e6:,.0f} MB")
    table.add_column("variant")
    for title in _MEASURED.values():
        table.add_column(title, justify="right")
    for name, processes in results.items():
        cells = []
        for key in _MEASURED:
            values = [each[key] for each in processes]
            mean, most = statistics.mean(values), max(values)
            cells.append(f"{mean:,.1f}" + (f" (most {most:,.1f})" if most > 1.1 * mean else ""))
        table.add_row(name, *cells)
    Console(width=150).print(table)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON: for each variant the measurements of its processes.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="how many rows are predicted")
    parser.add_argument("--processes", type=int, default=8, help="how many processes the largest variants have")
    parser.add_argument("--replicas", type=int, default=8, help="how many replicas the largest mirrored variant has")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only those that have one of these in their names")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    results = {}
    for variant in variants(chosen.processes, chosen.replicas):
        if not chosen.variants or any(each in variant.name for each in chosen.variants):
            results[variant.name] = measure(variant, chosen.rows)
    show(results, chosen.rows)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
