"""Limits which machines may connect to TensorFlow's servers, which listen on all interfaces and obey every program.

TensorFlow's servers take neither an interface nor a socket, but they can share a port. So a socket of this package listens there
first: the door. The kernel gives the connections of the run's machines to TensorFlow's server, and all others to the door, which
accepts none until the process ends. This needs Linux, and no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import psutil

from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.core.limits import trusted_networks
from tfrep_strategy.core.validation import Network
from tfrep_strategy.errors import message, warn

_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_ALL_ADDRESSES = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
_SHARES_PORT = "TF_GRPC_REUSE_PORT"
"""Lets TensorFlow's server listen at a port at which a socket of the same user listens."""
_TAKES_PACKETS, _TAKES_CONNECTIONS = 26, 51
"""Programs that decide whether a socket takes a packet, and which of the sockets that share a port gets a connection."""
_LONGEST_PROGRAM = 4096


def confine(server: socket.socket, networks: Sequence[Network]) -> None:
    """Lets only some machines send packets to a socket that listens. Newer kernels allow this only to administrators.

    Args:
        server: The socket.
        networks: The networks that may connect.

    Raises:
        OSError: The system cannot confine it, or there are too many networks.

    Example:
        >>> with socket.create_server(("", 0)) as server:
        ...     confine(server, [])
    """
    _attach(server, networks, _TAKES_PACKETS)


@contextlib.contextmanager
def confined(own: str, addresses: Sequence[str], *, unknown: str = "", speaks: bool = True) -> Iterator[None]:
    """Confines the TensorFlow server that the body starts, from its start to its end.

    Connections that come before the server listens go to the door, too. They are neither answered nor hung up, and are retried.

    Args:
        own: "host:port" of this process, as the others reach it. Its server listens at that port.
        addresses: The addresses of all processes of the run.
        unknown: Another participant, if its address is not known.
        speaks: Whether to warn if the server cannot be confined.

    Yields:
        Nothing.

    Example:
        >>> from tfrep_strategy.cluster.rendezvous.connections import free_ports
        >>> port, other = free_ports(2)
        >>> with confined(f"127.0.0.1:{port}", [f"127.0.0.1:{port}", f"127.0.0.1:{other}"]):
        ...     server = socket.create_server(("", port), reuse_port=True)
        >>> server.close()
    """
    networks, problem = machines_of_run(own, addresses, unknown)
    with contextlib.ExitStack() as stack:
        door = None
        try:
            door = stack.enter_context(_door(int(own.rpartition(":")[2]), _ALL_ADDRESSES if problem else networks))
        except OSError as error:  # If the port is in use, TensorFlow will report it.
            problem = problem or str(error)
        with _sharing_ports() if door else contextlib.nullcontext():
            yield
        if door and problem:  # A name may have become known.
            networks, problem = machines_of_run(own, addresses, unknown)
            if not problem:
                _attach(door, networks, _TAKES_CONNECTIONS)
        if door and not problem:  # Python does not close a bare descriptor at its end, and TensorFlow's server ends later.
            door.detach()
    if problem and speaks:
        warn(
            message(
                f"Any program that reaches the ports of this run can read and write files as you: {problem}.",
                hint="use Horovod on one machine (`tfrep horovod install`), set TFREP_TRUSTED_NETWORKS to the networks of the"
                " run's machines, or keep others out with a firewall. See docs/security.md.",
                address=own,
            ),
        )


def machines_of_run(own: str, addresses: Sequence[str], unknown: str = "") -> tuple[list[Network], str | None]:
    """Finds the machines that take part in a run.

    Args:
        own: "host:port" of this process.
        addresses: The addresses of all processes.
        unknown: Another participant, if its address is not known.

    Returns:
        The networks of the run's machines, and why they are not known; None if they are.

    Example:
        >>> networks, problem = machines_of_run("127.0.0.1:2222", ["localhost:2223"])
        >>> [str(each) for each in networks][:1], problem
        (['127.0.0.0/8'], None)
    """
    here, trusted = _of_this_machine(), trusted_networks()
    numbers = {host: _numbers(host) for host in dict.fromkeys(map(_host, (own, *addresses)))}
    if all(map(is_loopback, numbers)):
        return here, None
    if not unknown and all(found and all(_is_in(each, here) for each in found) for found in numbers.values()):
        return here, None
    if not trusted:
        unknown = unknown or next((host for host, found in numbers.items() if not found), "")
        if unknown:
            return [], f"the address of {unknown} is not known"
        if not any(_is_in(each, here) for each in numbers[_host(own)]):
            # Addresses are translated between the machines, so those of the others cannot be trusted, either.
            return [], f"{_host(own)} is not an address of this machine"
    others = [ipaddress.ip_network(each) for found in numbers.values() for each in found]
    return _collapsed([*here, *others, *trusted]), None


def is_this_machine(host: str) -> bool:
    """Returns whether a name or an address is this machine's.

    Example:
        >>> is_this_machine("localhost")
        True
    """
    found = _numbers(host)
    return is_loopback(host) or (bool(found) and all(_is_in(each, _of_this_machine()) for each in found))


def problem_of_confining() -> str | None:
    """Returns why this machine cannot confine servers; None if it can.

    Example:
        >>> problem_of_confining() is None
        True
    """
    try:
        with _door(0, []):
            return None
    except OSError as error:
        return str(error)


