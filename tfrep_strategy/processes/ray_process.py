"""A process that an actor of Ray runs, as `processes.remote` knows processes."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from typing import IO, Any

TOLD = "told"
"""The concurrency group of what an actor is told."""
LOST = 255
"""The exit code of a process that Ray has lost."""


class RayProcess:
    """A process that an actor runs.

    Args:
        ray: The module `ray`, which is connected.
        actor: A `PlaceOnRay`.

    Attributes:
        stdin: Its standard input.
        stdout: Its standard output.
        stderr: Its standard error, and why Ray has lost it.
    """

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._code = LOST
        self.stdin: IO[bytes] = _Input(actor)  # type: ignore[assignment]
        self.stdout, stdout = _pipe()
        self.stderr, stderr = _pipe()
        streams = {"stdout": stdout, "stderr": stderr}
        self._thread = threading.Thread(target=self._pass_on, args=(streams,), daemon=True, name="tfrep-ray")
        self._thread.start()

    def wait(self) -> int:
        """Returns its exit code when it has ended; 255 if it was lost."""
        self._thread.join()
        return self._code

    def kill(self) -> None:
        """Ends the actor, by which the process notices."""
        self._ray.kill(self._actor)

    def _pass_on(self, streams: dict[str, IO[bytes]]) -> None:
        with contextlib.ExitStack() as stack:
            for each in streams.values():
                stack.enter_context(each)
            stack.enter_context(contextlib.suppress(OSError))  # Nobody reads any more.
            try:
                for reference in self._actor.output.options(num_returns="streaming").remote():
                    kind, content = self._ray.get(reference)
                    if kind == "code":
                        self._code = content
                    else:
                        streams[kind].write(content)
            except self._ray.exceptions.RayError as error:
                streams["stderr"].write(f"{_reason(str(error))}\n".encode())


class _Input(io.RawIOBase):
    """The standard input of a process that an actor runs."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def write(self, data: Any) -> int:
        self._actor.tell.options(concurrency_group=TOLD).remote(bytes(data))
        return len(data)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb", 0)


def _reason(told: str) -> str:
    """Returns the sentence in which Ray says why an actor is lost."""
    lines = [line.strip() for line in told.splitlines() if line.strip()] or ["Ray has lost the actor."]
    return next((line for line in lines if "because" in line), lines[0]).partition(". ")[0]
