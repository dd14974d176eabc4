"""Connections and forked children: a peer never notices an end that a child of the process keeps open."""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from typing import Any


def close_in_children(owner: Any, close: Callable[[Any], None]) -> None:
    """Has `close(owner)` called in every process that is forked off from now on, while the owner lives.

    Args:
        owner: Is not kept alive.
        close: Closes what it has open, and tells nobody.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        alive = reference()
        if alive is not None:
            close(alive)

    os.register_at_fork(after_in_child=after_fork)


@contextlib.contextmanager
def sockets_closed_in_children() -> Iterator[None]:
    """Has sockets that are opened inside, by whatever library, closed in every process that is forked off later."""
    before = _open_sockets()
    yield
    opened = _open_sockets() - before
    if opened:
        os.register_at_fork(after_in_child=lambda: _close_all(opened))


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptors and inodes, which tell sockets apart that had the same descriptor one after the other."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # The folder's own descriptor is gone.
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_all(sockets: set[tuple[int, int]]) -> None:
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
