"""Summaries of traces: the time in which each process computed, communicated, waited for input, or did none of these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

SUMMARY_NAME = "tfrep_summary.json"


@dataclass(frozen=True)
class TraceReport:
    """Summary of the trace of one process. The four shares of the time add up to `traced`.

    Attributes:
        who: The process, such as "rank0".
        traced: Number of traced seconds.
        compute: Seconds in which an operation ran.
        collectives: Other seconds in which it waited for other processes or devices.
        input: Other seconds in which it waited for a batch.
        idle: The rest.
        steps: Number of steps of a `fit` in the trace.
        problem: Why there is no trace, or "".
    """

    who: str
    traced: float = 0.0
    compute: float = 0.0
    collectives: float = 0.0
    input: float = 0.0
    idle: float = 0.0
    steps: int = 0
    problem: str = ""


def write_summary(reports: Sequence[TraceReport], run_folder: Path) -> None:
    """Writes the reports beside the traces, as JSON.

    Args:
        reports: The reports of all processes.
        run_folder: The folder of the traces.

    Example:
        >>> write_summary([TraceReport("rank0", traced=1.0, idle=1.0)], Path())
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / SUMMARY_NAME).write_text(json.dumps([asdict(report) for report in reports], indent=1), "utf-8")


def show_summary(reports: Sequence[TraceReport], what: str, run_folder: Path, stream: TextIO) -> None:
    """Writes a table with a row for each process, and the folder of the traces.

    Args:
        reports: The reports of all processes.
        what: The traced part, such as "steps 5 to 14".
        run_folder: The folder of the traces.
        stream: The stream to write to.

    Example:
        >>> show_summary([TraceReport("rank0", traced=1.0, compute=0.9, idle=0.1, steps=9)], "steps 5 to 13", Path(), sys.stdout)
        tfrep: profile of steps 5 to 13, in milliseconds...
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, soft_wrap=True)
    console.print(f"tfrep: profile of {what}, in milliseconds and as a share of the traced time.", markup=False)
    table = Table("process", "steps", "traced", "compute", "collectives", "input", "idle", box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "process" else "right", True
    for report in reports:
        if not report.problem:
            parts = (report.compute, report.collectives, report.input, report.idle)
            shown = [f"{1000 * part:.1f} {part / max(report.traced, 1e-9):4.0%}" for part in parts]
            table.add_row(report.who, str(report.steps or "-"), f"{1000 * report.traced:.1f}", *shown)
    console.print(table)
    for report in reports:
        if report.problem:
            console.print(f"tfrep: {report.who} was not traced: {report.problem}", markup=False)
    if any(not report.problem for report in reports):
        logdir = run_folder.parents[2] if len(run_folder.parents) > 2 else run_folder
        console.print(f"Traces: {run_folder}\nTo see them: tensorboard --logdir {logdir}", markup=False)
