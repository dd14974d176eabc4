"""Real processes that nobody has launched, and what their watchers do. The monitors' part is in `test_peer_failure.py`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from observing import alive, wait_until
from raising import refuses

from tfrep_strategy.cluster.flight_recorder import Whereabouts
from tfrep_strategy.cluster.rendezvous.channel import Channel, Schema
from tfrep_strategy.cluster.watcher import Watcher, start_watcher

pytestmark = pytest.mark.lane("launchers")

START = f"""
import os, signal, sys, time
sys.path[:] = {sys.path!r}
import socket
from tfrep_strategy.cluster.watcher import start_watcher
watcher = start_watcher("Rank {{}}", 7)
connection = socket.socket(fileno=int(sys.argv[2]))
watcher and watcher.lend(connection)
print("ready", flush=True)
"""
SLEEP = "time.sleep(60)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLD_THE_LOCK = "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"  # For years, on the CPU.
COMPUTE = "while True: pass"

Start = Callable[[str], tuple["subprocess.Popen[str]", Channel]]


@pytest.fixture
def start(tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process that has a watcher and runs a program; gives it and the other end of the connection that it lends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.ExitStack() as stack:

        def started(program: str) -> tuple[subprocess.Popen[str], Channel]:
            its, end = socket.socketpair()
            ours = stack.enter_context(Channel(end, Schema({"frozen": tuple[int, str, Whereabouts | None]})))
            with its:
                command = [sys.executable, "-c", START + program, marker, str(its.fileno())]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[its.fileno()]
                )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process, ours

        yield started


def left(folder: Path, pid: int) -> list[object]:
    """Returns the processes that look at a process, and the folders of its signs."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [each] if re.search(rf"cluster.watcher .*, {pid}\]", " ".join(each.cmdline())) else []
    return [*found, *folder.glob("tfrep-watcher-*")]


def test_a_stopped_process_is_named_to_others_and_killed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "4")
    began = time.monotonic()
    process, connection = start(STOP)
    assert connection.poll(20.0)
    kind, number, seen, where = connection.receive()
    assert (kind, number) == ("frozen", 7)
    assert where is None or where.now == []  # It may be stopped before its first sign.
    assert re.fullmatch(r"is stopped \(state T\), for \d+ seconds by now", seen)
    with pytest.raises(EOFError):
        connection.receive()
    assert process.wait(10) == -signal.SIGKILL
    assert 2.0 < time.monotonic() - began < 20.0
    assert process.stderr.read() == f"tfrep: Rank 7 {seen}, and is killed by its watcher.\n"
    wait_until(lambda: not left(tmp_path, process.pid))


def test_a_silent_process_is_named_and_killed_later(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "5")
    process, connection = start(HOLD_THE_LOCK)
    assert connection.poll(40.0)
    assert connection.receive()[2].startswith("has given no sign of life for ")
    assert process.wait(10) == -signal.SIGKILL
    warning, *_, last = process.stderr.read().splitlines()
    assert warning.startswith("Rank 7 has given no sign of life for ")
    assert "It is ended after 5 seconds." in warning
    assert last.startswith("tfrep: Rank 7 has given no sign of life for ")


@pytest.mark.parametrize("program", [SLEEP, COMPUTE])
def test_who_works_or_waits_is_left_alone(program: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watcher ends with it, however it ends."""
    monkeypatch.setenv("TFREP_TIMEOUT", "4")
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "6")
    process, connection = start(program)
    assert not connection.poll(8.0)
    assert process.poll() is None
    assert len(left(tmp_path, process.pid)) == 2
    process.kill()
    assert connection.poll(10.0)
    with pytest.raises(EOFError):
        connection.receive()
    wait_until(lambda: not left(tmp_path, process.pid))
    assert process.stderr.read() == ""


def test_children_that_outlive_a_process_do_not_hide_its_end(start: Start, marker: str, tmp_path: Path) -> None:
    process, connection = start("if not os.fork():\n connection.close(); time.sleep(60)\ntime.sleep(1); os._exit(0)")
    assert connection.poll(20.0)
    with pytest.raises(EOFError):
        connection.receive()
    wait_until(lambda: not left(tmp_path, process.pid))
    for each in alive(marker):
        each.kill()


def test_under_a_debugger_nobody_watches(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "0")
    process, _ = start(SLEEP)
    assert not left(tmp_path, process.pid)


def test_a_launcher_is_watcher_enough(start: Start, tmp_path: Path) -> None:
    program = "from pathlib import Path; from tfrep_strategy.cluster.signs_of_life import give_signs\n"
    program += f"watcher.close(); give_signs(Path({str(tmp_path)!r}), 7); print(start_watcher('Rank {{}}', 7), flush=True)"
    process, _ = start(program)
    assert process.stdout.readline() == "None\n"


def test_closing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watcher = start_watcher("Rank {}", 1)
    assert isinstance(watcher, Watcher)
    assert len(left(tmp_path, os.getpid())) == 2
    watcher.close()
    assert not left(tmp_path, os.getpid())
    with Channel(socket.socketpair()[0], Schema({})) as connection:
        watcher.lend(connection)  # Nobody takes it.


def test_a_bad_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "long")
    with refuses(TFREP_SILENCE_TIMEOUT="long"):
        start_watcher("Rank {}", 1)


def test_a_process_has_one_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_TIMEOUT", raising=False)
    before = set(psutil.Process().children())
    first, second = start_watcher("Rank {}", 3), start_watcher("Rank {}", 3)
    assert first is not None
    assert first is second
    (process,) = set(psutil.Process().children()) - before
    first.close()
    assert process.is_running()
    pid = os.fork()
    if not pid:  # What a fork does with it does not end it.
        first.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE
    first.close()
    assert not process.is_running()
