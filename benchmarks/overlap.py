"""How much of the communication is hidden behind the backward pass: `python -m benchmarks.overlap`.

Two ranks train under `tfrep run --profile`, with small buckets of gradients, and with those whose size is found in the first steps.
A trace tells when each operation ran. Communication is hidden while the same rank computes gradients.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.crews import usable_communicators
from benchmarks.pages import save_figure
from benchmarks.report import write_json
from tfrep_strategy._tensorflow import XSpace
from tfrep_strategy.profiles.times import COLLECTIVE, COMPUTE, STEP, Operation, length, operations, spans_named

_PROGRAM = Path(__file__).with_name("overlap_program.py")
_LIMIT_SECONDS = 300.0
BUCKETS = {"4 MiB": str(4 << 20), "found": "measured"}
"""The sizes of buckets, by their names in results, as the program takes them."""
_BACKWARD = "gradient_tape"
"""How TensorFlow names the operations of a backward pass."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON and a figure if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by the communicator and its buckets.
    """
    installed = usable_communicators()
    parser = argparse.ArgumentParser("python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--communicators", nargs="+", choices=installed, default=installed, metavar="NAME")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    parser.add_argument("--page", type=Path, metavar="PATH", help="also draw a step into the folder figures beside this page")
    chosen = parser.parse_args(arguments)
    results = {f"{name}, {size}": _steps(name, given) for name in chosen.communicators for size, given in BUCKETS.items()}
    _show(results)
    if chosen.json:
        write_json(chosen.json, results)
    if chosen.page:
        save_figure(_drawn(results), chosen.page, "overlap")
    return results


def _steps(communicator: str, bucket_bytes: str) -> list[dict[str, Any]]:
    """Returns what a trace says of steps 6 to 10 of rank 0."""
    with tempfile.TemporaryDirectory(prefix="tfrep-overlap-") as folder:
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", communicator]
        command += ["--profile", "6:11", "--profile-dir", folder, str(_PROGRAM), bucket_bytes]
        subprocess.run(command, check=True, timeout=_LIMIT_SECONDS, stdout=subprocess.DEVNULL)
        return traced_steps(Path(folder))


def traced_steps(folder: Path) -> list[dict[str, Any]]:
    """Reads what rank 0 did in each step of a trace.

    Args:
        folder: What `tfrep run --profile-dir` got.

    Returns:
        Of each step: its milliseconds, those in which collectives were under way, in which gradients were computed, and in which
        both were; and when each operation began and ended.
    """
    (trace,) = folder.glob("plugins/profile/*/*rank0.xplane.pb")
    space = XSpace.FromString(trace.read_bytes())
    (host,) = [plane for plane in space.planes if plane.name == "/host:CPU"]
    found = list(operations(host))
    return [_step(found, *span) for span in sorted(spans_named(host, STEP))]


def _step(found: Sequence[Operation], begin: int, end: int) -> dict[str, Any]:
    collectives = [each.span for each in found if each.kind == COLLECTIVE]
    backward = [each.span for each in found if each.kind == COMPUTE and _BACKWARD in each.name]
    apart = [length(spans, begin, end) for spans in (collectives, backward)]
    together = length(collectives + backward, begin, end)

    def in_step(spans: Sequence[tuple[int, int]]) -> list[list[float]]:
        return [[(max(a, begin) - begin) / 1e9, (min(b, end) - begin) / 1e9] for a, b in spans if b > begin and a < end]

    return {
        "step_ms": (end - begin) / 1e9,
        "collectives_ms": 1e3 * apart[0],
        "backward_ms": 1e3 * apart[1],
        "hidden_ms": 1e3 * (sum(apart) - together),
        "timeline_ms": {"collectives": in_step(collectives), "backward": in_step(backward)},
    }


def _show(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    table = Table(title="A step of rank 0: medians of milliseconds")
    for heading in ("communicator, buckets", "step", "backward", "collectives", "of these behind backward"):
        table.add_column(heading, justify="left" if heading == "communicator, buckets" else "right")
    for communicator, steps in results.items():
        keys = ("step_ms", "backward_ms", "collectives_ms", "hidden_ms")
        table.add_row(communicator, *(f"{statistics.median(step[key] for step in steps):.1f}" for key in keys))
    Console(width=110).print(table)


def _drawn(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draws the last step of each communicator: when it computed gradients, and when collectives were under way."""
    figure = Figure(figsize=(6.4, 0.9 * len(results) + 0.6))
    axes = figure.subplots()
    names = []
    for communicator, steps in reversed(results.items()):
        for number, (what, spans) in enumerate(reversed(steps[-1]["timeline_ms"].items())):
            axes.broken_barh([(a, b - a) for a, b in spans], (len(names) - 0.4, 0.8), color=f"C{number}")
            names.append(f"{communicator}: {what}")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("ms since the step began")
    return figure


if __name__ == "__main__":
    main()
