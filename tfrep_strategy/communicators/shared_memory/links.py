"""Connections between the ranks of one machine: sockets and shared memory.

Sockets and memory have no names: they travel between processes as open descriptors. So killed ranks leave nothing behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

from tfrep_strategy.cluster.hardware import cores_of_container, new_memory
from tfrep_strategy.cluster.rendezvous.channel import Channel
from tfrep_strategy.cluster.rendezvous.connections import close_in_children
from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.cluster.rendezvous.meeting import Met
from tfrep_strategy.cluster.rendezvous.meeting import meet as meet_others
from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.errors import message as message_of

LONGEST_MESSAGE = 1 << 14
"""The longest message in bytes. A socket holds two, by which a member may be ahead, so sending never waits."""

_LEAST_LOOKING_SECONDS, _MOST_LOOKING_SECONDS = 1e-6, 100e-6
"""The time that a member polls for a message before it sleeps, if each has a core. Waking up takes about as long."""


class Links:
    """A socket to each other member of a group, and their shared memory.

    A member that waits longer sleeps in the kernel. It wakes up when the other has sent a message, ends or is killed, and by
    `abort`. One thread at a time uses the links.

    Args:
        rank: The number of this member.
        sockets: A message socket to each member; None for this member. `close` closes them.
        memory: Descriptor of the shared memory. It is closed here.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None], memory: int) -> None:
        self.rank, self.size = rank, len(sockets)
        self._sockets = {other: each for other, each in enumerate(sockets) if each is not None}
        for link in self._sockets.values():
            link.settimeout(None)  # Overrides the script's default timeout.
        self.memory = mmap.mmap(memory, 0)
        os.close(memory)
        self._has_core = self.size <= cores_of_container()
        self._looking_seconds = _MOST_LOOKING_SECONDS
        self._aborted = ""
        self._groups: weakref.WeakSet[Links] = weakref.WeakSet()
        close_in_children(self, Links.close)

    def exchange(self, message: bytes = b"") -> list[bytes]:
        """Sends a message to all members, and returns their messages, by rank. No member returns before all have called it.

        Args:
            message: At most `LONGEST_MESSAGE` bytes.

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
        """Returns the next message. After polling in vain, a member polls for a shorter time."""
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
        """Connects some members by separate sockets and memory. All of them must call it.

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
        """Ends the connections of this group and of its subgroups. Waiting members, and later calls, get a `PeerError`.

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
        link: A message socket.
        most: The largest number of descriptors.

    Raises:
        PeerError: The other end was closed.
    """
    message, descriptors, _, _ = socket.recv_fds(link, LONGEST_MESSAGE, most, socket.MSG_CMSG_CLOEXEC)
    if not message:
        what = "A rank has ended its connection while the ranks were being connected."
        raise PeerError(message_of(what, hint="see the output of the other ranks."))
    return message, descriptors


def _given(link: socket.socket, descriptors: Sequence[int]) -> socket.socket:
    """Makes a pair of sockets, sends one of them, with other descriptors, and returns the other one."""
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with others:
        give(link, b"link", [others.fileno(), *descriptors])
    return own


def meet(run: str, rank: int, size: int, memory_bytes: int, seconds: float) -> Links:
    """Connects the ranks of a run. All of them must call it. They meet at a name that the kernel keeps.

    Args:
        run: The id of this run on this machine.
        rank: The rank of this process.
        size: Number of ranks.
        memory_bytes: The size of their shared memory.
        seconds: The time limit.

    Raises:
        ConfigurationError: Two processes have the same rank, or processes have different sizes or versions; or there is no memory.
        PeerError: Not all ranks arrive in time, or a rank ends.
    """
    place = Place(socket_name(run), rank, size, one_machine=True, has_name=True)
    links: list[socket.socket | None] = [None] * size
    with contextlib.ExitStack() as stack:  # Closes what is open if anything fails.
        memory, problem = _memory(memory_bytes) if rank == 0 else (-1, None)
        if rank == 0 and not problem:
            stack.callback(os.close, memory)

        def connect(channels: dict[int, Channel], met: list[Met]) -> None:
            nonlocal memory
            if refused := met[0].told["problem"]:
                raise ConfigurationError(refused)
            try:
                if rank == 0:
                    _connect_all(size, channels, memory, links, stack)
                    return
                memory = channels[0].take_descriptor()
                stack.callback(os.close, memory)
                for other in [other for other in range(size) if other != rank]:
                    links[other] = stack.enter_context(socket.socket(fileno=channels[0].take_descriptor()))
            except (OSError, EOFError) as error:
                what = f"Rank {rank} was not connected with the others: {error or 'a rank has ended'}."
                raise PeerError(message(what, hint="see the output of the other ranks.", size=size)) from None

        key = hashlib.sha256(run.encode()).digest()  # The kernel tells whose processes these are.
        meet_others(place, {"problem": problem}, secret=key, seconds=seconds, then=connect)
        stack.pop_all()
        return Links(rank, links, memory)


def socket_name(run: str) -> str:
    """Returns the name at which the ranks meet.

    Args:
        run: The id of the run on this machine.
    """
    return f"@tfrep-{os.geteuid()}-{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def _memory(memory_bytes: int) -> tuple[int, str | None]:
    """Makes the memory, or returns why it failed."""
    try:
        return new_memory(memory_bytes), None
    except OSError as error:
        return -1, message(
            f"The ranks cannot have shared memory: the system refuses it ({error.strerror}).",
            hint='raise the limits of this process (ulimit -a), or name another communicator: "tf" or "horovod".',
            code="TFREP-E006",
            num_bytes=memory_bytes,
        )


def _connect_all(size: int, channels: dict[int, Channel], memory: int, own: list[Any], stack: contextlib.ExitStack) -> None:
    """Gives all ranks the memory, and each pair a connection. A rank gets its ends in the order of the other ranks."""
    for channel in channels.values():
        channel.give_descriptor(memory)
    for left in range(size):
        for right in range(left + 1, size):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, end in zip((left, right), ends, strict=True):
                if rank == 0:
                    own[right] = stack.enter_context(end)
                else:
                    with end:
                        channels[rank].give_descriptor(end.fileno())
