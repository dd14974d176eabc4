"""Ranks that are forked are like processes that were started: what they know, how they end, and that none is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from calling import command as calling
from observing import alive, wait_until
from preloads import broken, quick, slow, threaded

from tfrep_strategy.processes.forked_ranks import ForkServer
from tfrep_strategy.processes.ranks import Command, Events, Failure, Streams, deferred_signals, run_ranks, start_process

pytestmark = pytest.mark.lane("launchers")

SCRIPTS = Path(__file__).parent / "scripts"
SLEEP = "import time; time.sleep(60)"
SOON = 30.0
DIFFERENT = """
import os, random, sys, tempfile, uuid
import numpy as np
print(random.random(), np.random.random(), uuid.uuid4(), os.urandom(4).hex(), next(tempfile._get_candidate_names()))
"""


@contextlib.contextmanager
def forking(module: str, marker: str) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # It says "(setup)" in fixtures.
        server = ForkServer(module, "7", [marker])
    with contextlib.closing(server):
        yield server


@pytest.fixture
def server(marker: str) -> Iterator[ForkServer]:
    with forking(quick.__name__, marker) as started:
        yield started


def rank(code: str, *arguments: str, **variables: str) -> Command:
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "7"} | variables
    environ.pop("PYTEST_CURRENT_TEST", None)
    return Command([sys.executable, "-c", code, *arguments], environ)


def run(server: ForkServer, folder: Path, *commands: Command, timeout: float | None = 60) -> Failure | None:
    with deferred_signals() as events:
        start = server.starter(commands, events)
        assert start is not start_process, server.problem
        return run_ranks(commands, events, log_dir=folder, note_dir=folder, timeout=timeout, logs_all=True, start=start)


@pytest.mark.parametrize("reads", [False, True])
def test_a_fork_knows_what_a_process_knows(server: ForkServer, reads: bool, tmp_path: Path) -> None:
    code = (SCRIPTS / "describes_itself.py").read_text("utf-8")
    command = rank(code, "--epochs", "3", TF_CONFIG="its own", TFREP_RESTARTS="2", NCCL_SOCKET_IFNAME="lo")
    said = []
    for name, start in (("process", start_process), ("fork", server.starter([command], queue.SimpleQueue()))):
        log = tmp_path / name
        assert start(command, Streams(log, reads=reads)).wait() == 5
        said.append(log.read_text("utf-8").splitlines())
    process, fork = (json.loads(lines[0]) for lines in said)
    assert fork["environ"]["TF_CONFIG"] == "its own"
    assert fork == process
    assert [lines[1:] for lines in said] == [["at exit"], ["at exit"]]


def test_a_time_limit_for_sockets_in_the_launching_program(marker: str, tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.2)
    try:
        with forking(quick.__name__, marker) as server:
            assert run(server, tmp_path, rank("import time; time.sleep(0.6)")) is None
    finally:
        socket.setdefaulttimeout(before)


def test_logs_go_on(server: ForkServer, tmp_path: Path) -> None:
    commands = [rank("print('first')"), rank("import sys; print('second', file=sys.stderr)")]
    fork = server.starter(commands, queue.SimpleQueue())
    for command in commands:
        fork(command, Streams(tmp_path / "log", "ab", reads=False)).wait()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_forks_draw_different_numbers(server: ForkServer, tmp_path: Path) -> None:
    assert run(server, tmp_path, *[rank(DIFFERENT)] * 4) is None
    drawn = [set((tmp_path / f"rank{k}.log").read_text().split()) for k in range(4)]
    assert len(set.union(*drawn)) == 4 * 5


@pytest.mark.parametrize(
    ("death", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError('boom')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("import os; os.abort()", 128 + signal.SIGABRT),
        ("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(4)'])", 4),
    ],
)
def test_one_dies_and_ends_the_others(server: ForkServer, death: str, code: int, tmp_path: Path) -> None:
    start = time.monotonic()
    assert run(server, tmp_path, rank(SLEEP), rank(death), rank(SLEEP)) == Failure(1, code)
    assert time.monotonic() - start < SOON
    assert run(server, tmp_path, rank("pass"), rank("pass")) is None, "the next run has the same process"


def test_an_error_shows_its_lines(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def train():\n    raise ValueError('boom')\n\ntrain()\n")
    code = f"import runpy; runpy.run_path({str(tmp_path / 'script.py')!r}, run_name='__main__')"
    assert run(server, tmp_path, rank(code)) == Failure(0, 1)
    shown = (tmp_path / "rank0.log").read_text()
    assert f'File "{tmp_path / "script.py"}", line 2, in train\n    raise ValueError' in shown
    assert shown.endswith("ValueError: boom\n")


def test_children_that_left_the_group_are_ended(server: ForkServer, marker: str, tmp_path: Path) -> None:
    code = (SCRIPTS / "with_children.py").read_text("utf-8")
    done = run(server, tmp_path, rank(code, marker), rank("import time; time.sleep(3); raise SystemExit(3)"))
    assert done == Failure(1, 3)
    wait_until(lambda: len(alive(marker)) == 1)  # The process that forks.


def _pids(folder: Path, size: int) -> list[int]:
    found = [path.read_text().split() for path in folder.glob("*.pid")]
    return [int(each[0]) for each in found if each] if len(found) == size else []


NOTES_PID = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"


def test_signals_that_all_processes_of_a_run_get(server: ForkServer, tmp_path: Path) -> None:
    code = "import os, signal; [os.kill(os.getppid(), getattr(signal, f'SIG{each}')) for each in 'TERM INT HUP USR1'.split()]"
    assert run(server, tmp_path, rank(code), rank("import time; time.sleep(0.5)")) is None
    answers = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    failure = run(server, tmp_path, rank(answers), rank(SLEEP))
    assert failure is not None
    assert failure.exit_code == 128 + signal.SIGTERM


def test_many_end_at_once(server: ForkServer, tmp_path: Path) -> None:
    for _ in range(3):
        assert run(server, tmp_path, *[rank("pass")] * 40) is None


def test_the_process_that_forks_is_killed(server: ForkServer, marker: str, tmp_path: Path) -> None:
    code = f"import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGKILL); {SLEEP}"
    failure = run(server, tmp_path, rank(SLEEP), rank(code))
    assert failure is not None
    assert failure.was_lost, "a restart may help"
    wait_until(lambda: not alive(marker))
    assert server.starter([rank("pass")], queue.SimpleQueue()) is start_process
    assert "has ended" in server.problem


def launch_and_wait(marker: str, folder: str) -> None:
    commands = [rank(NOTES_PID, str(Path(folder, f"{k}.pid")), marker) for k in range(2)]
    with forking(quick.__name__, marker) as server:
        run(server, Path(folder), *commands, timeout=None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_launcher_is_ended(number: signal.Signals, marker: str, tmp_path: Path) -> None:
    launcher = subprocess.Popen(calling(launch_and_wait, marker, str(tmp_path)), stderr=subprocess.DEVNULL)
    wait_until(lambda: _pids(tmp_path, 2))
    pids = _pids(tmp_path, 2)
    assert len(alive(marker)) == 4, "the launcher, the process that forks, and two ranks"
    launcher.send_signal(number)
    launcher.wait(SOON)
    wait_until(lambda: not alive(marker))
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.parametrize(
    ("module", "problem"),
    [(threaded.__name__, "1 threads run"), (broken.__name__, "ImportError: no such library")],
)
def test_what_cannot_be_forked_is_started(module: str, problem: str, marker: str) -> None:
    command = rank("raise SystemExit(3)", marker)
    with forking(module, marker) as server:
        start = server.starter([command], queue.SimpleQueue())
        assert start is start_process
        assert problem in server.problem


def test_the_thread_of_jemalloc_is_no_reason(marker: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")  # Which Ray brings, and pandas imports where it is.
    allocates = "import pyarrow as pa; pool = pa.jemalloc_memory_pool(); [pa.allocate_buffer(n, pool) for n in (1, 10**5, 10**7)]"
    with forking("preloads.allocating", marker) as server:
        commands = [rank(f"{allocates}; print(pool.backend_name)", marker)] * 2
        assert run(server, tmp_path, *commands) is None
    assert [(tmp_path / f"rank{k}.log").read_text() for k in range(2)] == ["jemalloc\n"] * 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TF_XLA_FLAGS", "PYTHONHASHSEED", "LD_PRELOAD"])
def test_variables_that_imports_may_read_are_those_of_all(server: ForkServer, name: str) -> None:
    assert server.starter([rank("pass"), rank("pass", **{name: "1"})], queue.SimpleQueue()) is start_process
    assert f"imports may read {name}," in server.problem


def test_a_signal_or_the_time_limit_ends_the_wait_for_imports(marker: str) -> None:
    events: Events = queue.SimpleQueue()
    start = time.monotonic()
    with forking(slow.__name__, marker) as server:
        assert server.starter([rank("pass")], events, time.monotonic() + 0.2) is start_process
        events.put((None, signal.SIGTERM))
        assert server.starter([rank("pass")], events) is start_process
    assert time.monotonic() - start < SOON
    assert not alive(marker)
