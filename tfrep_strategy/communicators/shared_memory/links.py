"""What connects the ranks of one machine: a socket between any two of them, and memory that all have mapped.

None of it has a name: sockets and memory go from process to process as open descriptors. So nothing is left of ranks that were
killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
import weakref
from collections.abc import Sequence

from tfrep_strategy.common_memory import new_memory
from tfrep_strategy.communicators.forking import close_in_children
from tfrep_strategy.errors import PeerError
from tfrep_strategy.errors import message as message_of
from tfrep_strategy.quotas import cores_of_container

LONGEST_MESSAGE = 1 << 14
"""The longest message in bytes. A socket holds the two that a member may be ahead, so to send never waits."""

_LEAST_LOOKING_SECONDS, _MOST_LOOKING_SECONDS = 1e-6, 100e-6
"""How long a member looks for a message before it sleeps, where each has a core. To wake one that sleeps takes about as long."""


class Links:
    """A socket to each other member of a group, and their common memory.

    A member that waits longer sleeps in the kernel. It wakes when the other has sent a message, ends or is killed, and by `abort`.
    One thread at a time uses the links.

    Args:
        rank: The number of this member.
        sockets: A socket to each member, which keeps messages apart; None at the own number. `close` closes them.
        memory: Descriptor of the common memory. It is closed here.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None], memory: int) -> None:
        self.rank, self.size = rank, len(sockets)
        self._sockets = {other: each for other, each in enumerate(sockets) if each is not None}
        for link in self._sockets.values():
            link.settimeout(None)  # Whatever the script has set for new sockets.
        self.memory = mmap.mmap(memory, 0)
        os.close(memory)
        self._has_core = self.size <= cores_of_container()
        self._looking_seconds = _MOST_LOOKING_SECONDS
        self._aborted = ""
        self._groups: weakref.WeakSet[Links] = weakref.WeakSet()
        close_in_children(self, Links.close)

    def exchange(self, message: bytes = b"") -> list[bytes]:
        """Sends a message to all members, and returns theirs, by rank. No member returns before all have called it.

        Args:
            message: Of `LONGEST_MESSAGE` bytes at most.

        Raises:
            PeerError: A member has ended, or `abort` was called.
        """
        sent = b"-" + message  # An empty message would look like the end of the connection.
        received = [sent] * self.size
        other = self.rank
        try:
            for other, link in self._sockets.items():  # noqa: B007
                link.send(sent, socket.MSG_NOSIGNAL)
            for other, link in self._sockets.items():
                received[other] = self._received(link)
                if not received[other]:
                    raise ConnectionResetError
        except OSError:
            self.abort(f"Rank {other} has ended its connection.")
            raise PeerError(self._aborted) from None
        return [each[1:] for each in received]

    def _received(self, link: socket.socket) -> bytes:
        """Returns the next message. The longer a member has looked in vain, the shorter it looks the next time."""
        if self._has_core:
            ends = time.monotonic() + self._looking_seconds
            while True:
                with contextlib.suppress(BlockingIOError):
                    message = link.recv(1 + LONGEST_MESSAGE, socket.MSG_DONTWAIT)
                    self._looking_seconds = min(2 * self._looking_seconds, _MOST_LOOKING_SECONDS)
                    return message
                if time.monotonic() > ends:
                    break
            self._looking_seconds = max(self._looking_seconds / 2, _LEAST_LOOKING_SECONDS)
        return link.recv(1 + LONGEST_MESSAGE)

    def subgroup(self, members: Sequence[int], memory_bytes: int) -> Links:
        """Connects some members by sockets and memory of their own. All of them must call it.

        Args:
            members: Their numbers, sorted.
            memory_bytes: The size of their memory.

        Raises:
            PeerError: A member has ended.
        """
        memory = new_memory(memory_bytes) if self.rank == members[0] else -1
        sockets: list[socket.socket | None] = []
        for other in members:
            if other == self.rank:
                sockets.append(None)
            elif other > self.rank:
                sockets.append(_given(self._sockets[other], [memory] if self.rank == members[0] else []))
            else:
                _, (end, *files) = take(self._sockets[other], 2)
                sockets.append(socket.socket(fileno=end))
                memory = files[0] if files else memory
        group = Links(list(members).index(self.rank), sockets, memory)
        group._has_core = self._has_core
        self._groups.add(group)
        return group

    def abort(self, reason: str) -> None:
        """Ends the connections of this group and of its subgroups. All members that wait, or will, get a `PeerError`.

        Args:
            reason: The message of this member's errors.
        """
        self._aborted = self._aborted or reason
        for link in self._sockets.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for group in list(self._groups):
            group.abort(reason)

    def close(self) -> None:
        """Closes the sockets of this group and of its subgroups."""
        for link in self._sockets.values():
            link.close()
        for group in list(self._groups):
            group.close()


def give(link: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Sends a message with open descriptors. They stay open here."""
    socket.send_fds(link, [message], list(descriptors), socket.MSG_NOSIGNAL)


def take(link: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receives a message with open descriptors.

    Args:
        link: A socket that keeps messages apart.
        most: How many descriptors there may be.

    Raises:
        PeerError: The other end was closed.
    """
    message, descriptors, _, _ = socket.recv_fds(link, LONGEST_MESSAGE, most, socket.MSG_CMSG_CLOEXEC)
    if not message:
        what = "A rank has ended its connection while the ranks were being connected."
        raise PeerError(message_of(what, hint="see the output of the other ranks."))
    return message, descriptors


def _given(link: socket.socket, descriptors: Sequence[int]) -> socket.socket:
    """Makes a pair of sockets, sends one, with other descriptors, and returns the other one."""
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with others:
        give(link, b"link", [others.fileno(), *descriptors])
    return own
