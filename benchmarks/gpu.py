"""Proves on a machine with GPUs what can be proved nowhere else: `python -m benchmarks.gpu`.

First whether replicas give one device's numbers: on one GPU that is cut in two, in two processes, on all GPUs. Then how
fast a step is. `NCCL_MULTI_RANK_GPU_ENABLE=1` has NCCL connect replicas that share a GPU. Without a GPU, `--dry-run` lists every
check, and runs on logical CPUs what can run there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine
from tfrep_strategy._version import __version__
from tfrep_strategy.cluster.hardware import driver_gpus

RESULTS = Path(__file__).parent / "results"
_PLACES = ("two logical devices", "two processes", "deterministic operations", "several devices")
_LIMIT_SECONDS = 540.0
_HEADINGS = ("place", "check", "expected", "found", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks and prints them as a table.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        The exit code: 0 where every check found what it expects.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--places", nargs="+", choices=_PLACES, default=_PLACES, metavar="PLACE", help=str(list(_PLACES)))
    parser.add_argument("--checks", nargs="+", default=[], metavar="CHECK", help="only those; by default all")
    parser.add_argument("--json", metavar="PATH", help="also write everything there")
    parser.add_argument("--dry-run", action="store_true", help="run on logical CPUs where there is no GPU")
    parser.add_argument("--markdown", action="store_true", help=f"run nothing: print what {RESULTS.name}/gpu-*.json hold")
    chosen = parser.parse_args(arguments)
    if chosen.markdown:
        print(markdown())
        return 0
    gpus = driver_gpus()
    if not gpus and not chosen.dry_run:
        parser.error("there is no GPU here. --dry-run runs on logical CPUs what can run there.")
    places = [place for place in chosen.places if place != "several devices" or len(gpus) > 1]
    over = ", NCCL" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else ""
    findings = [{"place": place + over, **finding} for place in places for finding in _findings(place, chosen.checks)]
    _show(findings, on="logical CPUs" if not gpus else ", ".join(gpu.name for gpu in gpus))
    if chosen.json:
        whole = {"machine": machine() | {"gpus": [gpu.name for gpu in gpus]}, "version": __version__, "commit": _commit()}
        Path(chosen.json).write_text(json.dumps(whole | {"findings": findings}, indent=2) + "\n", "utf-8")
    return 0 if all(finding["ok"] for finding in findings) else 1


def _findings(place: str, checks: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Runs the checks of a place in a process of its own: devices can be cut once only in each."""
    command = [sys.executable, "-m", "benchmarks.gpu_worker", place, *checks]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            text, _ = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate()
    yield from (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    if process.returncode:
        found = f"exit code {process.returncode}"
        yield {"check": "the process", "expected": "ends well", "found": found, "ok": False, "seconds": 0.0}


def _show(findings: Iterable[dict[str, Any]], on: str) -> None:
    table = Table(*_HEADINGS, title=f"On {on}")
    for f in findings:
        table.add_row(f["place"], f["check"], f["expected"], f["found"], "ok" if f["ok"] else "NOT ok")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def markdown() -> str:
    """Makes the table of `docs/gpu_measurements.md`: what was found on real GPUs, and what was never run on one.

    Returns:
        A Markdown table, one line for each check that some file in `benchmarks/results` holds, or one that says that
        there is none.
    """
    lines = ["| GPUs | place | check | expected | found | |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("gpu-*.json")):
        whole = json.loads(path.read_text("utf-8"))
        names = ", ".join(whole["machine"]["gpus"])
        for f in whole["findings"]:
            cells = (names, f["place"], f["check"], f["expected"], f["found"], "ok" if f["ok"] else "NOT ok")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if len(lines) == 2:
        lines.append("| none yet | all | all | see `python -m benchmarks.gpu --dry-run` | never run on real hardware | |")
    return "\n".join(lines)


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
