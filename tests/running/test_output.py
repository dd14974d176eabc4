"""Lines of growing files, as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from observing import wait_until

from tfrep_strategy.running.logs import lines_shown
from tfrep_strategy.running.ranks import Command, deferred_signals, run_ranks


def test_lines_come_whole_and_while_the_file_grows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = ""

    def is_shown(line: str) -> bool:
        nonlocal seen
        seen += capfd.readouterr().out
        return line in seen

    path = tmp_path / "a.log"
    with lines_shown({"[a] ": path, "[none] ": tmp_path / "none.log"}), open(path, "wb", buffering=0) as file:
        file.write(b"one\ntw")
        wait_until(lambda: is_shown("[a] one\n"), 30)
        assert "tw" not in seen
        file.write("o\nä".encode()[:-1])
        wait_until(lambda: is_shown("[a] two\n"), 30)
        file.write("ä".encode()[-1:])
    assert seen + capfd.readouterr().out == "[a] one\n[a] two\n[a] ä\n"


def test_all_ranks_may_write_to_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str], marker: str) -> None:
    says = "import sys; print(sys.argv[1]); print('error', file=sys.stderr); print(sys.stdin.read(), end='')"
    commands = [Command([sys.executable, "-c", says, f"rank {rank}", marker], {}) for rank in range(2)]
    logs = {f"[{rank}] ": tmp_path / f"rank{rank}.log" for rank in range(2)}
    with deferred_signals() as events, lines_shown(logs):
        assert run_ranks(commands, events, log_dir=tmp_path, note_dir=tmp_path, timeout=30, logs_all=True) is None
    shown = capfd.readouterr().out.splitlines()
    for rank in range(2):
        assert sorted(line for line in shown if line.startswith(f"[{rank}]")) == [f"[{rank}] error", f"[{rank}] rank {rank}"]


def test_what_follows_a_body_that_raises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="seven"), lines_shown({"> ": tmp_path / "log"}):  # noqa: PT012
        (tmp_path / "log").write_text("last words")
        raise ValueError("seven")
    assert capfd.readouterr().out == "> last words\n"
    (tmp_path / "log").write_text("nobody looks any more")
    time.sleep(0.2)
    assert not capfd.readouterr().out


def test_nobody_reads_or_the_terminal_lacks_a_letter(tmp_path: Path) -> None:
    """The body goes on, and ends as it would without an output."""
    program = """
import sys, time
from pathlib import Path
from tfrep_strategy.running.logs import lines_shown
log = Path(sys.argv[1])
with lines_shown({"> ": log}):
    log.write_text("\u2501 one\\n" * 100_000, "utf-8")
    time.sleep(0.5)
sys.stderr.write("well")
sys.stdout = None  # Python would complain about what it cannot write when it ends.
"""
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    environ = os.environ | {"PYTHONIOENCODING": "latin-1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"> ? one\n"
        process.stdout.close()
        assert process.stderr.read() == b"well"
        assert process.wait(30) == 0
