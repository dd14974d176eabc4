"""The rendezvous of Horovod's Gloo: a server where ranks leave their addresses for each other, and what leads them there."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.rendezvous.confinement import confine
from tfrep_strategy.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.rendezvous.horovod_server import SECRET, horovod_server, new_secret
from tfrep_strategy.validation import Network


def slots_of(hosts: Sequence[str]) -> list[Any]:
    """Returns Horovod's slots: the place of each rank in the run, on its machine, and among the machines.

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
        slots: Of these ranks.
        address: Where the rendezvous is.
        port: Its port.
        interface: Through which interface of the machine its ranks talk.
        secret: What the rendezvous wants to be shown.

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
        slots: Of all ranks.
        address: Where to listen; if it is none of this machine's, on all interfaces.
        port: The port; 0 for a free one.
        networks: Whose addresses may connect, where others than this machine can.
        secret: What each request has to show; anybody is heard if it is empty.

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
        ConfigurationError: None has it.

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
        size: How many ranks there are.

    Yields:
        The variables of each.

    Example:
        >>> with on_this_machine(2) as variables:
        ...     variables[1]["HOROVOD_RANK"]
        '1'
    """
    slots = slots_of(["localhost"] * size)
    secret = new_secret()
    with served(slots, LOOPBACK, 0, (), secret) as port:
        yield variables_of(slots, LOOPBACK, port, interface_of(LOOPBACK), secret)
