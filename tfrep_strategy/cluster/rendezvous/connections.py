"""Connections between the processes of a run: addresses, lost machines and forked children.

TensorFlow waits forever for a machine that has disappeared without closing its connections, such as one behind a cut cable.
TensorFlow has no setting to check its connections. So this module finds them among the descriptors of this process, and lets the
system check them. It closes a connection to a lost machine, and TensorFlow notices that.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfrep_strategy.errors import ConfigurationError, message

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
"""Ports below are known by many services."""

LOOPBACK = "127.0.0.1"


def own_hosts(loopback: bool, hosts: Sequence[str]) -> list[str]:
    """Returns the addresses at which other ranks may reach this machine, the best first."""
    if loopback:
        return [LOOPBACK]
    numbers = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith(("127.", "::1", "fe80:"))
    ]
    named = [hosts[0].strip("[]")] if hosts and hosts[0] else []
    return list(dict.fromkeys([*named, *numbers, socket.gethostname(), LOOPBACK]))


def notice_loss(peer: socket.socket) -> None:
    """Lets the system close a connection after 17 seconds if the other machine disappears without closing it.

    Args:
        peer: A connected socket.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        ...     notice_loss(peer)
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 5 + 4 * 3 seconds, also while data is not acknowledged.
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 17_000)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine, under an address that only its own processes reach.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("node1")
        (True, False)
    """
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def is_number(host: str) -> bool:
    """Returns whether a host is given by address instead of name.

    Example:
        >>> is_number("10.0.0.1"), is_number("[::1]"), is_number("node1")
        (True, True, False)
    """
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Finds ports at which no program listens. On Linux, the system gives them to no program that asks for any port.

    Args:
        count: Number of ports.
        host: The interface; an empty string for all. Default: loopback.

    Returns:
        The ports, all different. Another program may still take one by its number before it is used.

    Raises:
        ConfigurationError: This machine, or the limits of this process, do not allow that many.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    with held_ports(count, host) as ports:
        return ports


@contextlib.contextmanager
def held_ports(count: int, host: str = LOOPBACK) -> Iterator[list[int]]:
    """Finds ports at which no program listens, and keeps them from programs that ask for any port or connect from one.

    A program can still listen there if it knows the port and shares it (`SO_REUSEADDR`, as all servers here do).

    Args:
        count: Number of ports.
        host: The interface; an empty string for all. Default: loopback.

    Yields:
        The ports, all different.

    Raises:
        ConfigurationError: This machine, or the limits of this process, do not allow that many.

    Example:
        >>> with held_ports(1) as ports, socket.create_server(("127.0.0.1", ports[0])) as server:
        ...     server.getsockname()[1] == ports[0]
        True
    """
    chosen = _chosen_ports(2 * count + 100)
    with contextlib.ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                _bind_to_first_free(each, host, chosen)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # After binding: so no other socket had the port.
        except OSError as error:
            hint = "use fewer processes, or allow more open files (`ulimit -n`)."
            raise ConfigurationError(message(f"There are no free ports ({error.strerror}).", hint=hint, count=count)) from None
        yield [each.getsockname()[1] for each in sockets]


def _chosen_ports(most: int) -> Iterator[int]:
    """Yields some ports in random order. They are below those that Linux gives to connections and to programs that ask for any."""
    try:
        lowest_given = int(_GIVEN_PORTS.read_text("ascii").split()[0])
    except (OSError, ValueError):
        lowest_given = 0
    below = range(_LOWEST_PORT, lowest_given)
    yield from random.SystemRandom().sample(below, min(most, len(below)))  # Leaves the script's random generator as it is.


def _bind_to_first_free(listener: socket.socket, host: str, chosen: Iterator[int]) -> None:
    for port in chosen:
        with contextlib.suppress(OSError):
            listener.bind((host, port))
            return
    listener.bind((host, 0))


@contextlib.contextmanager
def duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Yields another socket of an open connection. The connection stays blocking or non-blocking, as before.

    After `socket.setdefaulttimeout` in a script, new sockets do not block, nor does a connection that they share.

    Args:
        descriptor: Descriptor of a socket. It stays open.

    Raises:
        OSError: It is closed, or is not a socket.
    """
    number = os.dup(descriptor)
    try:
        blocks = os.get_blocking(number)
        own = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    with own:
        own.setblocking(blocks)
        yield own


_LOOK_SECONDS = 5.0
"""Interval at which to look for new connections."""


def watch_connections(owner: object, addresses: Iterable[str]) -> None:
    """Makes the system close TensorFlow's connections to a machine about 20 seconds after that machine has disappeared.

    Args:
        owner: The connections are watched for as long as it exists.
        addresses: "host:port" of the processes to which TensorFlow connects.

    Example:
        >>> class Owner: ...
        >>> watch_connections(Owner(), ["node1:2222", "node2:2222"])
    """
    placed = [address.rpartition(":") for address in addresses]
    ports = {int(port) for host, _, port in placed if not is_loopback(host)}
    if ports:
        is_over = threading.Event()
        weakref.finalize(owner, is_over.set)
        threading.Thread(target=_watch, args=(ports, is_over), daemon=True, name="tfrep-lost-machines").start()


def _watch(ports: Collection[int], is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_SECONDS):
        with contextlib.suppress(OSError, psutil.Error):  # If the system does not list them, TensorFlow waits for a lost machine.
            for each in psutil.Process().net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED and each.raddr.port in ports:
                    _check(each.fd)


def _check(descriptor: int) -> None:
    # It may have been closed meanwhile.
    with contextlib.suppress(OSError), duplicate(descriptor) as peer:
        notice_loss(peer)


def close_in_children(owner: Any, close: Callable[[Any], None]) -> None:
    """Calls `close(owner)` in every process that is forked from now on, as long as the owner lives.

    Args:
        owner: The object with open connections. It is not kept alive.
        close: Closes the connections without a message to the peers.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        alive = reference()
        if alive is not None:
            close(alive)

    os.register_at_fork(after_in_child=after_fork)


@contextlib.contextmanager
def sockets_closed_in_children() -> Iterator[None]:
    """Closes sockets that any library opens inside the body, in every process that is forked later."""
    before = _open_sockets()
    yield
    opened = _open_sockets() - before
    if opened:
        os.register_at_fork(after_in_child=lambda: _close_all(opened))


def _open_sockets() -> set[tuple[int, int]]:
    """Returns descriptors with inodes, which distinguish sockets that reuse a descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # The descriptor of the listing itself is closed by now.
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_all(sockets: set[tuple[int, int]]) -> None:
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
