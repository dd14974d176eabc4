"""A pool of real processes that stay alive between tests: importing TensorFlow once per test would cost seconds each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from tfrep_strategy.cluster.identity import identities, inherited_environ
from tfrep_strategy.running.function import dumps

_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from workers import main; main(*sys.argv[2:])"
_PEER_SECONDS = 5.0
"""How long the others may go on once one rank has failed: a peer of theirs is missing, they may wait for ever."""


class WorkerFailure(AssertionError):
    """A function raised on some rank, a rank died, or the time was over."""


class WorkerPool:
    """`size` processes, each with a `MultiWorkerStrategy` of its own, that run what they are given.

    Processes are started at the first use, and again after a failure.

    Args:
        communicator: "horovod" or "tf".
        size: How many processes.
        starting: Makes a context in which the processes are started.
        environs: What the environment of each process has besides.
    """

    def __init__(
        self,
        communicator: str,
        size: int,
        starting: Callable[[], Any] = contextlib.nullcontext,
        environs: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.communicator, self.size, self._starting = communicator, size, starting
        self._environs = environs or [{}] * size
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, limit: float = 120.0, meanwhile: Callable[[], Any] = lambda: None
    ) -> list[Any]:
        """Calls `fn(strategy, *args)` on every rank at once.

        Args:
            fn: Travels by value, together with what its module defines.
            *args: Picklable arguments, the same for every rank.
            limit: Seconds after which all ranks are killed.
            meanwhile: Is called in this process while the ranks work.

        Returns:
            What it returned, by rank.

        Raises:
            WorkerFailure: with the traceback of each rank that failed; the processes have ended.
        """
        if not self._connections:
            with self._starting():
                self._start()
        module = sys.modules[fn.__module__]
        if module.__name__ != "__main__":
            cloudpickle.register_pickle_by_value(module)
        request = dumps((fn, args))
        for connection in self._connections:
            connection.send_bytes(request)
        try:
            meanwhile()
        except BaseException:
            self.close()  # Nobody would take the answers.
            raise
        return self._collect(limit)

    def close(self) -> None:
        """Ends the processes."""
        self._connections = []
        self._stack.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfrep-pool-")))
        environ = inherited_environ() | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        environ["TMPDIR"] = str(folder)  # AutoGraph writes files there, which a process that is killed leaves behind.
        self._logs = [folder / f"rank{rank}.log" for rank in range(self.size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        connections = []
        for rank, own in enumerate(self._stack.enter_context(identities(self.communicator, self.size))):
            connection, theirs = Pipe()
            connections.append(self._stack.enter_context(connection))
            command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno()), self.communicator]
            with theirs, open(self._logs[rank], "wb") as log:
                process = subprocess.Popen(
                    command, env=environ | own | self._environs[rank], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=[theirs.fileno()],
                )  # fmt: skip
            self._stack.callback(_end, process)
            self._processes.append(process)
        self._connections = connections
        self._collect(120.0)

    def _collect(self, limit: float) -> list[Any]:
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + limit
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(connection)
                try:
                    good, result = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    good, result = False, "The process ended. Its log:\n" + self._log(rank)
                if good:
                    results[rank] = result
                else:
                    failures[rank] = result
                    deadline = min(deadline, time.monotonic() + _PEER_SECONDS)
        if not failures and not waiting:
            return results
        for rank in waiting.values():
            self._processes[rank].send_signal(signal.SIGUSR1)  # It writes what its threads are doing.
        time.sleep(1.0 if waiting else 0.0)
        report = [f"Rank {rank}: {text[-4000:]}" for rank, text in sorted(failures.items())]
        report += [f"Rank {rank} did not finish. Its log:\n{self._log(rank)}" for rank in sorted(waiting.values())]
        report += [f"Rank {rank} returned {str(result)[-4000:]}" for rank, result in enumerate(results) if result is not None]
        self.close()
        raise WorkerFailure(f"{self.communicator}, {self.size} processes\n" + "\n".join(report))

    def _log(self, rank: int) -> str:
        return self._logs[rank].read_text("utf-8", "replace")[-4000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def main(descriptor: str, communicator: str) -> None:
    """Is the life of a worker: makes its strategy, then runs what it is sent until its parent is gone."""
    faulthandler.register(signal.SIGUSR1)
    os.set_inheritable(int(descriptor), False)
    connection = Connection(int(descriptor))
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    state: dict[str, Any] = {}

    def start() -> None:
        import tfrep_strategy as tfrep

        state["strategy"] = tfrep.MultiWorkerStrategy(communicator)

    _answer(connection, start)
    import keras

    from tfrep_strategy.core.tf import OwnedIterator
    from tfrep_strategy.data.pipeline_ends import end_pipeline
    from tfrep_strategy.keras_integration import refusals
    from tfrep_strategy.strategies.groups import remember

    OwnedIterator.__del__ = end_pipeline  # As in the process of the tests.
    gc.collect()
    gc.freeze()  # What is imported stays; to look through it again and again is a large part of what a small test costs.
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv_bytes()

            def work(request: bytes = request) -> Any:
                keras.utils.clear_session(free_memory=False)  # Names of layers count from one again, on every rank.
                remember(state["strategy"])  # An earlier test may have made another one.
                refusals._strategies.clear()  # A test may compare with a model of one device.
                fn, args = pickle.loads(request)
                return fn(state["strategy"], *args)

            _answer(connection, work)
    os._exit(0)  # The others may be gone already: no farewell that would wait for them.


def _answer(connection: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = dumps((True, work()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
