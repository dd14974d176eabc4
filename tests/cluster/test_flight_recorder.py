"""The record of the last collectives, and the report of a hang: of real processes, in each of the ways in which one hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from needs import needs_horovod

from tfrep_strategy.cluster.flight_recorder import KEPT, Hang, Recorder, Whereabouts, hang_of, read_flights, read_hang
from tfrep_strategy.cluster.hardware import SHARES_MEMORY
from tfrep_strategy.core.calls import Call

PROGRAM = Path(__file__).parent / "scripts" / "hangs.py"
SUM = Call("all_reduce", "sum", (("float32", (3,)),), "train.py:7")
LIMIT = 6


def line_of(text: str) -> str:
    """Returns the place of a line of the program."""
    [number] = [number for number, line in enumerate(PROGRAM.read_text("utf-8").splitlines(), 1) if text in line]
    return re.escape(f"{PROGRAM}:{number}")


def run(communicator: str, kind: str, folder: Path) -> str:
    """Runs the program on two ranks, and returns its output."""
    command = [sys.executable, "-m", "tfrep_strategy.cli"]
    environ = os.environ | {"TFREP_TIMEOUT": str(LIMIT), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    options = ["run", "-n", "2", "--communicator", communicator, "--log-dir", str(folder / "logs"), str(PROGRAM), kind, str(folder)]
    done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0, done.stdout + done.stderr
    # TensorFlow copies an error into the next one.
    return done.stdout + done.stderr


def table(folder: Path) -> str:
    """Returns what `tfrep doctor --hang` prints, without the breaks of lines in the cells."""
    command = [sys.executable, "-m", "tfrep_strategy.cli", "doctor", "--hang", str(folder / "logs")]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "300"}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SHARED = pytest.param("shared_memory", marks=pytest.mark.skipif(not SHARES_MEMORY, reason="needs shared memory"))
ALL = ["tf", SHARED, pytest.param("horovod", marks=needs_horovod), pytest.param("horovod-eager", marks=needs_horovod)]


@pytest.mark.lane("faults")
@pytest.mark.parametrize("communicator", ALL)
@pytest.mark.parametrize(("kind", "line"), [("python", "time.sleep(SECONDS)"), ("io", "with open(folder")])
def test_a_rank_that_does_not_come(communicator: str, kind: str, line: str, tmp_path: Path) -> None:
    """It is in Python code, or waits for a file. The other one waits in native code."""
    communicator, _, eager = communicator.partition("-")
    output = run(communicator, f"{kind}-{eager}" if eager else kind, tmp_path)
    hang = read_hang(tmp_path / "logs")
    assert hang is not None
    assert re.fullmatch(r"Rank 1 has called no collective for \d+ seconds, and others wait\.", hang.what)
    assert hang.lags == 1
    called = "# Eagerly." if eager else "return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))"
    what = rf"all_reduce\(float32\[3\], .*\), number \d+ of ranks 0-1, at {line_of(called)}"
    assert re.match(rf"in {what} for \d+ s; Python is at {PROGRAM}:\d+ in (main|<lambda>)", hang.ranks[0])
    function = "think" if kind == "python" else "read"
    after = r"in no collective for \d+ s, after .*, number \d+ of ranks 0-1, at "
    assert re.match(rf"{after}.*; Python is at {line_of(line)} in {function}", hang.ranks[1])
    for sentence in [hang.what, *hang.lines()]:
        assert sentence in output
    flights = read_flights(tmp_path / "logs")
    assert list(flights) == [0, 1]
    assert flights[1].collectives[-1].state == "done"
    shown = table(tmp_path)
    assert hang.what in shown
    assert re.search(r"lags +│ +1 +│", shown)


@pytest.mark.lane("faults")
@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod)])
def test_ranks_in_different_collectives(communicator: str, tmp_path: Path) -> None:
    """Over shared memory they would be refused at once."""
    output = run(communicator, "order", tmp_path)
    hang = read_hang(tmp_path / "logs")
    assert hang is not None
    assert hang.what == f"Only some of the ranks 0, 1 called a collective in which others have waited for {LIMIT} seconds."
    for rank, (place, line) in enumerate(
        (("step", "return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))"), ("end", '[3]), "max")'))
    ):
        what = rf"in all_reduce\(float32\[3\], in {place}\..*\), number \d+ of ranks 0-1, at {line_of(line)} for \d+ s; "
        assert re.match(rf"{what}Python is at {line_of('(end if hangs else step)()')} in main", hang.ranks[rank])
    assert hang.lags is None
    for sentence in [hang.what, *hang.lines()]:
        assert sentence in output
    assert list(read_flights(tmp_path / "logs")) == [0, 1]


@pytest.mark.lane("faults")
@pytest.mark.parametrize("communicator", ["tf", SHARED])
def test_a_rank_that_is_stopped(communicator: str, tmp_path: Path) -> None:
    """Its launcher reads from its last sign of life where it was. The program stops after a sign that it is there."""
    output = run(communicator, "stop", tmp_path)
    hang = read_hang(tmp_path / "logs")
    assert hang is not None
    seen = r"is stopped \(state T\), for \d+ seconds by now"
    assert re.fullmatch(rf"Rank 1 {seen}\.", hang.what)
    step = rf"number (\d+) of ranks 0-1, at {line_of('return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))')}"
    waits = re.match(rf"in all_reduce\(float32\[3\], .*\), {step} for \d+ s; ", hang.ranks[0])
    before = rf"before that in no collective for \d+ s, after all_reduce\(float32.*\), {step}"
    stopped = re.match(rf"{seen}; {before}; Python is at {re.escape(str(PROGRAM))}:\d+ in stop", hang.ranks[1])
    assert waits, hang.ranks
    assert stopped, hang.ranks
    assert int(stopped[1]) + 1 == int(waits[1]), "it has not begun the next one"
    assert hang.lags == 1
    for sentence in hang.lines():
        assert sentence in output


def test_the_last_collectives_are_kept() -> None:
    recorder = Recorder()
    for _ in range(KEPT + 5):
        with recorder.collective(range(2), SUM):
            pass
    entered = recorder.enter(range(2), SUM)
    kept = recorder.collectives()
    assert len(kept) == KEPT
    assert [kept[0].number, kept[-1].number] == [7, KEPT + 6]
    assert {each.state for each in kept[:-1]} == {"done"}
    assert str(kept[-1]) == f"all_reduce(float32[3], sum), number {KEPT + 6} of ranks 0-1, at train.py:7"
    where = recorder.whereabouts()
    assert [each.number for each in where.now] == [KEPT + 6]
    assert where.last is not None
    assert where.last.number == KEPT + 5
    assert f"{__file__}:" in where.python
    recorder.leave(entered)
    assert recorder.whereabouts().now == []
    assert Whereabouts.of_json(json.loads(json.dumps(asdict(recorder.whereabouts())))).counts == {"0-1": KEPT + 6}


def test_a_rank_in_a_group_lags_among_its_members_only() -> None:
    recorder = Recorder()
    recorder.enter((0, 2), SUM)
    inside, ahead = recorder.whereabouts(), Whereabouts(counts={"0, 2": 1, "1, 3": 7})
    behind = Whereabouts(counts={"1, 3": 1})
    assert hang_of("", {0: inside, 1: behind, 2: ahead}, {}).lags == 2
    assert hang_of("", {0: inside, 1: behind, 2: ahead}, {3: "is stopped"}).lags == 3
    assert hang_of("", {0: inside, 2: inside}, {}).lags is None


def test_many_ranks_that_are_alike_share_a_line() -> None:
    ranks = dict.fromkeys(range(100), "in barrier()") | {7: "in no collective"}
    assert Hang("", ranks, 7, 0.0).lines() == [
        "  ranks 0, 1, 2, 3, 4, 5, 6, 8 and 91 more: in barrier()",
        "  rank 7: in no collective",
        "The first rank that lags is rank 7.",
    ]
