"""Faults that are injected into a run from outside, and what becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfrep_strategy.processes.identity import inherited_environ

SCRIPT = Path(__file__).with_name("scripts") / "trains_and_tells.py"
START_SECONDS = 150.0
"""How long a run may take until it does what a fault is aimed at, or ends."""
LIMIT, LIMIT_OF_DISKS = 20.0, 60.0
"""Within how many seconds of a fault the ranks have ended. A full disk is noticed by the next backup."""
AIMS = ("start-up", "steps", "backup", "evaluation", "end")
ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class Run:
    """One run of the script, which is started again by hand where its launcher ends.

    Args:
        options: Of `tfrep run`.
        folder: An empty folder, in which it works.
        backups: The folder of its backups.
    """

    def __init__(self, options: Sequence[str], folder: Path, backups: Path) -> None:
        self.is_alone = "mirrored" in options
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *options, "--max-restarts", "1000"]
        self._command = [*command, "--backup-dir", str(backups), str(SCRIPT)]
        self._folder, self.backups = folder, backups
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again."""
        own = {"TFREP_BACKUP_SECONDS": "0", "TFREP_TIMEOUT": "10", "TFREP_WARNING_SIGNAL": "USR1", "TFREP_GRACE": "15"}
        with open(self._folder / "output", "a") as output, open(self._folder / "errors", "a") as errors:
            self.launcher = subprocess.Popen(
                self._command, cwd=self._folder, env=environ(**own), stdout=output, stderr=errors, stdin=subprocess.DEVNULL
            )

    def ranks(self) -> list[psutil.Process]:
        """Returns the ranks that run now."""
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "tfrep_strategy.running.script" in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def does(self, aim: str) -> bool:
        """Whether a rank does now what a fault is aimed at."""
        if aim == "backup":
            return any(self.backups.glob("fit-*/.tfrep-*"))
        files = [self._folder / "told" / str(rank.pid) for rank in self.ranks()]
        told = [file.read_text() if file.exists() else "start-up" for file in files]
        return aim in told

    @property
    def errors(self) -> str:
        """What it has said."""
        return (self._folder / "errors").read_text()

    def found(self) -> dict[str, Any]:
        """Returns what it has learned."""
        return found_in((self._folder / "output").read_text())

    def end(self) -> None:
        """Ends it, if a test has failed."""
        self.launcher.terminate()
        self.launcher.wait(LIMIT)


def environ(**own: str) -> dict[str, str]:
    """The environment of a run."""
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited_environ() | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"} | own


def found_in(output: str) -> dict[str, Any]:
    """Returns what the script has printed last."""
    return json.loads(output.rpartition("FOUND ")[2])


# What may happen. Each function makes it happen, and returns the exit codes of the launcher if that is to end.

Fault = Callable[[Run, random.Random], Sequence[int] | None]


def kill_a_rank(run: Run, rng: random.Random) -> None:
    rng.choice(run.ranks()).kill()


def stop_a_rank(run: Run, rng: random.Random) -> None:
    rng.choice(run.ranks()).suspend()


def kill_the_launcher(run: Run, rng: random.Random) -> Sequence[int]:
    run.launcher.kill()
    return (-signal.SIGKILL,)


def ask_the_launcher(run: Run, rng: random.Random) -> Sequence[int]:
    run.launcher.send_signal(rng.choice([signal.SIGTERM, signal.SIGUSR1]))
    return ASKED


def warn_all(run: Run, rng: random.Random) -> Sequence[int]:
    """A scheduler may send its signal to all processes."""
    for process in [*run.ranks(), psutil.Process(run.launcher.pid)]:
        process.send_signal(signal.SIGUSR1)
    return ASKED


def fill_the_disk(run: Run, rng: random.Random) -> Sequence[int]:
    """The next backup fails, if there is one."""
    with contextlib.suppress(OSError), open(run.backups / "filler", "wb") as filler:
        while True:
            filler.write(b"0" * 4096)
            filler.flush()
    return (0, 1)


