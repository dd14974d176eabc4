"""The rendezvous of Horovod's Gloo: a server where ranks leave their addresses for each other, and the variables that name it."""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import importlib.metadata
import logging
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import psutil

from tfrep_strategy.cluster.horovod.source import MARK
from tfrep_strategy.cluster.rendezvous.confinement import confine
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.core.validation import Network
from tfrep_strategy.errors import ConfigurationError, message

_log = logging.getLogger(__name__)

SECRET = "HOROVOD_GLOO_RENDEZVOUS_SECRET"
"""The variable in which a rank finds the secret."""

_MOST_AT_ONCE = 256
"""Most silent connections at once. When one more comes, the oldest is closed."""


def horovod_version() -> str:
    """Returns the version of the installed Horovod.

    Example:
        >>> horovod_version()
        '0.28.1...'
    """
    return importlib.metadata.version("horovod")


def new_secret() -> str:
    """Returns a secret for a run. It is empty if the installed Horovod cannot send one.

    Example:
        >>> len(new_secret()) in (0, 32)
        True
    """
    return secrets.token_hex(16) if horovod_version().endswith(MARK) else ""


def warn_of_open_ranks() -> None:
    """Warns that every program that reaches the ranks can change their gradients, unless the installed Horovod asks for a secret.

    Example:
        >>> warn_of_open_ranks()
    """
    if not new_secret():
        what = "Any program that reaches the ports of this run can read and change gradients: this Horovod has no secret."
        hint = "build one that does: `tfrep horovod install`."
        _log.warning("%s", message(what, hint=hint, horovod=horovod_version()))


def horovod_server(address: str, port: int, secret: str, guard: Callable[[socket.socket], None] | None = None) -> Any:
    """Opens Horovod's rendezvous server.

    Args:
        address: The address to listen at, or all interfaces if this machine does not have it.
        port: The port; 0 for a free one.
        secret: The secret that each request must show. If it is empty, every request is answered.
        guard: Called with the socket before it listens.

    Raises:
        OSError: It cannot listen.

    Example:
        >>> with horovod_server("127.0.0.1", 0, "sesame") as server:
        ...     server.server_port > 0
        True
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):
        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            shown = self.headers.get("Authorization", "").encode(errors="replace")
            if secret and not hmac.compare_digest(shown, f"Bearer {secret}".encode()):
                self.send_error(HTTPStatus.UNAUTHORIZED)
                return False
            return True

    class Server(RendezvousHTTPServer):
        request_queue_size = 1024
        daemon_threads = True  # A silent connection does not keep the run from ending.

        def __init__(self) -> None:
            self._silent: dict[socket.socket, None] = {}  # The oldest first.
            self._lock = threading.Lock()
            super().__init__((address, port), Handler, False)

        def server_bind(self) -> None:
            try:
                super().server_bind()
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                self.server_address = ("", port)
                super().server_bind()

        def server_activate(self) -> None:
            if guard is not None:
                guard(self.socket)
            super().server_activate()

        def process_request(self, request: socket.socket, client_address: Any) -> None:
            with self._lock:
                self._silent[request] = None
                if len(self._silent) > _MOST_AT_ONCE:
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    with contextlib.suppress(OSError):  # It has left.
                        oldest.shutdown(socket.SHUT_RDWR)
            super().process_request(request, client_address)

        def shutdown_request(self, request: socket.socket) -> None:
            with self._lock:
                self._silent.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: socket.socket, client_address: Any) -> None:
            """Does nothing: another program may connect, send anything and leave."""

    return Server()


def slots_of(hosts: Sequence[str]) -> list[Any]:
    """Returns Horovod's slots: the place of each rank in the run, on its machine and among the machines.

    Args:
        hosts: The machine of each rank.

    Example:
        >>> slots = slots_of(["a", "a", "b"])
        >>> [(slot.rank, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size) for slot in slots]
        [(0, 0, 2, 0, 2), (1, 1, 2, 0, 1), (2, 0, 1, 1, 2)]
    """
    from horovod.runner.common.util.hosts import SlotInfo

    local_sizes, on_host, across = Counter(hosts), Counter[str](), Counter[int]()
    places = []
    for host in hosts:
        local_rank = on_host[host]
        places.append((local_rank, across[local_rank]))
        on_host[host] += 1
        across[local_rank] += 1
    return [
        SlotInfo(host, rank, local_rank, cross_rank, len(hosts), local_sizes[host], across[local_rank])
        for rank, (host, (local_rank, cross_rank)) in enumerate(zip(hosts, places, strict=True))
    ]


def variables_of(slots: Sequence[Any], address: str, port: int, interface: str, secret: str) -> list[dict[str, str]]:
    """Returns the environment variables of some ranks of one machine.

    Args:
        slots: The slots of these ranks.
        address: The host of the rendezvous.
        port: Its port.
        interface: The network interface through which these ranks communicate.
        secret: The secret that the rendezvous requires.

    Example:
        >>> [variables] = variables_of(slots_of(["localhost"]), "127.0.0.1", 2222, "lo", "sesame")
        >>> variables["HOROVOD_GLOO_IFACE"]
        'lo'
    """
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    common = {**create_run_env_vars(address, [interface], str(port)), SECRET: secret}
    return [{**common, **create_slot_env_vars(slot)} for slot in slots]


@contextlib.contextmanager
def served(slots: Sequence[Any], address: str, port: int, networks: Sequence[Network], secret: str) -> Iterator[int]:
    """Serves the rendezvous while the body runs.

    Args:
        slots: The slots of all ranks.
        address: The address to listen at, or all interfaces if this machine does not have it.
        port: The port; 0 for a free one.
        networks: The networks that may connect, if other machines can.
        secret: The secret that each request must show. If it is empty, every request is answered.

    Yields:
        The port.

    Raises:
        ConfigurationError: It cannot listen.

    Example:
        >>> with served(slots_of(["localhost"]), "127.0.0.1", 0, (), "sesame") as port:
        ...     socket.create_connection(("127.0.0.1", port)).close()
    """
    guard = None if is_loopback(address) else functools.partial(confine, networks=networks)
    try:
        server = horovod_server(address, port, secret, guard)
    except OSError as error:
        raise ConfigurationError(
            message(
                f"Horovod's rendezvous cannot listen ({error.strerror or error}).",
                hint='use communicator "tf".',
                code="TFREP-E014",
                address=address,
                port=port,
            )
        ) from None
    with server:
        server.init(slots)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an address of this machine.

    Raises:
        ConfigurationError: No interface has it.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)}:
            return name
    raise ConfigurationError(
        message(
            "No interface of this machine has the address at which the other machines see it, as Horovod needs.",
            hint='set HOROVOD_GLOO_IFACE to the interface that they reach, or use communicator "tf".',
            address=address,
        )
    )


@contextlib.contextmanager
def on_this_machine(size: int) -> Iterator[list[dict[str, str]]]:
    """Serves the rendezvous of ranks that are all on this machine, on its loopback interface.

    Args:
        size: Number of ranks.

    Yields:
        The variables of each rank.

    Example:
        >>> with on_this_machine(2) as variables:
        ...     variables[1]["HOROVOD_RANK"]
        '1'
    """
    slots = slots_of(["localhost"] * size)
    secret = new_secret()
    with served(slots, LOOPBACK, 0, (), secret) as port:
        yield variables_of(slots, LOOPBACK, port, interface_of(LOOPBACK), secret)
