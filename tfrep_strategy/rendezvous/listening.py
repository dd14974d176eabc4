"""Where a process listens for the others of its run."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.rendezvous.statements import Place

_WAITING = 4096
"""How many may have connected before they are looked at. All ranks of a run may come at once."""


def listen(host: str, port: int, *, one_machine: bool) -> tuple[socket.socket, bool]:
    """Listens on the interface that the others reach.

    The host may not be an address of this machine: a name that means loopback here, or the address of a service that leads here.
    Then it listens on all interfaces.

    Args:
        host: This machine, as the others reach it; empty if that is not known.
        port: The port; 0 for a free one.
        one_machine: Whether all processes are on this machine, so that loopback is enough.

    Returns:
        The socket, and whether the host is certain to be this machine.

    Raises:
        OSError: The port is taken, or cannot be used.

    Example:
        >>> server, is_certain = listen("node1", 0, one_machine=True)
        >>> server.getsockname()[0], is_certain
        ('127.0.0.1', True)
        >>> server.close()
    """
    if one_machine:
        return socket.create_server((LOOPBACK, port), backlog=_WAITING), True
    found = []
    with contextlib.suppress(OSError):  # A name may be made known after the process has started.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    for family, _, _, _, address in found:
        if not is_loopback(str(address[0])):
            try:
                return socket.create_server(address[:2], family=family, backlog=_WAITING), True
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_WAITING, dualstack_ipv6=True), False
    return socket.create_server(("", port), backlog=_WAITING), False


def unusable(place: Place, error: OSError) -> ConfigurationError:
    """Returns the error of process 0 if it cannot listen.

    Args:
        place: Where it wanted to listen.
        error: What the system says.
    """
    return ConfigurationError(
        message(
            f"{place.named([0])} cannot listen at the rendezvous ({os.strerror(error.errno or 0)}).",
            hint="use a free port, and the address of this machine; only one process can have this number.",
            rendezvous=place.address,
        )
    )