@contextlib.contextmanager
def _door(port: int, networks: Sequence[Network]) -> Iterator[socket.socket]:
    """Listens at a port, and accepts nothing. Connections from the networks go to the next socket that listens there.

    Raises:
        OSError: The port is in use, or the system has no such programs.
    """
    with socket.socket(_family(), socket.SOCK_STREAM) as door:
        door.settimeout(None)  # The script may have set a default for new sockets.
        if door.family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("", port))  # Fails if another socket has the port.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _attach(door, networks, _TAKES_CONNECTIONS)
        answers = True
        with contextlib.suppress(PermissionError):  # Since Linux commit 5d39580f68e6 only administrators may filter TCP.
            confine(door, [])
            answers = False
        door.listen()
        if answers:
            threading.Thread(target=_hang_up, args=(door.dup(),), daemon=True, name="tfrep-door").start()
        try:
            yield door
        finally:
            if door.fileno() >= 0:
                door.shutdown(socket.SHUT_RDWR)  # Wakes the thread.


def _hang_up(server: socket.socket) -> None:
    """Closes each connection at once, until the socket is shut down."""
    with server:
        while True:
            try:
                server.accept()[0].close()
            except ConnectionAbortedError:  # The other end has left.
                continue
            except OSError:
                return


@contextlib.contextmanager
def _sharing_ports() -> Iterator[None]:
    before = os.environ.get(_SHARES_PORT)
    os.environ[_SHARES_PORT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHARES_PORT]
        else:
            os.environ[_SHARES_PORT] = before


def _family() -> socket.AddressFamily:
    """Returns the family of addresses that TensorFlow chooses. Sockets must have the same one to share a port."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return socket.AF_INET6
    return socket.AF_INET


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _numbers(host: str) -> list[str]:
    if is_loopback(host):
        return [LOOPBACK]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _of_this_machine() -> list[Network]:
    own = (each.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for each in interface)
    numbers = [each for each in own if ":" in each or "." in each]
    found = list(_LOOPBACK)
    for number in numbers:
        with contextlib.suppress(ValueError):  # Hardware addresses.
            found.append(ipaddress.ip_network(number))
    return _collapsed(found)


def _collapsed(networks: Sequence[Network]) -> list[Network]:
    return [
        network
        for version in (4, 6)
        for network in ipaddress.collapse_addresses([each for each in networks if each.version == version])  # type: ignore[type-var]
    ]


def _is_in(number: str, networks: Sequence[Network]) -> bool:
    address = ipaddress.ip_address(number.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)


# Programs that the kernel runs for each packet that comes to a socket.


def _attach(server: socket.socket, networks: Sequence[Network], kind: int) -> None:
    """Gives a socket such a program. It needs no privilege.

    Args:
        server: The socket.
        networks: The networks from which it takes packets; or the networks whose connections go to the second of the sockets that
            share the port, if there is one. Other connections go to the first.
        kind: The kind of the program.

    Raises:
        OSError: The system has no such programs, or there are too many networks.
    """
    program = _program(networks, 1 if kind == _TAKES_CONNECTIONS else _ALL_BYTES)
    length = len(program) // 8
    if length > _LONGEST_PROGRAM:
        raise OSError(f"too many addresses ({len(networks)})")
    if not hasattr(socket, "SO_BINDTODEVICE"):
        raise OSError("only Linux can confine a socket that listens")
    code = ctypes.create_string_buffer(program, len(program))
    server.setsockopt(socket.SOL_SOCKET, kind, struct.pack("@HP", length, ctypes.addressof(code)))


_LOAD, _LOAD_BYTE, _AND, _SHIFT_RIGHT, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x05, 0x06
_HEADER = 0xFFF00000
"""The offset of the network layer's header."""
_SOURCE = {4: 12, 6: 8}
"""The offset of the sender's address in the header."""
_ALL_BYTES = 0xFFFFFFFF


def _program(networks: Sequence[Network], known: int) -> bytes:
    """Returns a program with the result `known` for packets from these networks, and 0 for others."""
    parts = {
        version: b"".join(_check(each, known) for each in networks if each.version == version) + _instruction(_RETURN, 0)
        for version in (4, 6)
    }
    return b"".join(
        [
            _instruction(_LOAD_BYTE, _HEADER),
            _instruction(_SHIFT_RIGHT, 4),
            _instruction(_IF_EQUAL, 4, otherwise=1),
            _instruction(_GO, len(parts[6]) // 8),
            parts[6],
            parts[4],
        ]
    )


def _check(network: Network, known: int) -> bytes:
    """Returns the part of the program for packets from one network. For others it continues with the next part."""
    packed, mask = network.network_address.packed, network.netmask.packed
    words = len(packed) // 4
    steps = []
    for i, (wanted, counts) in enumerate(zip(struct.iter_unpack("!I", packed), struct.iter_unpack("!I", mask), strict=True)):
        steps.append(_instruction(_LOAD, _HEADER + _SOURCE[network.version] + 4 * i))
        steps.append(_instruction(_AND, counts[0]))
        steps.append(_instruction(_IF_EQUAL, wanted[0], otherwise=3 * (words - i - 1) + 1))
    return b"".join([*steps, _instruction(_RETURN, known)])


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
