"""Runs that are started again after a rank was lost."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from raising import refuses
from test_joining import SCRIPTS, environ, found_in, outputs_of

from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.ranks import deferred_signals
from tfrep_strategy.running.runs import Options, run_to_end

pytestmark = pytest.mark.lane("faults")

KILL = "import os, signal; os.kill(os.getpid(), signal.{name})"


def run(program: str, folder: Path, max_restarts: int) -> int:
    """Runs a small program on two ranks, and returns the exit code of the run."""
    notes = folder / "notes"
    notes.mkdir()
    options = Options(2, strategy=None, communicator="tf", log_dir=folder / "logs", prefix=True, max_restarts=max_restarts)
    with deferred_signals() as events:
        try:
            run_to_end(options, [sys.executable, "-c", program], notes, events)
        except RunFailed as failed:
            return failed.failure.exit_code
    return 0


def happened(folder: Path) -> list[dict[str, Any]]:
    """Returns what the run has told beside its logs."""
    return [json.loads(line) for line in (folder / "logs" / "events.jsonl").read_text().splitlines()]


def told(folder: Path) -> list[str]:
    return [each["event"] for each in happened(folder)]


def starts(folder: Path, rank: int = 0) -> list[str]:
    return (folder / "logs" / f"rank{rank}.log").read_text().split()


def on_rank_1(statement: str, at_most: int) -> str:
    """A program that says which start it is, and does something on rank 1 in its first starts. Rank 0 waits to be ended."""
    return f"""
import json, os, time
restarts = int(os.environ["TFREP_RESTARTS"])
print(restarts, flush=True)
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with open(f"{{restarts}}-{{rank}}.pid", "w") as file:
    file.write(str(os.getpid()))
if restarts < {at_most}:
    if rank:
        {statement}
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("statement", "at_most", "exit_code", "seen"),
    [
        (KILL.format(name="SIGKILL"), 2, 0, ["0", "1", "2"]),
        (KILL.format(name="SIGKILL"), 9, 128 + signal.SIGKILL, ["0", "1", "2"]),
        (KILL.format(name="SIGSTOP"), 1, 0, ["0", "1"]),
        (KILL.format(name="SIGTERM"), 9, 128 + signal.SIGTERM, ["0"]),
        ("raise SystemExit(3)", 9, 3, ["0"]),
    ],
)
def test_a_lost_rank_and_no_other_is_a_reason(
    statement: str,
    at_most: int,
    exit_code: int,
    seen: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "2")  # A stopped rank is ended after half of it.
    monkeypatch.chdir(tmp_path)
    assert run(on_rank_1(statement, at_most), tmp_path, max_restarts=2) == exit_code
    assert starts(tmp_path, 1) == seen, "the log goes on from one start to the next"
    lost = ["loss", "restart"] * (len(seen) - 1)
    assert told(tmp_path) == ["start", *lost, *(["loss"] if exit_code else []), "end"]
    for start in (each for each in happened(tmp_path) if "pids" in each):
        own = int((tmp_path / f"{start['number']}-1.pid").read_text())
        assert dict(zip(start["ranks"], start["pids"], strict=True))[1] == own
    shown, said = capfd.readouterr()
    assert [line for line in shown.splitlines() if "[1]" in line] == [f"[1] {number}" for number in seen]
    assert len(re.findall(r"rank 1 (was lost|is stopped) \(.*\. All ranks are started again", said)) == len(seen) - 1
    # The program has no fit.
    assert said.count("except for what it saves and restores itself.\nHint: call fit, or save in your own loop") == len(seen) - 1


@pytest.mark.parametrize("strategy", ["mirrored", "multi-worker"])
def test_a_rank_that_is_alone_and_stopped_is_a_reason(
    strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "2")
    stops = f"import os\nif os.environ['TFREP_RESTARTS'] == '0':\n  {KILL.format(name='SIGSTOP')}"
    options = Options(1, strategy=strategy, log_dir=tmp_path / "logs", max_restarts=1, timeout=60)
    with deferred_signals() as events:
        run_to_end(options, [sys.executable, "-c", stops], tmp_path, events)
    said = capfd.readouterr().err
    assert re.search(r"rank 0 is stopped \(state T\), for \d+ seconds by now\. All ranks are started again \(1 of 1\)", said)


def test_a_rank_that_is_alone_and_has_no_backup_may_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it but its user, who has perhaps stopped it."""
    monkeypatch.setenv("TFREP_TIMEOUT", "2")
    options = Options(strategy="mirrored", log_dir=tmp_path / "logs", timeout=4)
    with deferred_signals() as events, pytest.raises(RunFailed, match="it took more than 4 seconds"):
        run_to_end(options, [sys.executable, "-c", KILL.format(name="SIGSTOP")], tmp_path, events)


def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """All ranks start again, go on from the backup, and have one device's weights."""
    script, backup = str(SCRIPTS / "is_killed.py"), str(tmp_path / "backup")
    tfrep_run = [sys.executable, "-m", "tfrep_strategy.cli", "run"]
    restarted = [*tfrep_run, "-n", "2", "--communicator", "tf", "--max-restarts", "1", script, backup]
    start: Callable[..., subprocess.Popen[str]] = lambda command: subprocess.Popen(  # noqa: E731
        command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    (output, said), (alone, _) = outputs_of([start(restarted), start([sys.executable, script])])
    found, expected = found_in(output)[0], found_in(alone)[0]
    assert found["epochs"] == [2, 3]
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5)  # type: ignore[arg-type]
    assert "All ranks are started again (1 of 1)" in said


@pytest.mark.parametrize("name", ["TFREP_TIMEOUT", "TFREP_SILENCE_TIMEOUT", "TFREP_GRACE"])
def test_limits_that_cannot_be_start_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abc")
    with refuses(**{name: "abc"}):
        run_to_end(Options(log_dir=tmp_path / "logs"), ["touch", str(tmp_path / "started")], tmp_path, SimpleQueue())
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_cannot_be() -> None:
    with refuses(max_restarts=-1):
        Options(2, max_restarts=-1)


def test_backups_of_an_earlier_run_are_used_where_they_were_asked_for(tmp_path: Path) -> None:
    """The folder beside the logs begins empty; what else stands there stays."""
    seen = "import os; raise SystemExit(len(os.listdir(os.environ['TFREP_BACKUP_DIR'])))"
    backups = tmp_path / "logs" / "backups"
    (backups / "fit-0").mkdir(parents=True)
    (backups / "own").touch()
    assert run(seen, tmp_path, max_restarts=1) == 1
    assert [path.name for path in backups.iterdir()] == ["own"]
