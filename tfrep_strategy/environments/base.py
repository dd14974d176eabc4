"""The contract of an environment: the rank of this process, the number of processes, and their hosts and addresses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from tfrep_strategy.errors import ConfigurationError, message


class Environment(ABC):
    """The rank of this process in a run, as described by the launcher.

    A subclass implements `detect`. Its `__init__` reads the description, such as environment variables, and passes it to
    this class, which checks it. The attributes do not change afterwards.

    Args:
        rank: Rank of this process, from 0.
        size: How many processes take part.
        hosts: The machine of each rank; an empty string where it is not known.
        addresses: `"host:port"` of each rank; None if the environment knows no ports.
        local_rank: Rank of this process among those on its machine. Default: counted from `hosts`.
        local_size: How many of the processes are on this machine. Default: counted from `hosts`.

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
    """Environment variables that describe a process. A launcher removes them before it starts processes of its own."""

    @classmethod
    @abstractmethod
    def detect(cls) -> bool:
        """Returns whether this environment started the process. It must be quick, and must not raise."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        hosts: Sequence[str],
        addresses: Sequence[str] | None = None,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        _check_place("rank", rank, "size", size, self.name)
        if len(hosts) != size:
            raise ConfigurationError(
                message(f"{self.name}: one host per rank is needed.", hosts=list(hosts), size=size)
            )
        if local_size is None:
            local_size = Counter(hosts)[hosts[rank]]
        if local_rank is None:
            local_rank = Counter(hosts[:rank])[hosts[rank]]
        _check_place("local_rank", local_rank, "local_size", local_size, self.name)
        if local_size > size:
            raise ConfigurationError(
                message(f"{self.name}: local_size must not be above size.", local_size=local_size, size=size)
            )
        if addresses is not None:
            _check_addresses(addresses, size, self.name)
        self._rank, self._size = rank, size
        self._local_rank, self._local_size = local_rank, local_size
        self._hosts = tuple(hosts)
        self._addresses = None if addresses is None else tuple(addresses)
        self._found = {name: os.environ[name] for name in self.variables if name in os.environ}

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes take part."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those on its machine."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """How many of the processes are on this machine."""
        return self._local_size

    @property
    def hosts(self) -> list[str]:
        """The machine of each rank; an empty string where it is not known."""
        return list(self._hosts)

    @property
    def addresses(self) -> list[str] | None:
        """`"host:port"` of each rank; None if the environment knows no ports."""
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
        found = ", ".join(f"{name}={value}" for name, value in self._found.items())
        return f"{self.name}: rank {self.rank} of {self.size}" + (f" ({found})" if found else "")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"


def read_int(*names: str, default: int | None = None) -> int:
    """Reads an integer from the first of several environment variables that is set.

    Args:
        *names: Names of the variables, the preferred one first.
        default: The result if none is set. Without a default that is an error.

    Returns:
        The number.

    Raises:
        ConfigurationError: No variable is set, or its value is not an integer.

    Example:
        >>> read_int("NO_SUCH_VARIABLE", default=3)
        3
    """
    for name in names:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigurationError(
                    message(
                        f"{name} is not an integer.", hint="set it to one, or unset it.", **{name: os.environ[name]}
                    )
                ) from None
    if default is not None:
        return default
    raise ConfigurationError(message(f"The environment variable {' or '.join(names)} is missing.", hint="set it."))


def _check_place(index_name: str, index: int, count_name: str, count: int, environment: str) -> None:
    if count < 1 or not 0 <= index < count:
        raise ConfigurationError(
            message(
                f"{environment}: {index_name} must be at least 0 and below {count_name}.",
                hint="start all processes with one launcher, and unset variables left over from another run.",
                **{index_name: index, count_name: count},
            )
        )


def _check_addresses(addresses: Sequence[str], size: int, environment: str) -> None:
    if len(addresses) != size:
        raise ConfigurationError(
            message(f"{environment}: one address per rank is needed.", addresses=list(addresses), size=size)
        )
    for address in addresses:
        host, colon, port = str(address).rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigurationError(
                message(
                    f"{environment}: this is not an address.",
                    hint='write "host:port", with a port below 65536.',
                    address=address,
                )
            )
    for address, uses in Counter(addresses).items():
        if uses > 1:
            raise ConfigurationError(
                message(
                    f"{environment}: two ranks have the same address.",
                    hint="give every process a port of its own.",
                    address=address,
                    ranks=[rank for rank, other in enumerate(addresses) if other == address],
                )
            )
