"""The watcher: a small process beside a rank that no launcher of this package has started.

It observes its rank as a launcher would. It kills a rank that is stopped or silent for too long, and first tells the other ranks on
connections that its rank has lent it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.rendezvous.channel import Channel, Schema
from tfrep_strategy.cluster.signs_of_life import LOOK_SECONDS, Frozen, Patience, Watch, is_watched, start_signs

_log = logging.getLogger(__name__)

_SEND_SECONDS = 2


class Watcher:
    """A process that observes this one from outside, until every user has called `close`, or this process ends.

    Args:
        name: The name of this process in messages, with its number for `{}`.
        number: The number.

    Example:
        >>> Watcher("Rank {}", 1).close()
    """

    def __init__(self, name: str, number: int) -> None:
        self.users, self._pid = 1, os.getpid()
        self._folder = tempfile.mkdtemp(prefix="tfrep-watcher-")
        start_signs(Path(self._folder), number)
        self._own, its = socket.socketpair()
        os.register_at_fork(after_in_child=self._own.close)
        about = [self._folder, name, number, os.getpid()]
        with its:
            self._process = subprocess.Popen(
                module_command(__name__, json.dumps(about)),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # A signal that stops all processes of a terminal does not stop it.
            )

    def lend(self, connection: Channel) -> None:
        """Lends it a connection to another rank, for the reason of a kill: `("frozen", number, the observed state, where it was)`.

        Args:
            connection: Must be ended with `hang_up`, since it is open in both processes.
        """
        with contextlib.suppress(OSError):  # It was killed.
            socket.send_fds(self._own, [b"."], [connection.fileno()])

    def close(self) -> None:
        """Ends it, unless others in this process still use it."""
        if os.getpid() != self._pid:  # A fork is not observed by this watcher.
            return
        with _lock:
            self.users -= 1
            if self.users:
                return
            for key in [key for key, each in _of_this_process.items() if each is self]:
                del _of_this_process[key]
        self._process.kill()
        self._process.wait()
        self._own.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_lock = threading.Lock()
_of_this_process: dict[tuple[str, int], Watcher] = {}


def _forget() -> None:
    """Forgets the watchers in a fork: they observe the parent."""
    global _lock
    _lock = threading.Lock()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forget)


def start_watcher(name: str, number: int) -> Watcher | None:
    """Starts a watcher, unless a launcher of this package observes this process, or `TFREP_TIMEOUT=0` lets others wait.

    The strategies of a process share one watcher.

    Args:
        name: The name of this process in messages, with its number for `{}`.
        number: The number.

    Returns:
        The watcher. None, with a warning, if the system does not allow another process.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` or `TFREP_SILENCE_TIMEOUT` is not a number of seconds.

    Example:
        >>> os.environ["TFREP_TIMEOUT"] = "0"
        >>> start_watcher("Rank {}", 1) is None
        True
    """
    if is_watched() or Patience.of_environment().stopped == math.inf:
        return None
    try:
        with _lock:
            if (name, number) in _of_this_process:
                _of_this_process[name, number].users += 1
            else:
                _of_this_process[name, number] = Watcher(name, number)
            return _of_this_process[name, number]
    except OSError as error:
        _log.warning("No watcher runs for this process (%s). If it freezes, the other ranks notice it late.", error)
        return None


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs the watcher from start to end.

    Args:
        arguments: The folder of the signs, the name, the number and the id of the observed process, as JSON.
        own_path: Unused.
    """
    del own_path
    folder, name, number, pid = json.loads(arguments[0])
    lent: list[int] = []
    try:
        frozen = _look(Watch(Path(folder), Patience.of_environment(), name), number, pid, lent)
        if frozen is not None:
            _end(frozen, name.format(number), pid, lent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _look(watch: Watch, number: int, pid: int, lent: list[int]) -> Frozen | None:
    """Looks until the process ends, or its time is over. Collects the connections that it lends."""
    with socket.socket(fileno=os.dup(0)) as parent:
        while os.getppid() == pid:
            if select.select([parent], [], [], LOOK_SECONDS)[0]:
                said, descriptors, *_ = socket.recv_fds(parent, 1, 1)
                if not said:
                    return None
                lent += descriptors
            elif frozen := watch.look({number: pid}):
                return frozen
    return None


def _end(frozen: Frozen, name: str, pid: int, lent: Sequence[int]) -> None:
    """Sends the reason to the other ranks, and kills the process."""
    for descriptor in lent:
        with contextlib.suppress(OSError), Channel(socket.socket(fileno=descriptor), Schema({}), _SEND_SECONDS) as channel:
            channel.send("frozen", frozen.rank, frozen.seen, frozen.where.get(frozen.rank))
    if os.getppid() == pid:
        print(f"tfrep: {name} {frozen.seen}, and is killed by its watcher.", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
