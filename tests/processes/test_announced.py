"""Runs are found while they run, and not afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calling import command

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.processes.announced import announced, find_run

pytestmark = pytest.mark.lane("quick")

FILE = "tfrep-run.json"


def announce_and_wait(logs: str) -> None:
    with announced(Path(logs), Path(logs), Path("traces")):
        print("here", flush=True)
        sys.stdin.read()


def test_as_long_as_it_runs(tmp_path: Path) -> None:
    with announced(tmp_path, tmp_path / "notes", tmp_path / "traces"):
        (tmp_path / "notes").mkdir()
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
        for name in (str(tmp_path), os.path.relpath(tmp_path), str(os.getpid())):
            found = find_run(name)
            assert (found.pid, found.log_dir) == (os.getpid(), str(tmp_path))
            assert (found.note_dir, found.profile_dir) == (str(tmp_path / "notes"), str(tmp_path / "traces"))
    assert not (tmp_path / FILE).exists()
    for name in (str(tmp_path), str(os.getpid())):
        with pytest.raises(ConfigurationError, match=r"has ended.*Received: run='.*'\nHint: "):
            find_run(name)


@pytest.mark.parametrize("ends_by", [None, signal.SIGKILL])
def test_a_launcher_of_another_process(ends_by: int | None, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(announce_and_wait, str(tmp_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "here\n"
        assert find_run(str(process.pid)) == find_run(str(tmp_path))
        with pytest.raises(ConfigurationError, match=rf"no such folder.*\nHint: .*process {process.pid} \(logs: {tmp_path}\)"):
            find_run("nowhere")
        if ends_by is None:
            process.stdin.close()
        else:
            process.send_signal(ends_by)
        process.wait(30)
    assert (tmp_path / FILE).exists() == (ends_by is not None)
    for name in (str(tmp_path), str(process.pid)):
        with pytest.raises(ConfigurationError, match=rf"has ended.*Received: run='{name}'"):
            find_run(name)


def test_a_later_run_with_the_same_logs(tmp_path: Path) -> None:
    with contextlib.ExitStack() as first, announced(tmp_path, tmp_path, Path("second")):
        assert find_run(str(tmp_path)).profile_dir == "second"
        first.enter_context(announced(tmp_path, tmp_path, Path("third")))
        assert find_run(str(tmp_path)).profile_dir == "third"
    earlier = announced(tmp_path, tmp_path, Path("first"))
    earlier.__enter__()
    with announced(tmp_path, tmp_path, Path("second")):
        earlier.__exit__(None, None, None)
        assert find_run(str(tmp_path)).profile_dir == "second"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": 1}', "\x00", json.dumps({"pid": "x"})])
def test_a_file_that_no_launcher_has_written(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content, "utf-8")
    with pytest.raises(ConfigurationError, match="Received: run="):
        find_run(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    with announced(tmp_path, tmp_path, Path("traces")):
        os.chown(tmp_path / FILE, 12345, 12345)
        with pytest.raises(ConfigurationError, match="another user"):
            find_run(str(tmp_path))
