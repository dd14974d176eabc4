"""Shows what ranks write to their logs, line by line."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def lines_shown(logs: Mapping[str, Path], *, only_new: bool = False) -> Iterator[None]:
    """Shows the lines of growing files on the standard output while the body runs, and what is left at its end.

    Args:
        logs: The files, by what stands before their lines. They need not exist yet.
        only_new: Whether what they contain already is left out.

    Yields:
        Nothing.

    Example:
        >>> with lines_shown({"[1] ": Path("rank1.log")}):
        ...     size = Path("rank1.log").write_text("ready")
        [1] ready
    """
    files = [_Growing(path, prefix, path.stat().st_size if only_new and path.exists() else 0) for prefix, path in logs.items()]
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_SECONDS):
            for file in files:
                file.show()

    thread = threading.Thread(target=follow, daemon=True, name="tfrep-output")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for file in files:
            file.show(is_complete=True)


class _Growing:
    """A file to which another process writes, and of which so many bytes were shown."""

    def __init__(self, path: Path, prefix: str, shown: int) -> None:
        self._path, self._prefix = path, prefix
        self._shown, self._rest = shown, b""

    def show(self, is_complete: bool = False) -> None:
        """Shows the lines that have come; with `is_complete` also a last one without an end."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._shown)
            new = file.read()
            self._shown += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            if is_complete and self._rest:
                lines.append(self._rest)
            with contextlib.suppress(OSError, ValueError):  # Nobody reads any more. The run goes on, and the logs have it all.
                for line in lines:
                    _write(f"{self._prefix}{line.decode('utf-8', 'replace')}\n")
                sys.stdout.flush()


def _write(text: str) -> None:
    """Writes to the standard output. What its encoding does not have becomes question marks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
