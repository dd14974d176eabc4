"""Runs into which faults are injected: on this machine, or on two network namespaces that stand for machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from networks import ADDRESS, on

from tfrep_strategy.cluster.identity import inherited_environ

SCRIPT = Path(__file__).with_name("scripts") / "trains_and_tells.py"
_END_SECONDS = 30.0
_RANK = "tfrep_strategy.running.script"


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        options: Of `tfrep run`.
        hosts: The network namespaces in which its launchers run; none: it has one launcher, here.
        more: Options of each launcher.
    """

    options: Sequence[str]
    hosts: Sequence[str] = ()
    more: Sequence[Sequence[str]] = ((),)

    @classmethod
    def on_hosts(cls, hosts: Sequence[str], nnodes: str, communicator: str) -> Kind:
        """Returns a kind of run with a rank on each host."""
        options = ["-n", "1", "--communicator", communicator, "--nnodes", nnodes, "--rendezvous", ADDRESS]
        return cls(options, hosts, [["--node-rank", str(number)] for number in range(2)] if nnodes == "2" else [(), ()])


class Run:
    """One run of the script, whose launchers are started again by hand where they end.

    Args:
        kind: What kind of run.
        folder: An empty folder, in which it works.
        backups: The folder of its backups.
        variables: Environment variables.
    """

    def __init__(self, kind: Kind, folder: Path, backups: Path, variables: dict[str, str]) -> None:
        self.kind, self.backups, self.codes, self._in_vain = kind, backups, frozenset[int](), 0
        self._folder, self._variables = folder, variables
        self.launchers = [self._start(number) for number in range(len(kind.more))]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        kind = self.kind
        command = [*(on(kind.hosts[number]) if kind.hosts else []), sys.executable, "-m", "tfrep_strategy.cli", "run"]
        command += [*kind.options, *kind.more[number], "--log-dir", str(self._folder / f"logs{number}")]
        command += ["--max-restarts", "1000", "--backup-dir", str(self.backups), str(SCRIPT)]
        self.temporary(number).mkdir(exist_ok=True)
        own = {"TFREP_BACKUP_SECONDS": "0", "TFREP_TIMEOUT": "10", "TFREP_GRACE": "15"}
        own |= {"TMPDIR": str(self.temporary(number))} | self._variables
        with open(self._folder / "output", "a") as output, open(self._folder / "errors", "a") as errors:
            return subprocess.Popen(
                command, cwd=self._folder, env=environ(**own), stdout=output, stderr=errors, stdin=subprocess.DEVNULL
            )

    def temporary(self, number: int) -> Path:
        """Returns the folder for temporary files of a launcher and its ranks."""
        return self._folder / f"tmp{number}"

    def left(self) -> list[Path]:
        """Returns what is left of its temporary files and of its backups."""
        temporary = (self.temporary(number) for number in range(len(self.launchers)))
        return [path for folder in (self.backups, *temporary) for path in folder.iterdir()]

    def go_on(self) -> None:
        """Starts launchers again that have ended with a code that the last fault explains, as whatever has started them would."""
        for number, launcher in enumerate(self.launchers):
            if launcher.poll() is not None:
                assert self.is_expected(launcher.returncode), f"launcher {number}: {launcher.returncode}. {self.errors}"
                self.launchers[number] = self._start(number)

    def expect(self, codes: Collection[int], in_vain: int) -> None:
        """Lets launchers end with these exit codes from now on, beside 0, or in vain: they have so often until now."""
        self.codes, self._in_vain = frozenset(codes), in_vain

    def times_in_vain(self) -> int:
        """Returns how often launchers have given up a step that two faults had hit."""
        return (self._folder / "errors").read_text().count("twice at the same step")

    def is_expected(self, code: int) -> bool:
        """Whether the last fault explains the exit code of a launcher. What comes too late ends nothing.

        Two faults that are drawn for one step look like a step that fails, and such a run is not started again.
        """
        return code in self.codes or code == 0 or self.times_in_vain() > self._in_vain

    @property
    def is_over(self) -> bool:
        """Whether it has ended well. The launcher with rank 0 ends last, or knows that the others end."""
        return self.launchers[0].poll() == 0

    def ranks(self) -> list[psutil.Process]:
        """Returns the ranks that run now."""
        return [rank for number in range(len(self.launchers)) for rank in self.ranks_of(number)]

    def ranks_of(self, number: int) -> list[psutil.Process]:
        """Returns the ranks of a launcher that run now."""
        found = []
        for process in self._processes_of(number):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                line = " ".join(process.cmdline())
                if os.getsid(process.pid) == process.pid and _RANK in line:
                    found.append(process)
        return found

    def _processes_of(self, number: int) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.launchers[number].pid).children(recursive=True)
        return []

    def does(self, aim: str) -> bool:
        """Whether a rank does now what a fault is aimed at."""
        if aim == "backup":
            return any(self.backups.glob("fit-*/.tfrep-*"))
        return aim in [self._told(rank.pid) for rank in self.ranks()]

    def _told(self, pid: int) -> str:
        file = self._folder / "told" / str(pid)
        return file.read_text() if file.exists() else "start-up"

    @property
    def errors(self) -> str:
        """What it has said at last."""
        logs = "".join(f"\n{file}:\n{file.read_text()[-1500:]}" for file in self._folder.glob("logs*/*.log"))
        return (self._folder / "errors").read_text()[-4000:] + logs

    def found(self) -> dict[str, Any]:
        """Returns what it has learned."""
        return found_in((self._folder / "output").read_text())

    def end(self) -> None:
        """Ends what is left of it: a launcher that was started again too late, or all if a test has failed."""
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in self.launchers:
            launcher.wait(_END_SECONDS)


def environ(**own: str) -> dict[str, str]:
    """The environment of a run."""
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited_environ() | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"} | own


def found_in(output: str) -> dict[str, Any]:
    """Returns what the script has printed last."""
    return json.loads(output.rpartition("FOUND ")[2])


def kinds_on_hosts(hosts: Sequence[str], communicators: Sequence[str]) -> Iterator[Kind]:
    """Yields runs on two machines that wait for each other, and runs in which one goes on."""
    for nnodes in ("2", "1:2"):
        for communicator in communicators:
            yield Kind.on_hosts(hosts, nnodes, communicator)
