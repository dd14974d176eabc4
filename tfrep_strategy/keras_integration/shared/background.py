"""Files that are written while training goes on: one after the other, from copies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent import futures


class BackgroundWrites:
    """Writes on a thread, one thing at a time. Python waits for it before it ends."""

    def __init__(self) -> None:
        self._last: futures.Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether something is being written."""
        return self._last is not None and not self._last.done()

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise without waiting."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def start(self, write: Callable[[], None]) -> None:
        """Starts to write.

        Args:
            write: Writes from a copy that nobody changes.

        Raises:
            Exception: What was written before could not be written. Nothing is started then.
        """
        self.wait()
        executor = futures.ThreadPoolExecutor(1, "tfrep-write")
        self._last = executor.submit(write)
        executor.shutdown(wait=False)  # Its thread ends with the file.

    def wait(self) -> None:
        """Returns when all is written.

        Raises:
            Exception: Something could not be written. It is raised once.
        """
        if self._last is not None:
            futures.wait([self._last])  # An interrupt here leaves it to be waited for.
            last, self._last = self._last, None
            last.result()

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Waits after the block, also if it raises. A failure of the write is then only told."""
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as error:
                print(f"tfrep: the last backup could not be written: {error}", file=sys.stderr, flush=True)
            raise
        self.wait()
