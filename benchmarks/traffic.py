"""What a training step sends, in how many collectives, and what these wait for: `python -m benchmarks.traffic`.

Two ranks train under `tfrep run --profile`. A trace tells when each collective ran, and Horovod's timeline what Horovod did
meanwhile. The loopback interface counts bytes, and ranks count those that they write to common memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.crews import usable_communicators
from benchmarks.horovod_timeline import phases
from benchmarks.overlap import traced_steps
from benchmarks.report import write_json
from benchmarks.step import NETS
from tfrep_strategy.processes.cores import thread_variables

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"compression": "bf16"},
    "sharded": {"shard_optimizer_state": True},
    "sharded, bf16": {"shard_optimizer_state": True, "compression": "bf16"},
}
_NETS = ("tiny", "5 million")
_PROGRAM = Path(__file__).with_name("traffic_program.py")
_REPOSITORY = Path(__file__).resolve().parent.parent
_LIMIT_SECONDS = 300.0
HEADS = ("collectives", "their ms", "step, ms", "MB", "bucket, MiB")


def measure(net: str, communicator: str, setting: str) -> dict[str, Any]:
    """Trains a net with two ranks.

    Args:
        net: One of `benchmarks.step.NETS`.
        communicator: The transport.
        setting: One of `SETTINGS`.

    Returns:
        Of a step: how many collectives there are, and how long one of them is under way, in ms; its own ms; the bytes that both
        ranks send; the bytes of a bucket; over Horovod the ms of its phases.
    """
    with tempfile.TemporaryDirectory(prefix="tfrep-traffic-") as folder:
        timeline = Path(folder, "timeline.json")
        environ = os.environ | thread_variables(2) | {"PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *sys.path[1:]])}
        if communicator == "horovod":
            environ["HOROVOD_TIMELINE"] = str(timeline)
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", communicator]
        command += ["--profile", "6:11", "--profile-dir", folder, str(_PROGRAM), folder, net, json.dumps(SETTINGS[setting])]
        done = subprocess.run(command, check=False, timeout=_LIMIT_SECONDS, capture_output=True, text=True, env=environ)
        if done.returncode:
            raise RuntimeError(f"{net}, {communicator}, {setting}: the run failed.\n{done.stderr[-3000:]}")
        steps = traced_steps(Path(folder))
        counted = json.loads(Path(folder, "counted.json").read_text("utf-8"))
        of_horovod = {"horovod_ms": phases(timeline, counted["steps"])} if timeline.is_file() else {}
    return {
        "collectives": statistics.median(len(step["timeline_ms"]["collectives"]) for step in steps),
        "collectives_ms": statistics.median(step["collectives_ms"] for step in steps),
        "step_ms": statistics.median(step["step_ms"] for step in steps),
        **counted,
        **of_horovod,
    }


def row(measured: dict[str, Any]) -> list[str]:
    """Returns a line of a table, in the order of `HEADS`."""
    milliseconds = f"{measured['collectives_ms']:.1f}", f"{measured['step_ms']:.1f}"
    sent = f"{measured['bytes'] / 1e6:.{1 if measured['bytes'] > 1e6 else 3}f}"
    return [f"{measured['collectives']:g}", *milliseconds, sent, f"{measured['bucket_bytes'] >> 20}"]


def show(results: dict[str, Any]) -> None:
    """Prints a table, and what Horovod does."""
    table = Table(title="Of a step of two processes. The bytes are those of both")
    for head in ("net", "communicator", "gradients", *HEADS):
        table.add_column(head, justify="right" if head in HEADS else "left")
    for net, communicators in results.items():
        for communicator, settings in communicators.items():
            for setting, measured in settings.items():
                table.add_row(net, communicator, setting, *row(measured))
    console = Console(width=110)
    console.print(table)
    for net, communicators in results.items():
        for setting, measured in communicators.get("horovod", {}).items():
            listed = ", ".join(f"{name} {ms:.2f}" for name, ms in measured["horovod_ms"].items())
            console.print(f"{net}, {setting}: Horovod's milliseconds of a step: {listed}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by net, communicator and setting.
    """
    installed = usable_communicators()
    parser = argparse.ArgumentParser("python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=_NETS, metavar="NET")
    parser.add_argument("--communicators", nargs="+", choices=installed, default=installed, metavar="NAME")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    results = {
        net: {
            communicator: {setting: measure(net, communicator, setting) for setting in chosen.settings}
            for communicator in chosen.communicators
        }
        for net in chosen.nets
    }
    show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
