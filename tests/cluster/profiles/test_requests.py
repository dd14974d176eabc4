"""Processes trace themselves when they are asked to, and those who ask hear of those who do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from calling import command
from raising import refuses

from tfrep_strategy.cluster.profiles.requests import ProfileRequest, answer_requests, find_run, keep_profile_dir, name_of_folder
from tfrep_strategy.errors import PeerError

pytestmark = pytest.mark.lane("profiles")

Start = Callable[[str], "subprocess.Popen[str]"]


def answer(folder: str, who: str) -> None:
    import tensorflow as tf

    answer_requests(Path(folder), who)
    matrix = tf.ones([100, 100])
    print("here", flush=True)
    while Path(folder).exists():
        tf.linalg.matmul(matrix, matrix).numpy()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that can be asked in the folder `asked`."""
    (tmp_path / "asked").mkdir()
    processes: list[subprocess.Popen[str]] = []

    def started(who: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(answer, str(tmp_path / "asked"), who),
            stdout=subprocess.PIPE, text=True, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def test_all_trace_at_the_same_time(start: Start, tmp_path: Path) -> None:
    start("rank0"), start("rank1")
    asked = ProfileRequest(tmp_path / "asked", tmp_path / "run")
    with refuses(hint="wait", pid=str(os.getpid())):
        ProfileRequest(tmp_path / "asked", tmp_path / "other")
    asked.wait(0.3)
    reports = asked.end()
    assert [report.who for report in reports] == ["rank0", "rank1"]
    for report in reports:
        assert report.problem == ""
        assert report.traced == pytest.approx(0.3, rel=1)
        assert report.compute > 0
    assert sorted(path.name.rpartition("_")[2] for path in (tmp_path / "run").iterdir()) == ["rank0.xplane.pb", "rank1.xplane.pb"]
    assert not list((tmp_path / "asked").glob("*.request"))


def test_a_process_that_does_not_answer(start: Start, tmp_path: Path) -> None:
    start("rank0")
    dies = start("rank1")
    asked = ProfileRequest(tmp_path / "asked", tmp_path / "run")
    dies.send_signal(signal.SIGKILL)
    dies.wait(10)
    first, second = asked.end()
    assert first.problem == ""
    assert (second.who, second.problem) == ("rank1", "it has ended, or did not answer.")


def test_all_processes_end(start: Start, tmp_path: Path) -> None:
    process = start("rank0")
    asked = ProfileRequest(tmp_path / "asked", tmp_path / "run")
    process.kill()
    process.wait(10)
    began = time.monotonic()
    asked.wait(60.0)
    with refuses(PeerError, hint="take fewer seconds", run=...):
        asked.end()
    assert time.monotonic() - began < 5


def test_nobody_is_there(tmp_path: Path) -> None:
    with refuses(told=["traced yet"], run=...):
        ProfileRequest(tmp_path, tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    (tmp_path / "rank0.profiled").write_text(done.stdout, "utf-8")
    with refuses(told=["traced yet"], run=...):
        ProfileRequest(tmp_path, tmp_path / "run")


def test_a_run_is_found_by_its_process_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix=name_of_folder()) as name:
        keep_profile_dir(Path(name), Path("traces"))
        assert find_run(os.getpid()) == (Path(name), Path("traces"))
    for pid in (os.getpid(), 2**30):
        with refuses(told=["has ended"], run=pid):
            find_run(pid)
