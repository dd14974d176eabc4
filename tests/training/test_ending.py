"""Requests to end that loops of one's own see, on all ranks in the same round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.cluster import notices
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.training import ending

_LOOP = """
import json, os, signal, sys, time
import tfrep_strategy as tfrep
for n in range(3000):
    if n == 40 and tfrep.is_chief() == (sys.argv[1] == "0"):
        os.kill(os.getpid(), signal.SIGTERM)
    if tfrep.is_ending():
        break
    time.sleep(0.01)
print("ENDED " + json.dumps(tfrep.all_gather_object(n)))
"""


@pytest.mark.lane("quick")
def test_a_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ending, "_requests", None)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert not tfrep.is_ending()
        signal.raise_signal(signal.SIGTERM)
        assert any(tfrep.is_ending() for _ in range(20))
        assert tfrep.is_ending(), "it stays so"
    finally:
        signal.signal(signal.SIGTERM, before)
        notices._asked.clear()
        notices._is_answered.clear()


@pytest.mark.lane("quick")
def test_no_rank_asks_inside_a_step() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(ConfigurationError, match="is_ending was called inside a step"):
        strategy.run(lambda: tfrep.is_ending())


@pytest.mark.lane("launchers")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_end_in_the_same_round(tmp_path: Path, rank: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(_LOOP, "utf-8")
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", str(script), rank]
    environ = os.environ | {"PYTHONPATH": str(Path(tfrep.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (ends,) = [json.loads(line.removeprefix("ENDED ")) for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert ends[0] == ends[1]
    assert 40 <= ends[0] < 2999
    told = [json.loads(line)["event"] for line in (tmp_path / "logs" / "events.jsonl").read_text("utf-8").splitlines()]
    assert told == ["start", "ready", "end"]
