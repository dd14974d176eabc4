"""Who may connect to TensorFlow's servers, which listen on all interfaces and obey whoever connects.

TensorFlow can neither be told where to listen nor be given a socket. So its sockets are found among the descriptors of this process
once they listen, and confined: to the loopback interface if all processes of the run have its addresses, else to the addresses of
the run's machines. Until then strangers are kept from their ports (`shut_port.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from tfrep_strategy.errors import message, warn
from tfrep_strategy.limits import trusted_networks
from tfrep_strategy.rendezvous.connections import LOOPBACK, duplicate, is_loopback
from tfrep_strategy.rendezvous.packet_filter import attach
from tfrep_strategy.rendezvous.shut_port import Shutter, shut
from tfrep_strategy.validation import Network

_LOOK_SECONDS, _LATER_SECONDS = 0.001, 0.1
"""How often to look for servers, and for strangers who came before they were confined."""
_WAITING = 24
"""Where TCP_INFO of a socket that listens has the number of connections that it has not accepted."""
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


def confine(server: socket.socket, networks: Sequence[Network] | None = None) -> None:
    """Lets only some machines connect to a socket that listens. It needs no privilege.

    Args:
        server: The socket.
        networks: Whose addresses may connect. None: this machine only.

    Raises:
        OSError: The system cannot confine it.

    Example:
        >>> with socket.create_server(("", 0)) as server:
        ...     confine(server)
    """
    if networks is None:
        with contextlib.suppress(OSError, AttributeError):  # Linux 5.7 or newer, or root.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            return
        networks = _of_this_machine()
    attach(server, networks)


@contextlib.contextmanager
def confined(
    own: str, addresses: Sequence[str], *, unknown: str = "", speaks: bool = True
) -> Iterator[Servers]:
    """Confines the TensorFlow server that the body starts, while it runs and when it ends.

    TensorFlow holds Python's lock for most of the time that it needs to start a server, so the sockets may be confined only then.
    Until then nobody but the run's machines comes through.

    Args:
        own: "host:port" of this process, as the others reach it. Its server listens at that port.
        addresses: Those of all processes of the run.
        unknown: Who else takes part, at an address that is not known.
        speaks: Whether to warn if they cannot be confined.

    Yields:
        The servers.

    Example:
        >>> from tfrep_strategy.rendezvous.connections import free_ports
        >>> port, other = free_ports(2)
        >>> with confined(f"127.0.0.1:{port}", [f"127.0.0.1:{port}", f"127.0.0.1:{other}"]):
        ...     server = socket.create_server(("", port), reuse_port=True)
        >>> server.close()
    """
    servers = Servers(own, addresses, unknown)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LATER_SECONDS if servers.are_confined else _LOOK_SECONDS):
            servers.confine()

    thread = threading.Thread(target=watch, daemon=True, name="tfrep-confinement")
    with servers.shut():
        thread.start()
        try:
            yield servers
        finally:
            is_over.set()
            thread.join()
            servers.confine(is_last=True)
    if servers.problem and speaks:
        warn(
            message(
                f"Whoever reaches the ports of this run can read and write files as you: {servers.problem}.",
                hint="use Horovod on one machine (`tfrep horovod install`), set TFREP_TRUSTED_NETWORKS to the networks of the"
                " run's machines, or keep others out with a firewall. See docs/security.md.",
                address=own,
            ),
        )


class Servers:
    """The servers that this process starts, and who may connect to them.

    Args:
        own: "host:port" of this process.
        addresses: Those of all processes of the run.
        unknown: Who else takes part.

    Attributes:
        problem: Why the servers are not confined; None if they are.
    """

    def __init__(self, own: str, addresses: Sequence[str], unknown: str = "") -> None:
        self._own, self._addresses, self._unknown = own, addresses, unknown
        self._port = int(own.rpartition(":")[2])
        self._confined: dict[int, Any] = {}
        self._shutter: Shutter | None = None
        self._networks, self.problem = machines_of_run(own, addresses, unknown)

    @property
    def are_confined(self) -> bool:
        """Whether a server was found and confined."""
        return bool(self._confined)

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Keeps strangers from the port of the server while the body runs."""
        if self.problem:
            yield
            return
        with shut(self._port, _of_this_machine() if self._networks is None else self._networks) as self._shutter:
            yield

    def confine(self, *, is_last: bool = False) -> None:
        """Confines the servers that listen now, and closes the connections of strangers to them.

        Args:
            is_last: Whether the servers have been started, so that it is a problem if there are none.
        """
        if self.problem and is_last:  # A name may have become known.
            self._networks, self.problem = machines_of_run(self._own, self._addresses, self._unknown)
        if self.problem:
            return
        found = self._connections()
        for each in found:
            if self._is_server(each) and self._confined.get(each.fd) != each.laddr:
                self._confine(each)
        if is_last and not (self._confined or self.problem):
            self.problem = "their sockets are not among the descriptors of this process"
        self._turn_out(found)

    def _connections(self) -> list[Any]:
        try:
            return psutil.Process().net_connections("tcp")
        except (psutil.Error, OSError) as error:
            self.problem = f"the sockets of this process cannot be listed ({error})"
            return []

    def _is_server(self, connection: Any) -> bool:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._port
        return listens and (self._shutter is None or connection.fd != self._shutter.descriptor)

    def _confine(self, connection: Any) -> None:
        self._confined[connection.fd] = connection.laddr
        try:
            with _duplicate(connection) as server:
                try:
                    confine(server, self._networks)
                except PermissionError:
                    if self._shutter is None:
                        raise
                    self._shutter.stays = True  # Strangers go on to come to this one.
                self._empty_queue(server)
        except OSError as error:
            self.problem = str(error)

    def _empty_queue(self, server: socket.socket) -> None:
        """Closes what waits to be accepted, if a stranger is among it: others connect again."""
        (waiting,) = struct.unpack_from("@I", server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28), _WAITING)
        if waiting and any(each.pid is None and self._is_stranger(each) for each in psutil.net_connections("tcp")):
            with contextlib.suppress(BlockingIOError):
                while True:
                    server.accept()[0].close()

    def _turn_out(self, found: Sequence[Any]) -> None:
        for each in found:
            if self._is_stranger(each):
                with contextlib.suppress(OSError), _duplicate(each) as stranger:
                    stranger.shutdown(socket.SHUT_RDWR)

    def _is_stranger(self, connection: Any) -> bool:
        if not connection.raddr or connection.laddr.port not in {each.port for each in self._confined.values()}:
            return False
        return not _is_in(connection.raddr.ip, _of_this_machine() if self._networks is None else self._networks)


