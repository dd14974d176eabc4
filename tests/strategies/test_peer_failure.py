"""A rank ends in the middle of training: the others end too, soon, and say which rank it was. No launcher helps."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tfrep_strategy.cluster.identity import horovod_is_installed, identities, inherited_environ
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("faults")

PROGRAM = Path(__file__).with_name("peer_programs.py")
SURVIVORS_END_WITHIN = 30.0
STOPPED_ENDS_WITHIN = 20.0
EACH = pytest.mark.parametrize(
    "communicator",
    [
        "tf",
        "shared_memory",
        "auto",
        pytest.param("horovod", marks=pytest.mark.skipif(not horovod_is_installed(), reason="no Horovod")),
    ],
)


class Outcome(NamedTuple):
    """What became of the ranks: exit codes, when the first ended, seconds from then to the end of the last, and their output."""

    codes: list[int]
    end: float
    seconds: float
    output: list[str]


def run_ranks(
    communicator: str,
    size: int,
    way: str,
    rank: int,
    folder: Path,
    program: Path = PROGRAM,
    own: Sequence[dict[str, str]] | None = None,
) -> Outcome:
    """Runs a program on `size` ranks, and kills what has not ended after a minute and a half.

    Args:
        communicator: What they talk through.
        size: How many there are.
        way: How a rank ends.
        rank: Which.
        folder: For what the ranks leave.
        program: The program.
        own: The variables of each rank. Default: those that the package gives to ranks of the communicator.
    """
    environ = inherited_environ() | {"TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = ":".join(filter(None, sys.path))
    command = [sys.executable, str(program), communicator, way, str(rank), str(folder)]
    logs = [folder / f"log{each}" for each in range(size)]
    with contextlib.ExitStack() as stack:
        processes = []
        for variables, log in zip(own or stack.enter_context(identities(communicator, size)), logs, strict=True):
            file = stack.enter_context(open(log, "wb"))
            process = subprocess.Popen(command, env=environ | variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + 90
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    ended = folder / "end"
    now = time.time()
    end = float(ended.read_text()) if ended.exists() else now
    ended.unlink(missing_ok=True)
    output = [log.read_text("utf-8", "replace") for log in logs]
    assert None not in codes, f"Still running: {codes}\n" + "\n".join(text[-3000:] for text in output)
    return Outcome(codes, end, now - end, output)


@EACH
@pytest.mark.parametrize(
    ("way", "how", "code"),
    [
        ("exit", "without a word.", 0),
        ("kill", "without a word.", -9),
        ("leave", "ago.", 0),
        ("forked", "without a word.", -9),
    ],
)
def test_survivors_name_the_rank(communicator: str, way: str, how: str, code: int, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 2, way, 1, tmp_path)
    assert outcome.codes == [1, code]
    assert outcome.seconds < SURVIVORS_END_WITHIN
    caught = (tmp_path / "caught0").read_text()
    assert caught.startswith("UnavailableError: Rank 1 ended ")
    assert how in caught.splitlines()[0]
    assert "Hint: " in caught


@EACH
def test_all_others_hear_of_rank_0(communicator: str, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 3, "kill", 0, tmp_path)
    assert outcome.codes[0] == -9
    assert 0 not in outcome.codes
    assert outcome.seconds < SURVIVORS_END_WITHIN
    for rank in (1, 2):
        assert (tmp_path / f"caught{rank}").read_text().startswith("UnavailableError: Rank 0 ended ")


@EACH
def test_the_first_to_end_is_named(communicator: str, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 3, "raise", 2, tmp_path)
    assert outcome.codes == [1, 1, 1]
    for rank in (0, 1):
        caught = (tmp_path / f"caught{rank}").read_text().splitlines()[0]
        assert caught.startswith("UnavailableError: Rank 2 ended ")
        assert "with ValueError: the data are spoiled." in caught


@EACH
@pytest.mark.parametrize(("way", "more"), [("kill-loop", ""), ("kill-stuck", "could not be aborted, so this process ends now.")])
def test_loops_of_ones_own_and_calls_that_nothing_can_end(communicator: str, way: str, more: str, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 2, way, 1, tmp_path)
    assert outcome.codes == [1, -9]
    assert outcome.seconds < SURVIVORS_END_WITHIN
    assert "Rank 1 ended" in outcome.output[0]
    assert more in outcome.output[0]


@pytest.mark.parametrize("communicator", ["tf", "shared_memory"])  # Horovod ends on all ranks when it ends on one.
def test_a_group_goes_on_without_a_rank_that_is_not_in_it(communicator: str, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 3, "leave-group", 2, tmp_path)
    assert outcome.codes == [0, 0, 0], outcome.output
    assert {file.name for file in tmp_path.glob("done*")} == {"done0", "done1", "done2"}


@EACH
def test_a_rank_that_hangs_is_given_up(communicator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "5")
    outcome = run_ranks(communicator, 2, "hang", 1, tmp_path)
    assert outcome.codes == [1, 1]
    assert "Rank 1 has called no collective for " in (tmp_path / "caught0").read_text()
    assert "Rank 1 has called no collective for " in outcome.output[1]


def check_stopped(outcome: Outcome, rank: int, folder: Path) -> None:
    assert outcome.codes == [-9 if each == rank else 1 for each in range(3)], outcome.output[0][-2000:]
    # Rank 0 of TensorFlow's collectives, which has been told, may need ten seconds more to end.
    assert outcome.seconds < SURVIVORS_END_WITHIN
    seen = r"is stopped \(state T\), for \d+ seconds by now"
    assert re.search(rf"^tfrep: Rank {rank} {seen}, and is killed by its watcher\.$", outcome.output[rank], re.MULTILINE)
    for other in {0, 1, 2} - {rank}:
        assert (folder / f"caught{other}").stat().st_mtime - outcome.end < STOPPED_ENDS_WITHIN
        caught = (folder / f"caught{other}").read_text()
        assert re.match(rf"UnavailableError: Rank {rank} ended [\d.]+ seconds ago, killed by its watcher: it {seen}\.", caught)
        assert re.search(rf"^  rank {rank}: {seen}; before that in .*; Python is at .*:\d+ in ", caught, re.MULTILINE), caught
        assert f"The first rank that lags is rank {rank}." in caught


@EACH
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ended(communicator: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "10")
    check_stopped(run_ranks(communicator, 3, "stop", rank, tmp_path), rank, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_of_torchrun_is_named_and_ended(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variables: nothing of ours has started the ranks."""
    monkeypatch.setenv("TFREP_TIMEOUT", "10")
    [port] = free_ports(1)
    alike = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = [alike | {"RANK": str(each), "LOCAL_RANK": str(each)} for each in range(3)]
    check_stopped(run_ranks("tf", 3, "stop", rank, tmp_path, own=own), rank, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_of_mpirun_is_named_and_ended(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variables, as above. `tests/engines` has the real `mpirun`."""
    monkeypatch.setenv("TFREP_TIMEOUT", "10")
    alike = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": f"stopped-{tmp_path}"}
    own = [alike | {"OMPI_COMM_WORLD_RANK": str(each), "OMPI_COMM_WORLD_LOCAL_RANK": str(each)} for each in range(3)]
    outcome = run_ranks("auto", 3, "stop", rank, tmp_path, own=own)
    check_stopped(outcome, rank, tmp_path)
    for other in {0, 1, 2} - {rank}:  # A rank may be stopped for half of the time limit.
        assert (tmp_path / f"caught{other}").stat().st_mtime - outcome.end < 10 / 2 + 2


@EACH
@pytest.mark.parametrize("last", [0, 1])
def test_ranks_that_end_at_different_times_end_well(communicator: str, last: int, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 2, "late", last, tmp_path)
    assert outcome.codes == [0, 0]
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
    for text in outcome.output:
        assert "Error" not in text.replace("CUDA_ERROR", "")
        assert "StartAbort" not in text
        assert "ended" not in text
