"""Real processes that are stopped, silent or well, and what a launcher sees of them from outside."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from observing import alive, wait_until
from raising import refuses

from tfrep_strategy.cluster.signs_of_life import Patience, Watch, give_signs
from tfrep_strategy.running.ranks import TIMED_OUT, Command, Failure, deferred_signals, run_ranks

pytestmark = pytest.mark.lane("launchers")

NEVER = float("inf")
SLEEP = "time.sleep(60)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLD_THE_LOCK = "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"  # For years, on the CPU.
WAIT_WITH_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(60)"
# From a slow disk: half a megabyte in a second, with next to no CPU time.
READ_WITH_THE_LOCK = """
import ctypes
ours, theirs = os.pipe()
if not os.fork():
    while True: os.write(theirs, b"0" * 50_000); time.sleep(0.1)
libc = ctypes.PyDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.fread(ctypes.create_string_buffer(10**8), 1, 10**8, ctypes.c_void_p(libc.fdopen(ours, b"r")))
"""
FREEZER = Path("/sys/fs/cgroup/freezer")


class Runner:
    """Runs small programs as ranks that give signs of life."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder, self.marker = folder, marker

    def __call__(self, *programs: str, patience: Patience | None, timeout: float = 60.0) -> Failure | None:
        start = f"import os, signal, sys, time; from pathlib import Path; sys.path[:] = {sys.path!r};"
        start += f"from tfrep_strategy.cluster.signs_of_life import give_signs; give_signs(Path({str(self.folder)!r}), %d);"
        called = [f"{start % rank}\n{program}" for rank, program in enumerate(programs)]
        commands = [Command([sys.executable, "-c", each, self.marker], os.environ) for each in called]
        with deferred_signals() as events:
            return run_ranks(commands, events, log_dir=self.folder, note_dir=self.folder, timeout=timeout, patience=patience)


@pytest.fixture
def run(tmp_path: Path, marker: str) -> Runner:
    return Runner(tmp_path, marker)


def test_a_stopped_rank_is_named_and_ended(run: Runner) -> None:
    failure = run(SLEEP, STOP, patience=Patience(1.0, NEVER, NEVER, NEVER))
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, TIMED_OUT)
    assert failure.frozen.startswith("is stopped (state T), for ")
    assert not alive(run.marker)


@pytest.mark.parametrize(("program", "uses"), [(HOLD_THE_LOCK, True), (READ_WITH_THE_LOCK, False)])
def test_a_silent_rank_that_works_is_named_and_ended_later(
    run: Runner, program: str, uses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failure = run(SLEEP, program, patience=Patience(NEVER, 1.5, 4.0, 7.0))
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, TIMED_OUT)
    found = re.fullmatch(r"has given no sign of life for (\d+) seconds, in which it used ([\d.]+) of CPU time", failure.frozen)
    assert found is not None, failure.frozen
    assert float(found[1]) >= 7
    assert (float(found[2]) > 1.0) == uses
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("Rank 1 has given no sign of life for ")
    assert "It is ended after 7 seconds." in warning


