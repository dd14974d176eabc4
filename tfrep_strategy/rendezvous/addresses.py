"""The meeting of the ranks of a run: they get each other's addresses, or learn that all are there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
from collections.abc import Sequence

from tfrep_strategy.rendezvous.confinement import confine, machines_of_run
from tfrep_strategy.rendezvous.connections import LOOPBACK, free_ports, is_loopback
from tfrep_strategy.rendezvous.meeting import meet
from tfrep_strategy.rendezvous.statements import Place


@functools.cache
def addresses_of_ranks(place: Place) -> tuple[str, ...]:
    """Meets the other ranks, once in the life of this process.

    Args:
        place: Where they meet.

    Returns:
        `"host:port"` of each rank, where it may listen.

    Raises:
        ConfigurationError: The ranks do not fit.
        PeerError: Not all have come in time.

    Example:
        >>> addresses_of_ranks(Place("localhost:29500", number=0, count=1, one_machine=True))
        ('127.0.0.1:...',)
    """
    (port,) = free_ports(1, LOOPBACK if place.one_machine else "")
    met = meet(place, {"port": port})
    return tuple(with_port(each.host, each.told["port"]) for each in met)


def meet_at(addresses: Sequence[str], rank: int, source: str) -> None:
    """Meets the other ranks at the address of rank 0, where ranks know all addresses from the start.

    No server of TensorFlow may listen there yet. The ranks need no secret: the servers obey all machines of the run anyway. Rank 0
    takes no connections from others, as far as it knows the machines. Programs with another list of addresses are not let in.

    Args:
        addresses: `"host:port"` of each rank.
        rank: Which one this process is.
        source: What the addresses are from, for messages.

    Raises:
        ConfigurationError: The ranks do not fit, or have other addresses, or another program listens there.
        PeerError: Not all have come in time.

    Example:
        >>> meet_at(["127.0.0.1:2222"], 0, "TF_CONFIG")
    """
    one_machine = all(is_loopback(address.rpartition(":")[0]) for address in addresses)
    place = Place(addresses[0], rank, len(addresses), one_machine, shared="list of addresses", setting=source)

    def guard(server: socket.socket) -> None:
        networks, problem = machines_of_run(addresses[rank], addresses)
        if problem is None:
            with contextlib.suppress(OSError):  # The system cannot confine it. That of TensorFlow's server is told.
                confine(server, networks)

    meet(place, {}, secret=hashlib.sha256(" ".join(addresses).encode()).digest(), guard=guard)


def with_port(host: str, port: int) -> str:
    """Returns an address.

    Example:
        >>> with_port("::1", 80)
        '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
