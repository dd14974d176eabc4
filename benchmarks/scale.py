"""How costs grow with the number of processes, and what a model of them predicts: `python -m benchmarks.scale`.

Costs of collectives are fitted to measurements with 2 to 4 processes of this machine, and tried on 8. Those of the messages by
which ranks hear of each other are fitted to runs of 2 to 4 ranks, and tried on 8, and to runs of up to 256, and tried on 1,024.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import control_plane
from benchmarks.costs import PRIMITIVES, InMemory, Primitive, fit, line
from benchmarks.crews import Crew, Variant, usable_communicators
from benchmarks.report import write_json
from benchmarks.speed_page import write_page

FLOATS = {24: 30, 30_000: 15, 120_000: 8, 480_000: 4}
"""How often each number of floats is sent in a turn. 2, 3, 4 and 8 processes get equal parts of each."""
_GROWING = ("join_cpu_s", "agree_ms", "agree_cpu_ms", "compare_ms", "death_told_s", "leave_s")
TARGET = 0.15


def measure(
    communicator: str, primitives: Sequence[str], processes: Sequence[int], rounds: int, floats: Sequence[int]
) -> dict[str, Any]:
    """Measures collectives of one transport with several numbers of processes, fits their costs, and tries the fit.

    Args:
        communicator: "tf", "horovod" or "shared_memory".
        primitives: Which.
        processes: The numbers of processes. The costs of the last are predicted from the others.
        rounds: How often each number of processes gets its turn; the median counts.
        floats: How many floats each process brings.

    Returns:
        By primitive: the samples, the fitted costs, and for each number of processes and bytes the measured and predicted ms.
    """
    samples: dict[tuple[str, int, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        crews = {}
        for n in processes:
            settings = {"transport": "ours", "communicator": communicator}
            environ = {"TF_NUM_INTRAOP_THREADS": "1"}
            variant = Variant(f"{n} processes, {communicator}", settings, n, communicator, environ)
            crews[n] = stack.enter_context(contextlib.closing(Crew(variant, "benchmarks.collectives_worker")))
        for turn in range(rounds + 1):
            for name in primitives:
                for count in floats if name != "barrier" else [min(floats)]:
                    for n, crew in crews.items():
                        question = {"primitive": name, "floats": count, "times": FLOATS[count], "processes": n}
                        seconds = crew.ask(question)
                        if turn:  # The first warms up.
                            samples.setdefault((name, n, 1 if name == "barrier" else count), []).append(seconds)
    of_each = {name: {key[1:]: each for key, each in samples.items() if key[0] == name} for name in primitives}
    return {name: _tried(PRIMITIVES[communicator][name], each, processes[-1]) for name, each in of_each.items()}


def _tried(primitive: Primitive | InMemory, samples: dict[tuple[int, int], list[float]], last: int) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    medians = {(n, 4.0 * count): statistics.median(seconds) for (n, count), seconds in samples.items()}
    fitted = fit(primitive, {key: seconds for key, seconds in medians.items() if key[0] != last}, cores)
    tried = []
    for (n, size), seconds in medians.items():
        predicted = fitted.seconds(primitive, n, size, cores)
        tried.append({"processes": n, "bytes": size, "measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * predicted,
                      "error": predicted / seconds - 1})  # fmt: skip
    return {
        "costs": asdict(fitted),
        "points": tried,
        "samples_ms": {f"{n} x {4 * count} bytes": [1e3 * s for s in each] for (n, count), each in samples.items()},
        "median_error": statistics.median(abs(each["error"]) for each in tried if each["processes"] == last),
    }


def measure_control(fitted: Sequence[int], tried: int, seconds: float) -> dict[str, Any]:
    """Measures how ranks hear of each other, fits how it grows with their number, and tries the fit.

    Args:
        fitted: Numbers of ranks that are fitted.
        tried: A larger number.
        seconds: How long they train. Each rank tells its state every 30 seconds.

    Returns:
        The measurements by the number of ranks, and what was predicted for the last.
    """
    measured = {n: control_plane.measure(n, 3, seconds) for n in (*fitted, tried)}
    lines = {key: line({n: measured[n][key] for n in fitted}) for key in _GROWING}
    return {
        "measured": {str(n): each for n, each in measured.items()},
        "costs": {key: {"constant": constant, "each_rank": each} for key, (constant, each) in lines.items()},
        "predicted": {key: constant + tried * each for key, (constant, each) in lines.items()},
    }


def show(results: dict[str, Any]) -> None:
    """Prints a table of the collectives."""
    table = Table(title="Collectives. The costs of the most processes are predicted from those of the others")
    for heading in ("transport", "primitive", "processes", "bytes", "measured ms", "predicted ms", "error"):
        table.add_column(heading, justify="left" if heading in ("transport", "primitive") else "right")
    for communicator, primitives in results["collectives"].items():
        for name, result in primitives.items():
            for each in result["points"]:
                numbers = f"{each['measured_ms']:.2f}", f"{each['predicted_ms']:.2f}", f"{each['error']:+.0%}"
                table.add_row(communicator, name, str(each["processes"]), f"{each['bytes']:,.0f}", *numbers)
    Console(width=110).print(table)
    for communicator, primitives in results["collectives"].items():
        missed = [name for name, result in primitives.items() if result["median_error"] > TARGET]
        print(f"{communicator}: median error above {TARGET:.0%}: {', '.join(missed) or 'none'}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON.
    """
    installed = usable_communicators()
    parser = argparse.ArgumentParser("python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how often each number of processes gets its turn")
    parser.add_argument("--communicators", nargs="+", choices=installed, default=installed, metavar="NAME")
    parser.add_argument("--primitives", nargs="+", choices=PRIMITIVES["tf"], default=list(PRIMITIVES["tf"]), metavar="NAME")
    parser.add_argument("--processes", nargs="+", type=int, choices=(2, 3, 4, 8), default=(2, 3, 4, 8), metavar="N",
                        help="numbers of processes; the last is predicted from the others")  # fmt: skip
    parser.add_argument("--floats", nargs="+", type=int, choices=FLOATS, default=list(FLOATS), metavar="COUNT")
    parser.add_argument("--control", nargs="+", type=int, default=(64, 128, 256, 1024), metavar="RANKS",
                        help="numbers of ranks of the control plane; the last is predicted from the others")  # fmt: skip
    parser.add_argument("--few", nargs="+", type=int, default=(2, 3, 4, 8), metavar="RANKS", help="the same, of few ranks")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they train")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    parser.add_argument(
        "--page", type=Path, metavar="PATH", help="with --json: also write tables and figures into this page"
    )
    chosen = parser.parse_args(arguments)
    if chosen.page and not chosen.json:
        parser.error("--page needs --json")
    results: dict[str, Any] = {
        "collectives": {
            name: measure(name, chosen.primitives, chosen.processes, chosen.rounds, chosen.floats)
            for name in chosen.communicators
        },
        "control of few": measure_control(chosen.few[:-1], chosen.few[-1], chosen.seconds),
        "control": measure_control(chosen.control[:-1], chosen.control[-1], chosen.seconds),
    }
    show(results)
    control_plane.show(results["control"]["measured"])
    if chosen.json:
        write_json(chosen.json, results)
    if chosen.page:
        write_page(chosen.page, Path(chosen.json))
    return results


if __name__ == "__main__":
    main()
