"""How the ranks of one machine find each other: rank 0 listens on a socket of the machine, which no network reaches.

The socket has a name in the kernel, which ends with the socket. Every user of the machine can connect, but the kernel tells each
end whose process the other one is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Collection, Container
from typing import cast

from tfrep_strategy._version import __version__
from tfrep_strategy.common_memory import new_memory
from tfrep_strategy.communicators.shared_memory.links import LONGEST_MESSAGE, Links, give, take
from tfrep_strategy.errors import ConfigurationError, PeerError, is_count, message

_AGAIN_SECONDS, _LOOK_SECONDS = 0.02, 0.2
_GRACE_SECONDS = 5.0
"""How much longer the others wait than rank 0, which knows who is missing."""
_BACKLOG = 4096
"""How many may have connected before they are looked at. All ranks may come at once."""
_LONGEST_HELLO = 1 << 10


def meet(run: str, rank: int, size: int, memory_bytes: int, seconds: float) -> Links:
    """Connects the ranks of a run. All of them must call it.

    Args:
        run: What tells this run from all others on this machine.
        rank: The own rank.
        size: How many ranks there are.
        memory_bytes: The size of their common memory.
        seconds: How long to wait for the others.

    Raises:
        ConfigurationError: Two processes have the same rank, or other processes think of another size, or have another version.
        PeerError: Not all ranks come in time.
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
    """Returns the name of the socket on which rank 0 listens until all have come.

    Args:
        run: What tells the run from all others on this machine.
    """
    return f"\0tfrep-{os.geteuid()}-{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def _receive(stack: contextlib.ExitStack, name: str, size: int, memory_bytes: int, deadline: float) -> Links:
    """Waits for all ranks, and connects each with each."""
    with _listening(name, deadline) as server:
        ranks = _all_ranks(server, size, deadline)
    for link in ranks.values():
        stack.enter_context(link).settimeout(max(deadline - time.monotonic(), _AGAIN_SECONDS))
    memory = _memory(ranks.values(), memory_bytes)
    try:
        for link in ranks.values():
            give(link, b"memory", [memory])
        for left in range(1, size):  # A rank gets the ends in the order of the ranks at the other end.
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
    """Makes the memory, or tells all ranks why there is none."""
    try:
        return new_memory(memory_bytes)
    except OSError as error:
        refused = message(
            f"The ranks cannot have common memory: the system refuses it ({error.strerror}).",
            hint='raise the limits of this process (ulimit -a), or name another communicator: "tf" or "horovod".',
            num_bytes=memory_bytes,
        )
        for link in links:
            with contextlib.suppress(OSError):
                link.send(refused.encode(), socket.MSG_NOSIGNAL)
        raise ConfigurationError(refused) from None


def _join(stack: contextlib.ExitStack, name: str, rank: int, size: int, deadline: float) -> Links:
    """Connects to rank 0, and gets from it the memory and the ends of the other connections."""
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
        with contextlib.suppress(OSError):  # Nobody listens yet.
            link.connect(name)
            if _is_own(link):
                return link
        link.close()
        if time.monotonic() > deadline:
            raise PeerError(_missing("Rank 0 has not come.", rank=rank))
        time.sleep(_AGAIN_SECONDS)


def _all_ranks(server: socket.socket, size: int, deadline: float) -> dict[int, socket.socket]:
    """Accepts processes until all ranks have said who they are. Those that say nothing, or anything else, keep nobody waiting."""
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
                if rank is None:  # A stranger, or a rank that has ended, after which another may come.
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
    """Returns the rank of a process that belongs to this run; None for another, which is told why if it is one of ours."""
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
    """Returns whether the process at the other end is one of this user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def _missing(what: str, **received: object) -> str:
    hint = "look for the reason in the output of the other ranks; TFREP_RENDEZVOUS_TIMEOUT sets how long to wait."
    return message(what, hint=hint, **received)
