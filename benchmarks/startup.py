"""How long `tfrep run` takes to the first line of a script and to its first step: `python -m benchmarks.startup`.

Runs of one rank and of several take turns, round after round. A rank waits at both
points until the CPU time of all processes of the run is counted. Other work on the machine changes times, and CPU times much less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, write_json

PROGRAM = Path(__file__).with_name("startup_program.py")
LIMIT_SECONDS = 300.0
_WHAT = ("line", "line, CPU", "step", "step, CPU")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by variant.
    """
    parser = argparse.ArgumentParser("startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often each variant starts")
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks the variants of several have")
    parser.add_argument("--communicator", default="tf", help="as for tfrep run")
    parser.add_argument("--json", help="where to write the result")
    chosen = parser.parse_args(arguments)
    several = f"{chosen.ranks} ranks"
    variants = {"1 rank": ["-n", "1"], several: ["-n", str(chosen.ranks)]}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(chosen.rounds):
        for name, options in variants.items():
            samples[name].append(_start(["--communicator", chosen.communicator, *options], int(options[1])))
    results = {name: _medians(each, samples["1 rank"], chosen.ranks) for name, each in samples.items()}
    _show(results)
    print(f"load of the last minute: {machine()['load_1min']:.1f} on {machine()['cores']} cores")
    if chosen.json:
        write_json(chosen.json, results)
    return results


def _start(options: Sequence[str], ranks: int) -> dict[str, float]:
    """Starts one run. Returns seconds, and CPU seconds of all its processes, to each of the two points."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *options, str(PROGRAM), name]
        begin = time.monotonic()
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            line, line_cpu = _reached(folder, "line", ranks, run)
            go = time.monotonic()
            step, step_cpu = _reached(folder, "step", ranks, run)
            run.wait(LIMIT_SECONDS)
        finally:
            run.terminate()
            run.wait()
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {run.returncode}")
    line -= begin
    return dict(zip(_WHAT, (line, line_cpu, line + step - go, step_cpu), strict=True))


def _reached(folder: Path, what: str, ranks: int, run: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Waits for the last rank. Returns when that was, and how many CPU seconds all processes have used so far."""
    paths = [folder / f"{what}{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(path.exists() for path in paths):
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a rank did not come to its first {what}")
        time.sleep(0.01)
    last = max(json.loads(path.read_text("utf-8")) for path in paths)
    used = 0.0
    for process in [(own := psutil.Process(run.pid)), *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # It has ended: its parent has its time.
            times = process.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    (folder / f"{what}-counted").touch()
    return last, used


def _medians(these: Sequence[Mapping[str, float]], ones: Sequence[Mapping[str, float]], ranks: int) -> dict[str, float]:
    """Returns medians, and over rounds those of ratios: of the first line to that of one rank, of the first step to its limit."""
    found = {what: statistics.median(each[what] for each in these) for what in _WHAT}
    for line, step in (("line", "step"), ("line, CPU", "step, CPU")):
        pairs = list(zip(these, ones, strict=True))
        found[f"{line}, ratio"] = statistics.median(this[line] / one[line] for this, one in pairs)
        # Beyond its own, a run of one rank has the building and tracing of the other ranks.
        most = [one[step] + (ranks - 1) * (one[step] - one[line]) for one in ones]
        found[f"{step}, ratio"] = statistics.median(this[step] / each for this, each in zip(these, most, strict=True))
    return found


def _show(results: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title="Seconds from `tfrep run` to the first line and the first step of the last rank")
    table.add_column("variant")
    headings = [*_WHAT, *(f"{what}, ratio" for what in _WHAT)]
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, found in results.items():
        table.add_row(name, *(f"{found[heading]:.2f}" for heading in headings))
    console = Console(width=150)
    console.print(table)
    console.print(
        "  Ratio of a line: to that of 1 rank. Ratio of a step: to that of 1 rank and the building and tracing of the others.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
