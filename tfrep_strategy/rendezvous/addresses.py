"""The meeting of the ranks of a run, at which they get each other's addresses."""

from __future__ import annotations

import functools

from tfrep_strategy.rendezvous.connections import LOOPBACK, free_ports
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


def with_port(host: str, port: int) -> str:
    """Returns an address.

    Example:
        >>> with_port("::1", 80)
        '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
