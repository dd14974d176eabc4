"""The contract of an environment: the rank of this process, the number of processes, and their hosts and addresses.

Also the environment of a single process.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.cluster.rendezvous.meeting import addresses_of_ranks
from tfrep_strategy.core.validation import MOST_RANKS, Address, Port, checked, variable
from tfrep_strategy.errors import ConfigurationError, is_count, message, shortened


class Environment(ABC):
    """The rank of this process in a run, as described by the launcher.

    A subclass implements `detect`. Its `__init__` reads the description, such as environment variables, and passes it to
    this class, which checks it. The attributes do not change afterwards.

    Args:
        rank: Rank of this process, from 0.
        size: Number of processes.
        hosts: The machine of each rank; an empty string for unknown ones. Default: this machine for all ranks that are
            certainly here, which needs `local_rank` and `local_size`.
        addresses: `"host:port"` of each rank; None if the environment knows no ports.
        rendezvous: `"host:port"` of rank 0, where ranks without addresses may meet; None if that is unknown.
        local_rank: Rank of this process among those on its machine. Default: counted from `hosts`.
        local_size: Number of processes on this machine. Default: counted from `hosts`.

    Raises:
        ConfigurationError: The arguments contradict each other.

    Example:
        >>> class Pair(Environment):
        ...     name, variables = "pair", ("PAIR_RANK",)
        ...     @classmethod
        ...     def detect(cls):
        ...         return "PAIR_RANK" in os.environ
        ...     def __init__(self):
        ...         super().__init__(rank=int(os.environ["PAIR_RANK"]), size=2, hosts=["left", "right"])
    """

    name: ClassVar[str]
    """Short name, shown to users."""

    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that describe a process. A launcher removes them before it starts other processes."""

    @classmethod
    @abstractmethod
    def detect(cls) -> bool:
        """Returns whether this environment started the process. It must be quick, and must not raise."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        hosts: Sequence[str] | None = None,
        addresses: Sequence[str] | None = None,
        rendezvous: str | None = None,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        _check_place("rank", rank, "size", size, self.name)
        if hosts is None:
            hosts = known_hosts(rank, size, size if local_size is None else local_size, socket.gethostname())
        hosts = checked(list[str], "hosts", hosts, hint=f"correct the hosts that {self.name} gives.")
        if len(hosts) != size:
            raise ConfigurationError(
                message(
                    f"{self.name}: one host per rank is needed.",
                    hint="list the host of every rank, in the order of the ranks.",
                    hosts=hosts,
                    size=size,
                )
            )
        if local_size is None:
            local_size = Counter(hosts)[hosts[rank]]
        if local_rank is None:
            local_rank = Counter(hosts[:rank])[hosts[rank]]
        _check_place("local_rank", local_rank, "local_size", local_size, self.name)
        if local_size > size:
            raise ConfigurationError(
                message(
                    f"{self.name}: local_size must not be above size.",
                    hint="local_size counts the ranks of this machine, size those of all.",
                    local_size=local_size,
                    size=size,
                )
            )
        if addresses is not None:
            addresses = _checked_addresses(addresses, size, self.name)
        self._place = None if rendezvous is None else Place(rendezvous, rank, size, one_machine=local_size == size)
        self._rank, self._size = rank, size
        self._local_rank, self._local_size = local_rank, local_size
        self._hosts: tuple[str, ...] = tuple(hosts)
        self._addresses: tuple[str, ...] | None = None if addresses is None else tuple(addresses)
        self._found = {name: os.environ[name] for name in self.variables if name in os.environ}

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those on its machine."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """Number of the processes on this machine."""
        return self._local_size

    @property
    def hosts(self) -> list[str]:
        """The machine of each rank; an empty string for unknown ones."""
        return list(self._hosts)

    @property
    def rendezvous(self) -> str | None:
        """`"host:port"` where ranks without addresses meet; None if they have addresses, or there is no such place."""
        return self._place.address if self._place else None

    @property
    def run_name(self) -> str:
        """An id of the run that no other processes on this machine have; empty if there is none."""
        return self.rendezvous or " ".join(self._addresses or ())

    @property
    def can_tell_addresses(self) -> bool:
        """Whether `addresses` are known, or can be exchanged at a rendezvous."""
        return self._addresses is not None or self._place is not None

    @property
    def addresses(self) -> list[str] | None:
        """`"host:port"` of each rank; None if the environment knows no ports.

        If the environment knows only a rendezvous, the ranks meet there when this is first read. Then every rank must read it.

        Raises:
            ConfigurationError: The ranks do not fit together: two have the same number, or their versions differ.
            PeerError: Not all ranks arrive at the rendezvous in time.
        """
        if self._addresses is None and self._place is not None:
            self._addresses = addresses_of_ranks(self._place)
            self._hosts = tuple(address.rpartition(":")[0] for address in self._addresses)
        return None if self._addresses is None else list(self._addresses)

    @property
    def found(self) -> dict[str, str]:
        """The variables that described the process, with their values."""
        return dict(self._found)

    def describe(self) -> str:
        """Describes this environment in one line.

        Returns:
            The name, the rank and the variables that were found.
        """
        found = ", ".join(f"{name}={shortened(value)}" for name, value in self._found.items())
        return f"{self.name}: rank {self.rank} of {self.size}" + (f" ({found})" if found else "")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"


def master_address(prefix: str = "", after: int = 0) -> str:
    """Reads the address of the rendezvous from `MASTER_ADDR` and `MASTER_PORT`.

    Args:
        prefix: A prefix of the names of the variables.
        after: Offset to `MASTER_PORT`.

    Returns:
        The address, `"host:port"`.

    Raises:
        ConfigurationError: A variable is missing, or the port is not valid.

    Example:
        >>> os.environ.update(MASTER_ADDR="node1", MASTER_PORT="29500")
        >>> master_address()
        'node1:29500'
    """
    return f"{variable(str, f'{prefix}MASTER_ADDR')}:{variable(Port, f'{prefix}MASTER_PORT') + after}"


def known_hosts(rank: int, size: int, local_size: int, host: str) -> list[str]:
    """Returns the hosts of all ranks as known to a process that knows only its own.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        local_size: Number of processes on this machine.
        host: Name of this machine.

    Returns:
        `host` for every rank if all are on this machine. Otherwise `host` for this rank, and an empty string for the others.

    Example:
        >>> known_hosts(1, 3, 1, "b")
        ['', 'b', '']
    """
    return [host if local_size == size or other == rank else "" for other in range(size)]


def _check_place(index_name: str, index: int, count_name: str, count: int, environment: str) -> None:
    if not (is_count(count, maximum=MOST_RANKS) and is_count(index, 0, count - 1)):
        received: dict[str, Any] = {index_name: index, count_name: count}
        raise ConfigurationError(
            message(
                f"{environment}: {index_name} must be at least 0 and below {count_name}.",
                hint="start all processes with one launcher, and unset variables left over from another run.",
                **received,
            )
        )


def _checked_addresses(given: Sequence[str], size: int, environment: str) -> list[str]:
    addresses = checked(list[Address], "addresses", given, hint=f"correct the addresses that {environment} gives.")
    if len(addresses) != size:
        raise ConfigurationError(
            message(
                f"{environment}: one address per rank is needed.",
                hint='list "host:port" for every rank, in the order of the ranks.',
                addresses=addresses,
                size=size,
            )
        )
    for address, uses in Counter(addresses).items():
        if uses > 1:
            raise ConfigurationError(
                message(
                    f"{environment}: two ranks have the same address.",
                    hint="give every process its own port.",
                    address=address,
                    ranks=[rank for rank, other in enumerate(addresses) if other == address],
                )
            )
    return addresses


class SingleEnvironment(Environment):
    """The environment of a process that no launcher has started with others.

    Example:
        >>> SingleEnvironment().size
        1
    """

    name = "single process"

    @classmethod
    def detect(cls) -> bool:
        """Returns True, because this environment is checked last."""
        return True

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, hosts=["localhost"])
