"""Memory that processes of one machine have in common, and whether they can have any. It does not load TensorFlow."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import socket
from collections.abc import Iterator

CHUNK_BYTES = 1 << 20
"""How many bytes of a member are in the memory at once. Smaller chunks cost more waits, larger ones leave a core's cache."""

MOST_IN_MESSAGE = 1 << 13
"""Up to how many bytes of a member need no memory: they travel with the message that begins a collective."""

SHARES_MEMORY = hasattr(os, "memfd_create")
"""Whether processes of this machine can share memory that has no name: on Linux."""

MOST_SHARING = 16
"""Up to how many ranks were measured. Each talks to each, so another transport may be faster for more."""


def bytes_for(size: int) -> int:
    """Returns how large the memory of a group is.

    Args:
        size: How many members it has.

    Example:
        >>> bytes_for(2) >> 20
        6
    """
    return 2 * (size + 1) * CHUNK_BYTES


def new_memory(size: int) -> int:
    """Makes memory without a name, which costs nothing until it is used.

    Args:
        size: In bytes.

    Returns:
        A descriptor.

    Raises:
        OSError: The system, or a limit of this process, does not allow it.

    Example:
        >>> os.close(new_memory(4096))
    """
    descriptor = os.memfd_create("tfrep")
    try:
        with _files_of_any_size():
            os.ftruncate(descriptor, size)
        mmap.mmap(descriptor, 0).close()  # Or a rank would find out later that it cannot.
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _files_of_any_size() -> Iterator[None]:
    """Raises the limit of files as far as this process may: for the system, memory without a name is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def problem_of_sharing(size: int) -> str | None:
    """Tries all that ranks need to talk through common memory.

    Args:
        size: How many ranks there are.

    Returns:
        What keeps them from it; None if nothing does.

    Example:
        >>> problem_of_sharing(2) is None or not SHARES_MEMORY
        True
    """
    if not SHARES_MEMORY:
        return "the system is not Linux"
    try:
        with contextlib.ExitStack() as stack:
            memory = new_memory(bytes_for(size))
            stack.callback(os.close, memory)
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            server.bind("")  # To a name in the kernel that is free.
            for _ in range(size):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in ends:
                    stack.enter_context(end)
            socket.send_fds(ends[0], [b"memory"], [memory])
            _, files, _, _ = socket.recv_fds(ends[1], 10, 1)
            for file in files:
                os.close(file)
            return None if files else "the system passes no descriptors"
    except OSError as error:
        return f"the system refuses it ({error.strerror or error})"
