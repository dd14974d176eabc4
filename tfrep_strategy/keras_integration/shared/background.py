"""Files that are written while training goes on: one after the other, from copies. Training does not depend on them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent import futures


class BackgroundWrites:
    """Writes on a thread, one thing at a time. Python waits for it before it ends.

    What cannot be written is told to the user, once for each kind of failure until something is written again.
    """

    def __init__(self) -> None:
        self._last: futures.Future[bool] | None = None
        self._told = set[tuple[type, int | None]]()

    @property
    def is_writing(self) -> bool:
        """Whether something is being written."""
        return self._last is not None and not self._last.done()

    def start(self, what: str, write: Callable[[], None]) -> None:
        """Starts to write, when what was started before is over.

        Args:
            what: Its name, for the user.
            write: Writes from a copy that nobody changes. If it fails, what was there is as it was.
        """
        self.wait()
        executor = futures.ThreadPoolExecutor(1, "tfrep-write")
        self._last = executor.submit(self._try, what, write)
        executor.shutdown(wait=False)  # Its thread ends with the file.

    def wait(self) -> bool:
        """Returns when all is written: whether what was started last was."""
        return self._last is None or self._last.result()

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Waits after the block, also if it raises."""
        try:
            yield
        finally:
            self.wait()

    def _try(self, what: str, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as error:
            kind = type(error), getattr(error, "errno", None)
            if kind not in self._told:
                self._told.add(kind)
                text = f"{what} was not written: {error}\nAn older one is as it was. Training goes on, and the next one is tried."
                print(f"tfrep: {text}", file=sys.stderr, flush=True)
            return False
        self._told.clear()
        return True