def send_garbage(run: Run, rng: random.Random) -> None:
    """Strangers connect to every port; some stay, and say nothing."""
    with contextlib.ExitStack() as stack:
        for rank in run.ranks():
            with contextlib.suppress(psutil.Error):
                for each in rank.net_connections("tcp"):
                    for content in (b"", rng.randbytes(500), b"GET / HTTP/1.1\r\n\r\n"):
                        with contextlib.suppress(OSError):
                            stranger = stack.enter_context(socket.create_connection(each.laddr, timeout=1.0))
                            stranger.sendall(content)
        time.sleep(1.0)


ENDS_RANKS: dict[str, Fault] = {
    "a rank is killed": kill_a_rank,
    "a rank is stopped": stop_a_rank,
    "the launcher is killed": kill_the_launcher,
    "the launcher is asked to end": ask_the_launcher,
    "all processes are warned": warn_all,
    "the disk is full": fill_the_disk,
}
ENDS_NOBODY: dict[str, Fault] = {"strangers send garbage": send_garbage}
FAULTS = ENDS_RANKS | ENDS_NOBODY


class Table:
    """What was tried, and what came of it."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    @property
    def count(self) -> int:
        """How many faults there were."""
        return sum(map(len, self.seconds.values()))

    def __str__(self) -> str:
        lines = ["| what happens | aimed at | how many | another result | longest time |", "|---|---|---|---|---|"]
        for (what, aim), seconds in sorted(self.seconds.items()):
            lines.append(f"| {what} | {aim} | {len(seconds)} | 0 | {max(seconds):.1f} s |")
        return "\n".join(lines)


def inject(run: Run, what: str, aim: str, rng: random.Random, table: Table) -> bool:
    """Waits until a run does something, has something happen then, and waits until the ranks have ended for which it is a reason.

    Returns:
        Whether the run is over: it has ended well. Where it has ended otherwise it is started again.
    """
    if run.is_alone and what == "a rank is stopped":
        return False  # Nobody waits for it.
    deadline = time.monotonic() + START_SECONDS
    while not run.does(aim):
        if run.launcher.poll() is not None:
            assert run.launcher.returncode == 0, f"{what}, {aim}: {run.errors[-3000:]}"
            return True
        assert time.monotonic() < deadline, f"{what}: no {aim} after {START_SECONDS} seconds. {run.errors[-3000:]}"
        time.sleep(0.002)
    time.sleep({"start-up": rng.uniform(0, 5), "backup": 0.0}.get(aim, rng.uniform(0, 0.2)))
    began, ranks, launcher = time.monotonic(), run.ranks(), run.launcher
    if not ranks or launcher.poll() is not None:
        return False  # Too late; the next fault finds out.
    try:
        codes = FAULTS[what](run, rng)
    except (psutil.NoSuchProcess, IndexError):  # There is no rank any more.
        return False
    if what in ENDS_RANKS:
        limit = LIMIT_OF_DISKS if what == "the disk is full" else LIMIT
        _, alive = psutil.wait_procs(ranks, limit)
        assert not alive, f"{what}, {aim}: {len(alive)} of {len(ranks)} ranks were there after {limit} s. {run.errors[-3000:]}"
    table.seconds[what, aim].append(time.monotonic() - began)
    if codes is None:
        return False
    code = launcher.wait(LIMIT)
    (run.backups / "filler").unlink(missing_ok=True)
    # What comes too late ends nothing.
    assert code in (*codes, 0), f"{what}, {aim}: exit code {code}. {run.errors[-3000:]}"
    if code != 0:
        run.start()
    return code == 0


def finish(run: Run) -> None:
    """Waits until a run has ended well."""
    code = run.launcher.wait(START_SECONDS)
    assert code == 0, f"exit code {code}. {run.errors[-3000:]}"
