"""The process from which the ranks of a machine are forked: it has imported what each of them needs, and runs no thread.

A launcher starts it (`processes/forked_ranks.py`) and gives its orders through a socket. A fork goes on as the command line of its
rank says, as `python -c` would, and ends as Python ends. When the launcher is gone, so are the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_GUARD_SECONDS = 5.0
"""How long the launcher's guard may take to end the ranks. It also finds processes that have left their groups."""
_THREADS_END_SECONDS = 1.0
_ENDS_AT_A_FORK = "jemalloc_bg_thd"
"""The thread of jemalloc, which pyarrow brings, and pandas imports: its locks are made anew in a fork, which frees by itself."""
_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What a scheduler may send to all processes of a run. Launcher and ranks answer; this process ends with the launcher."""


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs the process from start to end, and in each fork a rank.

    Args:
        arguments: The descriptor of the orders, and the module whose `preload` imports what ranks need. What follows is there to be
            seen in a list of processes.
        own_path: The search path with which Python started.
    """
    launcher = socket.socket(fileno=int(arguments[0]))
    order = _first_order_of_a_fork(launcher, arguments[1])
    launcher.close()
    os.environ.update(order["environ"])
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    _redirect(order["log"], order["mode"], order["reads"])
    if "numpy" in sys.modules:  # The forks would draw the same numbers. Python's own generator looks after itself.
        sys.modules["numpy"].random.seed()
    _, _, code, *rest = order["command"]
    sys.path[:], sys.argv = own_path, ["-c", *rest]
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def _first_order_of_a_fork(launcher: socket.socket, module: str) -> dict[str, Any]:
    """Forks for each order. Returns in forks only."""

    def tell(**event: Any) -> None:
        with contextlib.suppress(OSError):  # The launcher is gone, which the loop below will see.
            launcher.sendall(f"{json.dumps(event)}\n".encode())

    try:
        importlib.import_module(module).preload()
        problem = _problem()
    except BaseException as error:  # A rank that imports for itself will say more.
        problem = f"{type(error).__name__}: {error}"
    gc.freeze()  # A collection, such as the one at Python's end, would copy all pages of these objects.
    ranks: set[int] = set()

    def reap(*_: Any) -> None:
        for pid in ranks.copy():
            with contextlib.suppress(ChildProcessError):  # Another signal came meanwhile, and its call has told of the rank.
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    ranks.discard(pid)
                    tell(ended=pid, code=os.waitstatus_to_exitcode(status))

    before = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_END}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, reap)
    tell(problem=problem)
    for line in launcher.makefile("r", encoding="utf-8"):
        with _blocked(before):  # `reap` must know of the rank when it ends, and the rank must get what is sent to it.
            try:
                pid = os.fork()
            except OSError as error:
                tell(refused=str(error))
                continue
            if pid == 0:
                for number, handler in before.items():
                    signal.signal(number, handler)
                os.setsid()
                tell(started=os.getpid())
                return json.loads(line)
            ranks.add(pid)
    deadline = time.monotonic() + _GUARD_SECONDS
    while ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in ranks.copy():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


@contextlib.contextmanager
def _blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Puts off signals while the body runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _problem() -> str:
    """Says why no rank should be forked; empty if nothing speaks against it."""
    # A thread does not exist in a fork, but the locks that it holds do. OpenBLAS ends its threads at every fork.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_END_SECONDS
    while (others := _other_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"{len(others)} threads run after the imports, which a fork would lack: {', '.join(others)}" if others else ""


def _other_threads() -> list[str]:
    """Returns the names of the threads, beside this one, that a fork would miss."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # It has just ended.
            if int(thread.name) != os.getpid():
                names.append((thread / "comm").read_text("utf-8").strip())
    return sorted(name for name in names if name != _ENDS_AT_A_FORK)


def _redirect(log: str | None, mode: str, reads: bool) -> None:
    """Sends the output to a log, if there is one; leaves the input of the launcher to one rank."""
    if log is not None:
        with open(log, mode) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if not reads:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
