"""Confines the sockets of processes that this one has started, and that cannot be told where to listen: Ray's."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from tfrep_strategy.rendezvous.confinement import confine
from tfrep_strategy.rendezvous.connections import is_loopback

_PIDFD_GETFD = 438
"""The system call that copies a descriptor of another process. It has this number on all machines for which TensorFlow is built."""
_LOOK_SECONDS = 0.5

_GONE = (errno.ESRCH, errno.EBADF, errno.ENOTSOCK)
"""What says that the process, or its socket, is no more."""

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def children_confined() -> Iterator[None]:
    """Confines to this machine what children of this process listen on, and their children, while the body runs.

    It takes up to half a second, so that it is a second lock for those who ask for a secret. Where the system does not let a
    process touch descriptors of its children (Linux older than 5.6, some containers), it does nothing.

    Example:
        >>> with children_confined():
        ...     pass
    """
    is_over = threading.Event()
    confined = set[tuple[int, int, int]]()

    def watch() -> None:
        with contextlib.suppress(OSError):  # The system does not let it.
            while not is_over.is_set():
                _confine_children(confined)
                is_over.wait(_LOOK_SECONDS)

    thread = threading.Thread(target=watch, daemon=True, name="tfrep-confinement")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _confine_children(confined: set[tuple[int, int, int]]) -> None:
    """Confines those that are not in the set, and adds them.

    Raises:
        OSError: The system does not let it.
    """
    for child in psutil.Process().children(recursive=True):
        try:
            found = [each for each in child.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:  # It has ended.
            continue
        for each in found:
            key = child.pid, each.fd, each.laddr.port
            if key not in confined and not is_loopback(each.laddr.ip):
                with _copied(child.pid, each) as server:
                    if server is not None:
                        confine(server)
                        confined.add(key)


@contextlib.contextmanager
def _copied(pid: int, connection: Any) -> Iterator[socket.socket | None]:
    """Yields a socket of another process; None if it is closed by now.

    Raises:
        OSError: The system does not let it.
    """
    with contextlib.ExitStack() as stack:
        try:
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            copy = _libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            stack.callback(os.close, copy)
            server = stack.enter_context(socket.socket(fileno=os.dup(copy)))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            yield None
        else:
            yield server if server.getsockname()[1] == connection.laddr.port else None