def test_a_silent_rank_that_does_nothing_is_named_and_ended(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    failure = run(SLEEP, WAIT_WITH_THE_LOCK, patience=Patience(NEVER, 2.0, 30.0, 60.0))
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, TIMED_OUT)
    what = r"has given no sign of life for \d+ seconds, in which it used 0\.\d of CPU time \(state: sleeping; native code may .*\)"
    assert re.fullmatch(what, failure.frozen)
    assert not caplog.records


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # A process that has ended is in it for a moment longer.
        group.rmdir()
    return not group.exists()


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs root, and the freezer of cgroups")
def test_a_rank_in_a_frozen_cgroup_is_named_and_left(run: Runner, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It can neither give signs nor be killed, as one that waits for a disk that is gone."""
    group = Path(tempfile.mkdtemp(prefix="tfrep-test-", dir=FREEZER))
    freeze = f"Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
    freeze += f"time.sleep(2)\nPath({str(group / 'freezer.state')!r}).write_text('FROZEN')\ntime.sleep(60)"
    try:
        failure = run(SLEEP, freeze, patience=Patience(1.0, 2.0, 30.0, 60.0))
        [left] = [each for each in alive(run.marker) if str(each.pid) in (group / "cgroup.procs").read_text()]
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: _is_removed(group))
    assert failure is not None
    assert failure.rank == 1
    assert "(state: disk-sleep; a disk or a network does not answer, or its cgroup is frozen)" in failure.frozen
    said = capfd.readouterr().err
    assert f"Rank 1 was killed, and does not end: the kernel keeps it. It is left behind. Received: pid={left.pid}" in said


def test_nobody_else_is_named(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that wait or compute in Python, have become another program, or give no signs at all."""
    becomes = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(5)', sys.argv[1]])"
    unsigned = f"for path in Path({str(run.folder)!r}).glob('3.life'): path.unlink()\ntime.sleep(5)"
    computes = "end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    assert run("time.sleep(5)", computes, becomes, unsigned, patience=Patience(1.0, 2.5, 2.5, 3.0)) is None
    assert not caplog.records


def test_a_stopped_rank_that_goes_on_in_time_is_not_ended(run: Runner) -> None:
    """Twice a second and a half are not three seconds."""
    child = "if not os.fork():\n for _ in range(2):\n  time.sleep(1.5); os.kill(os.getppid(), signal.SIGCONT)\n os._exit(0)"
    assert run(f"{child}\n{STOP}\ntime.sleep(0.3)\n{STOP}\ntime.sleep(1)", patience=Patience(2.5, NEVER, NEVER, NEVER)) is None


def test_a_limit_of_none(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a debugger: neither of them is ended before the run's own limit."""
    monkeypatch.setenv("TFREP_TIMEOUT", "0")
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "0.2")
    assert run(STOP, WAIT_WITH_THE_LOCK, patience=Patience.of_environment(), timeout=3.0) == Failure(None, TIMED_OUT)


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TFREP_TIMEOUT", "TFREP_SILENCE_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    assert Patience.of_environment() == Patience(15.0, 25.0, 60.0, 1800.0)
    monkeypatch.setenv("TFREP_TIMEOUT", "10")
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "90")
    assert Patience.of_environment() == Patience(5.0, 5.0, 45.0, 90.0)
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "0")
    assert Patience.of_environment() == Patience(5.0, NEVER, 60.0, NEVER)
    monkeypatch.setenv("TFREP_SILENCE_TIMEOUT", "long")
    with refuses(TFREP_SILENCE_TIMEOUT="long"):
        Patience.of_environment()


def test_a_rank_that_another_process_has_started_is_found(run: Runner, tmp_path: Path) -> None:
    program = f"import subprocess\nif not os.fork():\n give_signs(Path({str(tmp_path)!r}), 1)\n {STOP}\ntime.sleep(60)"
    failure = run(program, patience=Patience(1.0, NEVER, NEVER, NEVER))
    assert failure is not None
    assert failure.rank == 1


def test_a_launcher_that_was_held_up_blames_nobody(tmp_path: Path) -> None:
    watch = Watch(tmp_path, Patience(3.0, 3.0, 3.0, 3.0))
    child = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.suspend()
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        assert watch.look({0: child.pid}) is None
        time.sleep(4.0)
        assert watch.look({0: child.pid}) is None
    finally:
        child.kill()
        child.wait(10)


def test_signs_end_with_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "signs"
    give_signs(folder, 0)  # There is no such folder, as on another machine.
    folder.mkdir()
    before = threading.active_count()
    give_signs(folder, 0)
    wait_until(lambda: "\n{" in (folder / "0.life").read_text())
    pid, where = (folder / "0.life").read_text().splitlines()
    assert int(pid) == os.getpid()
    assert re.match(r".*\.py:\d+ in \w+", json.loads(where)["python"])
    assert threading.active_count() == before + 1
    (folder / "0.life").unlink()
    wait_until(lambda: threading.active_count() == before)


def test_a_traced_rank_is_not_silent(tmp_path: Path) -> None:
    """A debugger has stopped it."""
    gdb = "import ctypes, os, signal, sys, time\nlibc = ctypes.CDLL(None)\npid = int(sys.argv[1])\n"
    gdb += "assert libc.ptrace(16, pid, 0, 0) == 0\nos.waitpid(pid, 0)\nprint('traced', flush=True)\ntime.sleep(60)"
    program = f"import sys, time; sys.path[:] = {sys.path!r}; from pathlib import Path; import ctypes;"
    program += "from tfrep_strategy.cluster.signs_of_life import give_signs;"
    program += f"ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0); give_signs(Path({str(tmp_path)!r}), 0); time.sleep(60)"
    with contextlib.ExitStack() as stack:
        child = psutil.Popen([sys.executable, "-c", program])
        stack.callback(child.wait, 10)
        stack.callback(child.kill)
        wait_until(lambda: (tmp_path / "0.life").exists())
        debugger = psutil.Popen([sys.executable, "-c", gdb, str(child.pid)], stdout=-1)
        stack.callback(debugger.communicate)
        stack.callback(debugger.kill)
        assert debugger.stdout.readline() == b"traced\n"
        assert child.status() == psutil.STATUS_TRACING_STOP
        watch = Watch(tmp_path, Patience(0.5, 0.5, 0.5, 0.5))
        for _ in range(4):
            time.sleep(0.5)
            assert watch.look({0: child.pid}) is None
