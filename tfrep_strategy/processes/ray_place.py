"""A place that Ray gives to ranks, in a process of Ray's. The file travels there, so it imports nothing of this package."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

_OF_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Ray sets them for what it starts. Ranks are told them."""
_LONGEST_READ = 1 << 16


class PlaceOnRay:
    """An actor of Ray, which runs a process.

    Args:
        command: Its command line.

    Example:
        >>> place = PlaceOnRay(["cat"])
        >>> place.tell(b"ready")
        >>> place.end()
        >>> list(place.output())
        [('stdout', b'ready'), ('code', 0)]
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        environ = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        # The shell tells of a program that is not there as one at the other end of ssh does.
        shell = ["/bin/sh", "-c", 'exec "$0" "$@"', *command]
        self._process = subprocess.Popen(
            shell, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True
        )

    def output(self) -> Iterator[tuple[str, Any]]:
        """Yields what the process writes, after "stdout" or "stderr", and its exit code after "code"."""
        reads: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

        def read(name: str, stream: IO[bytes]) -> None:
            while new := stream.read1(_LONGEST_READ):  # type: ignore[attr-defined]
                reads.put((name, new))
            reads.put((name, b""))

        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for each in streams.items():
            threading.Thread(target=read, args=each, daemon=True).start()
        left = len(streams)
        while left:
            name, new = reads.get()
            if new:
                yield name, new
            left -= not new
        yield "code", self._process.wait()

    def tell(self, data: bytes) -> None:
        """Writes to the standard input of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def end(self) -> None:
        """Ends the standard input of the process, at which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def gpus() -> list[str]:
    """Returns the GPUs that Ray has given to this process.

    Example:
        >>> gpus()  # doctest: +SKIP
        ['0']
    """
    return [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