def machines_of_run(
    own: str, addresses: Sequence[str], unknown: str = ""
) -> tuple[list[Network] | None, str | None]:
    """Finds out who takes part in a run.

    Args:
        own: "host:port" of this process.
        addresses: Those of all processes.
        unknown: Who else takes part, at an address that is not known.

    Returns:
        The networks of the run's machines, None for the loopback interface only; and why they are not known, None if they are.

    Example:
        >>> machines_of_run("127.0.0.1:2222", ["localhost:2223"])
        (None, None)
    """
    here, trusted = _of_this_machine(), trusted_networks()
    numbers = {host: _numbers(host) for host in dict.fromkeys(map(_host, (own, *addresses)))}
    if all(map(is_loopback, numbers)):
        return None, None
    if not unknown and all(found and all(_is_in(each, here) for each in found) for found in numbers.values()):
        return here, None  # A socket of the loopback interface would refuse who calls an address of another one.
    if not trusted:
        unknown = unknown or next((host for host, found in numbers.items() if not found), "")
        if unknown:
            return None, f"the address of {unknown} is not known"
        if not any(_is_in(each, here) for each in numbers[_host(own)]):
            # Something between the machines translates addresses. Those of the others are not what they seem, either.
            return None, f"{_host(own)} is not an address of this machine"
    others = [ipaddress.ip_network(each) for found in numbers.values() for each in found]
    return _collapsed([*here, *others, *trusted]), None


def is_this_machine(host: str) -> bool:
    """Returns whether a name, or an address, is this machine's.

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
        with socket.create_server((LOOPBACK, 0)) as server:
            confine(server)
    except OSError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _duplicate(connection: Any) -> Iterator[socket.socket]:
    """Yields a socket of this process that its owner keeps.

    Raises:
        OSError: It is closed, and its descriptor may be used for something else.
    """
    with duplicate(connection.fd) as own:
        if own.getsockname()[1] != connection.laddr.port:
            raise OSError("the socket was closed")
        yield own


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
        with contextlib.suppress(ValueError):  # Addresses of hardware.
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
