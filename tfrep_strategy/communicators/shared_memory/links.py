"""Connections between the ranks of one machine: sockets, shared memory, and the rendezvous.

Sockets and memory have no names: they travel between processes as open descriptors. So killed ranks leave nothing behind.

In the rendezvous rank 0 listens on a local socket, which no network reaches. Its name is in the kernel, and ends with the socket.
Every user of the machine can connect, but the kernel tells each end whose process the other one is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Collection, Container, Sequence
from typing import cast

from tfrep_strategy._version import __version__
from tfrep_strategy.cluster.hardware import cores_of_container, new_memory
from tfrep_strategy.cluster.rendezvous.connections import close_in_children
from tfrep_strategy.errors import ConfigurationError, PeerError, is_count, message
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


_AGAIN_SECONDS, _LOOK_SECONDS = 0.02, 0.2
_GRACE_SECONDS = 5.0
"""The additional time that other ranks wait. Rank 0 ends first, because it knows the missing ranks."""
_BACKLOG = 4096
"""The number of pending connections. All ranks may connect at once."""
_LONGEST_HELLO = 1 << 10


def meet(run: str, rank: int, size: int, memory_bytes: int, seconds: float) -> Links:
    """Connects the ranks of a run. All of them must call it.

    Args:
        run: The id of this run on this machine.
        rank: The rank of this process.
        size: Number of ranks.
        memory_bytes: The size of their shared memory.
        seconds: The time limit.

    Raises:
        ConfigurationError: Two processes have the same rank, or processes have different sizes or versions.
        PeerError: Not all ranks arrive in time.
    """
    name = socket_name(run)
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:  # Closes what is open if anything fails.
        if rank:
            links = _join(stack, name, rank, size, deadline)
        else:
            links = _receive(stack, name, size, memory_bytes, deadline)
        stack.pop_all()
        return links


def socket_name(run: str) -> str:
    """Returns the name of the socket on which rank 0 listens until all ranks have arrived.

    Args:
        run: The id of the run on this machine.
    """
    return f"\0tfrep-{os.geteuid()}-{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def _receive(stack: contextlib.ExitStack, name: str, size: int, memory_bytes: int, deadline: float) -> Links:
    """Waits for all ranks, and connects each pair."""
    with _listening(name, deadline) as server:
        ranks = _all_ranks(server, size, deadline)
    for link in ranks.values():
        stack.enter_context(link).settimeout(max(deadline - time.monotonic(), _AGAIN_SECONDS))
    memory = _memory(ranks.values(), memory_bytes)
    try:
        for link in ranks.values():
            give(link, b"memory", [memory])
        for left in range(1, size):  # A rank gets its ends in the order of the other ranks.
            for right in range(left + 1, size):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for rank, end in zip((left, right), ends, strict=True):
                    with end:
                        give(ranks[rank], b"link", [end.fileno()])
    except OSError as error:
        os.close(memory)
        what, hint = f"A rank ended while the ranks were being connected: {error}.", "see the output of the other ranks."
        raise PeerError(message(what, hint, size=size)) from None
    return Links(0, [None, *(ranks[rank] for rank in range(1, size))], memory)


def _memory(links: Collection[socket.socket], memory_bytes: int) -> int:
    """Makes the memory, or tells all ranks why it failed."""
    try:
        return new_memory(memory_bytes)
    except OSError as error:
        refused = message(
            f"The ranks cannot have shared memory: the system refuses it ({error.strerror}).",
            hint='raise the limits of this process (ulimit -a), or name another communicator: "tf" or "horovod".',
            code="TFREP-E006",
            num_bytes=memory_bytes,
        )
        for link in links:
            with contextlib.suppress(OSError):
                link.send(refused.encode(), socket.MSG_NOSIGNAL)
        raise ConfigurationError(refused) from None


def _join(stack: contextlib.ExitStack, name: str, rank: int, size: int, deadline: float) -> Links:
    """Connects to rank 0, and receives the memory and the other connections from it."""
    first = stack.enter_context(_connected(name, rank, deadline))
    first.settimeout(max(deadline - time.monotonic(), 0.0) + _GRACE_SECONDS)
    links: list[socket.socket | None] = [first]
    try:
        first.send(json.dumps({"rank": rank, "size": size, "version": __version__}).encode(), socket.MSG_NOSIGNAL)
        said, files = take(first, 1)
        if not files:
            raise ConfigurationError(said.decode())
        for other in range(1, size):
            if other == rank:
                links.append(None)
            else:
                _, (end,) = take(first, 1)
                links.append(stack.enter_context(socket.socket(fileno=end)))
    except (OSError, PeerError) as error:
        raise PeerError(_missing(f"Rank 0 did not connect this rank with the others: {error}")) from None
    return Links(rank, links, files[0])


def _listening(name: str, deadline: float) -> socket.socket:
    while True:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.bind(name)
            server.listen(_BACKLOG)
            return server
        except OSError as error:
            server.close()
            if time.monotonic() > deadline:
                what = f"Another process is rank 0 of this run ({error.strerror})."
                raise ConfigurationError(message(what, hint="start each rank once.", rank=0)) from None
        time.sleep(_AGAIN_SECONDS)


def _connected(name: str, rank: int, deadline: float) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):  # Rank 0 does not listen yet.
            link.connect(name)
            if _is_own(link):
                return link
        link.close()
        if time.monotonic() > deadline:
            raise PeerError(_missing("Rank 0 has not come.", rank=rank))
        time.sleep(_AGAIN_SECONDS)


def _all_ranks(server: socket.socket, size: int, deadline: float) -> dict[int, socket.socket]:
    """Accepts processes until all ranks have sent their numbers. Connections that send nothing, or anything else, do not block."""
    ranks: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(server, selectors.EVENT_READ)
        while len(ranks) < size - 1:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(1, size) if rank not in ranks]
                raise PeerError(_missing("Not all ranks have come.", missing=missing))
            for key, _ in selector.select(_LOOK_SECONDS):
                if key.fileobj is server:
                    guest = stack.enter_context(server.accept()[0])
                    guest.setblocking(False)
                    if _is_own(guest):
                        selector.register(guest, selectors.EVENT_READ)
                    else:
                        guest.close()
                    continue
                guest = cast(socket.socket, key.fileobj)
                rank = _heard(guest, size, ranks)
                if rank is None:  # An unknown process, or a rank that has ended and may be replaced.
                    selector.unregister(guest)
                    ranks = {other: link for other, link in ranks.items() if link is not guest}
                    guest.close()
                else:
                    ranks[rank] = guest
        stack.pop_all()
        for key in list(selector.get_map().values()):
            if key.fileobj not in (server, *ranks.values()):
                cast(socket.socket, key.fileobj).close()
    return ranks


def _heard(guest: socket.socket, size: int, taken: Container[int]) -> int | None:
    """Returns the rank of a process of this run; None for another process, which gets the reason if it belongs to this package."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(guest.recv(_LONGEST_HELLO))
        rank, own = said["rank"], {"size": size, "version": __version__}
        same = {name: said[name] for name in own} == own
        if same and is_count(rank, 1, size - 1) and rank not in taken:
            return rank
        what = f"Another process is rank {rank}." if same and rank in taken else f"Rank 0 has {own}."
        refusal = message(what, hint="start each rank once, all with one launcher and one installation.", **said)
        guest.send(refusal.encode()[:LONGEST_MESSAGE], socket.MSG_NOSIGNAL)
    return None


def _is_own(link: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def _missing(what: str, **received: object) -> str:
    hint = "look for the reason in the output of the other ranks; TFREP_RENDEZVOUS_TIMEOUT sets how long to wait."
    return message(what, hint=hint, code="TFREP-E013", **received)
