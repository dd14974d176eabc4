"""Processes that stay alive for a whole benchmark and work only when it is their turn.

Peers need processes of their own (another Keras, another way to start TensorFlow), and the machine's speed drifts, so
all are started once and then measured in turns, again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.hardware import SHARES_MEMORY, bound_to, cores_of_ranks, thread_variables
from tfrep_strategy.cluster.identity import horovod_is_installed, identities, inherited_environ

_PIPE = "TFREP_BENCHMARK_PIPE"
_PATIENCE_SECONDS = 300.0
_ENVIRON = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # Its clock runs on while a process rests.
}
_REPOSITORY = Path(__file__).resolve().parent.parent


def usable_communicators() -> list[str]:
    """Lists the communicators that processes of this machine can use."""
    return ["tf", *(["horovod"] if horovod_is_installed() else []), *(["shared_memory"] if SHARES_MEMORY else [])]


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared.

    Attributes:
        name: What the table calls it.
        settings: What its processes are told.
        processes: How many there are.
        communicator: How they are told about each other: "horovod" or "tf".
        environ: Environment variables that they need.
        bound: Whether each process is bound to its own part of the cores, as by `tfrep run --bind-cores`.
        checkout: Of another commit, whose package its processes import in place of this one's.
    """

    name: str
    settings: Mapping[str, Any]
    processes: int = 1
    communicator: str = "tf"
    environ: Mapping[str, str] = field(default_factory=dict)
    bound: bool = False
    checkout: Path | None = None


class Crew:
    """The processes of one variant.

    Args:
        variant: What they are.
        module: What they run: a module that calls `work`.

    Raises:
        RuntimeError: A process ended before it was ready; has what it wrote last.
    """

    def __init__(self, variant: Variant, module: str) -> None:
        self.variant = variant
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._start(module)
            stack.pop_all()

    def _start(self, module: str) -> None:
        self._logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfrep-benchmark-")))
        folder, more_variables = _REPOSITORY, {}
        if self.variant.checkout is not None:
            folder, more_variables = self._logs, {"PYTHONPATH": str(_REPOSITORY)}  # The folder comes first.
            (folder / "tfrep_strategy").symlink_to(self.variant.checkout.resolve(strict=True) / "tfrep_strategy")
        told: list[dict[str, str]] = [{}]
        if self.variant.processes > 1:
            told = self._stack.enter_context(identities(self.variant.communicator, self.variant.processes))
        for rank, variables in enumerate(told):
            mine, theirs = Pipe()
            resting = {"TFREP_TIMEOUT": "0"} if self._rests else {}  # Else a process that rests is taken for a frozen one.
            threads = thread_variables(self.variant.processes)  # Ours have them anyway; so all peers share the cores as well.
            environ = {**inherited_environ(), **_ENVIRON, **threads, **resting, **self.variant.environ, **variables}
            cores = cores_of_ranks(self.variant.processes)[rank] if self.variant.bound else ()
            with theirs, open(self._logs / f"{rank}.log", "wb") as log, bound_to(cores):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module],
                        cwd=folder,
                        env={**environ, **more_variables, _PIPE: str(theirs.fileno())},
                        stdout=log,
                        stderr=log,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,  # As launchers do: the scheduler shares the machine out by session.
                    )
                )
            self._connections.append(mine)
        self.ask(dict(self.variant.settings))

    def ask(self, question: Any) -> Any:
        """Gives all processes something to do.

        Args:
            question: What the function that they handed to `work` gets.

        Returns:
            The answer of rank 0.

        Raises:
            RuntimeError: A process ended; has what it wrote last.
        """
        return self.ask_all(question)[0]

    def ask_all(self, question: Any) -> list[Any]:
        """Does what `ask` does, and returns the answers of all processes."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # It has ended, which its answer will say.
                connection.send(question)
        answers = [self._answer(connection) for connection in self._connections]
        self._rest()
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        self._stack.close()

    @property
    def _rests(self) -> bool:
        # Horovod looks for work a thousand times a second, which would slow down those whose turn it is. TensorFlow's
        # processes do not, and would be missed by their coordination service.
        return self.variant.communicator == "horovod" and self.variant.processes > 1

    def _rest(self) -> None:
        if self._rests:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _answer(self, connection: Connection) -> Any:
        try:
            if connection.poll(_PATIENCE_SECONDS):
                return connection.recv()
        except (EOFError, ConnectionError):
            for process in self._processes:  # So that all is written that they have to say.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
            raise RuntimeError(f"{self.variant.name}: a process ended.\n{self._last_words()}") from None
        raise RuntimeError(f"{self.variant.name}: no answer in {_PATIENCE_SECONDS:g} s.\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(log.read_text("utf-8", "replace")[-3000:] for log in sorted(self._logs.glob("*.log")))


def work(make: Callable[[dict[str, Any]], Callable[[Any], Any]]) -> None:
    """Is the life of a process of a crew.

    Args:
        make: Gets the variant's settings, gives the function that answers questions.
    """
    with Connection(int(os.environ[_PIPE])) as connection, contextlib.suppress(EOFError):
        answer = make(connection.recv())
        connection.send(None)
        while True:
            connection.send(answer(connection.recv()))
