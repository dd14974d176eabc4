"""Kills the processes of a cluster of parameter servers, whose script is run by `tfrep run`."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
from disturbed import environ
from injecting import START_SECONDS

SCRIPT = Path(__file__).resolve().parents[1] / "strategies" / "scripts" / "backed_up.py"
ALL, COORDINATOR = "all servers and workers are killed", "the coordinator is killed"
NAMES = {"ps0.log": "a server is killed", "worker0.log": "a worker is killed", "worker1.log": "a worker is killed"}
KINDS = sorted({ALL, COORDINATOR, *NAMES.values()})


def processes_of(launcher: int) -> dict[str, psutil.Process]:
    """Returns the processes of a run that may be killed."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            if "tfrep_strategy.running.script" in command:
                found[COORDINATOR] = process
            elif "tfrep_strategy.cluster.local_cluster" in command:
                log = os.path.basename(os.readlink(f"/proc/{process.pid}/fd/1"))
                found[NAMES.get(log, ALL)] = process
    return found


def killed_run(folder: Path, kills: int, rng: random.Random) -> tuple[str, dict[str, int]]:
    """Runs the script, and kills processes while it runs: at random times, of each kind as many.

    Returns:
        What it wrote to standard output, and how many of each kind were killed.
    """
    options = ["--strategy", "parameter-server", "--workers", "2", "--servers", "1", "--max-restarts", "10"]
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *options, str(SCRIPT)]
    paths = [folder / "output", folder / "errors"]
    with open(paths[0], "w") as output, open(paths[1], "w") as errors:
        run = subprocess.Popen(command, cwd=folder, env=environ(), stdout=output, stderr=errors)
    counts: dict[str, int] = defaultdict(int)
    wanted = rng.sample(KINDS, len(KINDS))
    try:
        while run.poll() is None and sum(counts.values()) < kills:
            time.sleep(0.05)
            with contextlib.suppress(psutil.Error, KeyError):
                what = wanted[sum(counts.values()) % len(wanted)]
                if what in processes_of(run.pid):
                    time.sleep(rng.uniform(0, 6))
                    processes_of(run.pid)[what].kill()
                    counts[what] += 1
        assert run.wait(START_SECONDS) == 0, paths[1].read_text()[-3000:]
    finally:
        run.terminate()
        run.wait(START_SECONDS)
    return paths[0].read_text(), counts
