"""What is shown of a rank that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfrep_strategy.cli import _print_error
from tfrep_strategy.running.logs import RunFailed, describe, last_lines, log_folder
from tfrep_strategy.running.ranks import Failure
from tfrep_strategy.running.runs import how_lost

pytestmark = pytest.mark.lane("quick")

OF_TENSORFLOW = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795352234.689562    2463 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use instructions.
To enable the following instructions: AVX2 AVX512F, in other operations, rebuild TensorFlow with compiler flags.
2026-11-22 12:57:15.689562: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
W1122 12:57:15.689562    2463 computation_placer.cc:177] computation placer already registered.
"""
OWN = """\
I am a line of the program.
2026-11-22 is the day
E0000 00:00:1795352234.689562    2463 ring.cc:1] a peer is gone
F0000 00:00:1795352234.689562    2463 check.cc:1] Check failed: x > 0
"""


def test_information_of_tensorflow_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text(OF_TENSORFLOW + OWN + OF_TENSORFLOW)
    assert last_lines(log) == OWN.splitlines()
    log.write_text("".join(f"line {i}\n" for i in range(30)) + OF_TENSORFLOW * 30)
    assert last_lines(log) == [f"line {i}" for i in range(10, 30)]


def test_a_large_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    own = "".join(f"line {i}\n" for i in range(500_000))
    log.write_text(own + "a farewell\n" * 500_000)
    assert last_lines(log, len(own)) == [f"line {i}" for i in range(499_980, 500_000)]
    assert last_lines(log) == ["a farewell"] * 20


def test_a_rank_that_wrote_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_text(OF_TENSORFLOW)
    failure = Failure(1, 137, "", noted=False, log_size=None)
    assert describe(failure, timeout=None, log_dir=tmp_path) == (
        "Rank 1 failed with exit code 137 (SIGKILL); all ranks were ended. The kernel sends SIGKILL to a process when memory is"
        f" full. It wrote nothing.\nLogs: {tmp_path}"
    )


def test_what_comes_after_the_failure_is_left_out(tmp_path: Path) -> None:
    before, traceback = "epoch 1\n", "Traceback (most recent call last):\nValueError: seven\n"
    (tmp_path / "rank1.log").write_text(before + traceback + "a farewell\n" * 50)
    failure = Failure(1, 1, traceback, noted=True, log_size=len(before))
    assert describe(failure, timeout=None, log_dir=tmp_path) == (
        "Rank 1 failed with exit code 1; all ranks were ended. Its last lines:\n"
        "  epoch 1\n  Traceback (most recent call last):\n  ValueError: seven\n"
        f"Logs: {tmp_path}"
    )


@pytest.mark.parametrize(
    ("alike", "size", "what"),
    [
        ((0, 1), 2, "Both ranks raised ValueError, and the run was ended. The output of rank 0 is above."),
        ((0, 1, 2), 3, "All 3 ranks raised ValueError, and the run was ended. The output of rank 0 is above."),
        ((0, 1, 2), 4, "Ranks 0, 1 and 2 raised ValueError, and the run was ended. The output of rank 0 is above."),
        ((1, 2), 3, "Ranks 1 and 2 raised ValueError, and the run was ended. Rank 1's last lines:\n  ValueError: seven"),
        ((), 3, "Rank 1 failed with exit code 1; all ranks were ended. Its last lines:\n  ValueError: seven"),
    ],
)
def test_ranks_that_raised_alike_are_told(alike: tuple[int, ...], size: int, what: str, tmp_path: Path) -> None:
    (tmp_path / "rank1.log").touch()
    failure = Failure(1, 1, "ValueError: seven\n", noted=True, log_size=0, error="ValueError", alike=alike)
    assert describe(failure, timeout=None, log_dir=tmp_path, size=size) == f"{what}\nLogs: {tmp_path}"


@pytest.mark.parametrize(
    ("code", "was_lost", "how"),
    [(137, True, "rank 1 was lost (SIGKILL)"), (168, True, "rank 1 was lost (signal 40)"), (255, False, ""), (143, False, "")],
)
def test_who_was_lost(code: int, was_lost: bool, how: str, tmp_path: Path) -> None:
    failure = Failure(1, code)
    assert failure.was_lost == was_lost
    assert f"failed with exit code {code}" in describe(failure, timeout=None, log_dir=tmp_path)
    if was_lost:
        assert how_lost(failure) == how


@pytest.mark.parametrize(("code", "is_left"), [(1, True), (137, True), (124, True), (143, False), (130, False)])
def test_logs_are_left_unless_somebody_has_stopped_the_run(code: int, is_left: bool) -> None:
    """A launcher that hears of a failure elsewhere knows the exit code, and no rank."""
    with pytest.raises(RunFailed), log_folder(None) as folder:
        raise RunFailed("The run is over.", Failure(None, code))
    assert folder.exists() == is_left
    if is_left:
        folder.rmdir()


def test_lines_are_shown_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    _print_error(ValueError("train.py:100: UserWarning :x: [bold]"))
    assert capfd.readouterr().err == "tfrep: train.py:100: UserWarning :x: [bold]\n"


def test_logs_of_an_earlier_run_are_removed_but_not_where_the_output_goes(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(3)]
    for log in logs[:2]:
        log.write_text("of an earlier run")
    removes = "import sys; from pathlib import Path; from tfrep_strategy.running.logs import remove_logs; print('shown')"
    removes += "; remove_logs(map(Path, sys.argv[1:]))"
    with open(logs[0], "wb") as output:
        subprocess.run([sys.executable, "-c", removes, *map(str, logs)], stdout=output, check=True, timeout=60)
    assert logs[0].read_text() == "shown\n"
    assert not logs[1].exists()
