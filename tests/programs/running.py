"""Runs a script as its author would, on one device or with `tfrep run`, and tells what came out and what was left behind.

A script gets a folder of its own and a process of its own. The process is a fork of one that has imported TensorFlow and
Keras, and nothing else: importing them costs seconds each time. The ranks of a run are started by `tfrep run` as always.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import psutil

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tensorflow", "keras", "matplotlib.pyplot"])
_DOWNLOAD_LOCK = "tfrep-download-*.lock"  # It stays: were it removed, two processes could hold two locks of one name.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "MPLBACKEND": "Agg"}


@dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Attributes:
        code: Its exit code.
        output: What it printed, on rank 0.
        logs: What the other ranks printed.
        files: Paths of the files that it wrote, without what names a time or a process.
        left: Processes and temporary files that should not be there any more.
    """

    code: int | None
    output: str
    logs: list[str]
    files: list[str]
    left: list[str]

    @property
    def results(self) -> list[Any]:
        """The results of each rank: the JSON that a script prints last."""
        return [json.loads(_last_json(text)) for text in (self.output, *self.logs)]


class Running:
    """A script that has been started.

    Args:
        script: The script.
        arguments: Its command line.
        folder: An empty folder, in which it runs.
        options: Options of `tfrep run`; None: it runs on one device.
        how: "run", or "verify" for `tfrep verify`.
    """

    def __init__(self, script: Path, arguments: list[str], folder: Path, options: tuple[str, ...] | None, how: str = "run") -> None:
        self._folder, self._temporary = folder / "project", folder / "tmp"
        self._output, self._logs = folder / "output.txt", folder / "logs"
        self._folder.mkdir(parents=True)
        self._temporary.mkdir()
        shutil.copy(script, self._folder)
        with resources.as_file(resources.files("tfrep_strategy") / "contrib" / "digits.npz") as digits:
            shutil.copy(digits, self._folder)
        command = [script.name, *arguments]
        if options is not None:
            logs = ["--log-dir", str(self._logs)] if how == "run" else []
            command = ["tfrep", how, "-n", "2", *logs, *options, *command]
        self._process = _FORKS.Process(target=_run, args=(command, self._folder, self._temporary, self._output))
        self._process.start()

    def end(self, limit: float) -> Outcome:
        """Waits until the script has ended, and ends it after `limit` seconds."""
        self._process.join(limit)
        late = self._process.is_alive()
        if late:
            self._process.terminate()
            self._process.join(20)
        left = [f"process {each.pid}: {each.info['cmdline']}" for each in self._processes()]
        left += [f"temporary file {path.name}" for path in self._temporary.iterdir() if not path.match(_DOWNLOAD_LOCK)]
        logs = sorted(self._logs.glob("rank*.log"))
        return Outcome(
            code=None if late else self._process.exitcode,
            output=self._output.read_text("utf-8", "replace"),
            logs=[log.read_text("utf-8", "replace") for log in logs],
            files=sorted(self._files()),
            left=left,
        )

    def _files(self) -> Iterator[str]:
        for path in self._folder.rglob("*"):
            if path.is_file():
                yield re.sub(r"\d+", "#", str(path.relative_to(self._folder)))

    def _processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(self._folder)]


def _last_json(text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if line.startswith("{"))


def _run(command: list[str], folder: Path, temporary: Path, output: Path) -> None:
    """Is the life of the process that `python script.py` or `tfrep run script.py` would be."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.update(_QUIET, TMPDIR=str(temporary))
    tempfile.tempdir = None
    sys.argv = command
    if command[0] == "tfrep":
        from tfrep_strategy.cli import main

        main()
    else:
        sys.path.insert(0, str(folder))
        runpy.run_path(command[0], run_name="__main__")
