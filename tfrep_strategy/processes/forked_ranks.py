"""Ranks that are forked from one process, which has imported TensorFlow for all of them. Nothing here loads TensorFlow."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from tfrep_strategy.environments import identity_variables
from tfrep_strategy.processes.command import module_command
from tfrep_strategy.processes.cores import THREADS_VARIABLE
from tfrep_strategy.processes.identity import RUN_VARIABLES, common_hash_seed, inherited_environ
from tfrep_strategy.processes.ranks import Command, Events, Process, Start, Streams, start_process

_READ_LATE = ("TFREP_RESTARTS", "NCCL_SOCKET_IFNAME", THREADS_VARIABLE, *RUN_VARIABLES)
"""Variables that nobody reads while modules are imported, beside those that tell a rank who it is."""
_LOOK_SECONDS = 0.05


class ForkServer:
    """A process that imports modules once, and from which ranks are forked.

    Its end is the end of all ranks that it has started: nobody would learn their exit codes.

    Args:
        module: The module whose `preload` imports what ranks need.
        hash_seed: Python reads `PYTHONHASHSEED` when it starts. All ranks have that of this process.
        shown: What a list of processes shows of the ranks; their command lines are that of this process.

    Attributes:
        hash_seed: What the ranks' `PYTHONHASHSEED` must be.
        environ: The variables that all ranks have in common. Imports may have read them.
        problem: Why no rank can be forked; empty if nothing is known to speak against it.

    Example:
        >>> with contextlib.closing(ForkServer("tfrep_strategy.running.scope")) as server:
        ...     server.starter([], Events()) is start_process
        False
    """

    def __init__(self, module: str, hash_seed: str | None = None, shown: Sequence[str] = ()) -> None:
        self.hash_seed = common_hash_seed() if hash_seed is None else hash_seed
        self.problem = ""
        environ = inherited_environ() | {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": self.hash_seed}
        self.environ = _split(environ)[0]
        self._ready = threading.Event()
        self._answers = queue.SimpleQueue[int | None]()
        self._codes: dict[int, Future[int]] = {}
        self._orders, theirs = socket.socketpair()
        for end in (self._orders, theirs):
            end.settimeout(None)  # Whatever the program has set for new sockets.
        with theirs:
            self._process = subprocess.Popen(
                module_command("tfrep_strategy.processes.fork_server", str(theirs.fileno()), module, *shown),
                env=self.environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True, name="tfrep-fork-server")
        self._reader.start()

    def starter(self, commands: Sequence[Command], events: Events, deadline: float | None = None) -> Start:
        """Waits for the imports, and tells how to start ranks: by a fork, or by `start_process` if there is a problem.

        Args:
            commands: What the ranks run: `python -c`, with variables of which imports read none that a rank has for itself.
            events: From `deferred_signals`. A signal ends the waiting.
            deadline: On the monotonic clock; ends the waiting.
        """
        while not self._ready.wait(_LOOK_SECONDS) and events.empty() and (deadline is None or time.monotonic() < deadline):
            pass
        own = self.environ
        early = [_split(command.environ)[0] for command in commands]
        differing = sorted({name for each in early for name in each.keys() | own.keys() if each.get(name) != own.get(name)})
        if differing and not self.problem:
            self.problem = f"imports may read {', '.join(differing)}, which the ranks have for themselves"
        return start_process if self.problem or not self._ready.is_set() else self._fork

    def close(self) -> None:
        """Ends the process. Its ranks should have ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._orders.close()

    def _fork(self, command: Command, streams: Streams) -> Process:
        log = None if streams.log is None else str(streams.log.absolute())
        order = {
            "command": list(command.arguments), "environ": _split(command.environ)[1],
            "log": log, "mode": streams.mode, "reads": streams.reads, "cores": sorted(command.cores),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # The process has ended.
            self._orders.sendall(f"{json.dumps(order)}\n".encode())
            pid = self._answers.get()
            if pid is not None:
                return ForkedProcess(pid, self._codes[pid])
        return start_process(command, streams)

    def _read(self) -> None:
        with self._orders.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self._take(json.loads(line))
        self.problem = self.problem or "the process that imports for all ranks has ended"
        for code in self._codes.values():
            if not code.done():
                code.set_result(-signal.SIGKILL)
        self._ready.set()
        self._answers.put(None)

    def _take(self, event: Mapping[str, int | str]) -> None:
        match event:
            case {"problem": str(problem)}:
                self.problem = problem
                self._ready.set()
            case {"started": int(pid)}:
                self._codes[pid] = Future()
                self._answers.put(pid)
            case {"ended": int(pid), "code": int(code)} if pid in self._codes:
                self._codes[pid].set_result(code)
            case {"refused": _} | {"ended": _}:  # It could not be forked, or has not come to its first line.
                self._answers.put(None)


class ForkServers:
    """The process from which the ranks of a run are forked. Where machines come and go, a round may need another one.

    Args:
        module: As for `ForkServer`.
        shown: As for `ForkServer`.

    Example:
        >>> with contextlib.closing(ForkServers("tfrep_strategy.running.scope")) as servers:
        ...     servers.of("7").hash_seed, servers.of() is servers.of("7")
        ('7', True)
    """

    def __init__(self, module: str, shown: Sequence[str] = ()) -> None:
        self._module, self._shown = module, shown
        self._server: ForkServer | None = None

    def of(self, hash_seed: str | None = None) -> ForkServer:
        """Returns the process, which is started now if there is none yet.

        Args:
            hash_seed: The `PYTHONHASHSEED` that the ranks need; None if any will do.
        """
        if self._server is None or hash_seed not in (None, self._server.hash_seed):
            self.close()
            self._server = ForkServer(self._module, hash_seed, self._shown)
        return self._server

    def close(self) -> None:
        """Ends the process. Its ranks should have ended."""
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkedProcess:
    """A rank that is no child of this process.

    Args:
        pid: Its process id. It leads a session.
        code: Its exit code, once it has ended; negative for a signal.
    """

    def __init__(self, pid: int, code: Future[int]) -> None:
        self.pid = pid
        self._code = code

    def wait(self) -> int:
        """Returns the exit code when the process has ended."""
        return self._code.result()


def _split(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Splits variables into those that may be read while modules are imported, and those that a rank gets after that."""
    late = identity_variables().union(_READ_LATE)
    early = {name: value for name, value in environ.items() if name not in late}
    return early, {name: value for name, value in environ.items() if name in late}
