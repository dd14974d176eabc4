"""Closes connections in forked children: while a child keeps one open, the peer does not notice that this process ended."""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from typing import Any


def close_in_children(owner: Any, close: Callable[[Any], None]) -> None:
    """Calls `close(owner)` in every process that is forked from now on, as long as the owner lives.

    Args:
        owner: The object with open connections. It is not kept alive.
        close: Closes the connections without a message to the peers.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        alive = reference()
        if alive is not None:
            close(alive)

    os.register_at_fork(after_in_child=after_fork)


@contextlib.contextmanager
def sockets_closed_in_children() -> Iterator[None]:
    """Closes sockets that any library opens inside the body, in every process that is forked later."""
    before = _open_sockets()
    yield
    opened = _open_sockets() - before
    if opened:
        os.register_at_fork(after_in_child=lambda: _close_all(opened))


def _open_sockets() -> set[tuple[int, int]]:
    """Returns descriptors with inodes; inodes distinguish sockets that reuse a descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # The descriptor of the listing itself is closed by now.
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_all(sockets: set[tuple[int, int]]) -> None:
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
