"""What a process states at a meeting, and whether the statements of all fit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tfrep_strategy._version import __version__
from tfrep_strategy.errors import message
from tfrep_strategy.rendezvous.connections import LOOPBACK
from tfrep_strategy.validation import Address, checked

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
"""The packages that contain TensorFlow."""


@dataclass(frozen=True)
class Place:
    """Where processes meet, and which of them this one is.

    Args:
        address: "host:port" of process 0, as the others reach it.
        number: Number of this process, from 0.
        count: How many processes there are.
        one_machine: Whether all are on this machine. They then meet on its loopback interface.
        noun: What the processes are, for messages.
        shared: What the processes must share to be let in, for messages.
        setting: Where the user sets that.

    Raises:
        ConfigurationError: The address cannot be read.

    Example:
        >>> Place("node1:29500", number=1, count=3).target
        ('node1', 29500)
    """

    address: str
    number: int
    count: int
    one_machine: bool = False
    noun: str = "rank"
    shared: str = "secret"
    setting: str = "TFREP_SECRET_FILE"

    def __post_init__(self) -> None:
        checked(Address, "rendezvous", self.address, hint="give the address at which the processes can meet.")

    @property
    def target(self) -> tuple[str, int]:
        """The host and the port to which the others connect."""
        host, _, port = self.address.rpartition(":")
        return LOOPBACK if self.one_machine else host.strip("[]"), int(port)

    def named(self, numbers: Sequence[int]) -> str:
        """Names processes, as in "Rank 1" or "Ranks 1, 3"."""
        few = [str(number) for number in numbers[:20]]
        more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
        return f"{self.noun.capitalize()}{'s' * (len(numbers) > 1)} {', '.join(few)}{more}"


@dataclass(frozen=True)
class Statement:
    """What a process states: its number, how many there are, who and where it is, its versions, and what the others need."""

    number: int
    count: int
    who: str
    versions: dict[str, str]
    told: dict[str, Any]
    host: str = LOOPBACK
    mark: str = ""
    """Drawn for each statement that a process makes, so that it knows its own."""

    @classmethod
    def of(cls, place: Place, told: Mapping[str, Any]) -> Statement:
        """Returns the statement of this process."""
        who = f"{socket.gethostname()}, process {os.getpid()}"
        return cls(place.number, place.count, who, versions(), dict(told), mark=secrets.token_hex(8))

    @classmethod
    def from_json(cls, text: bytes) -> Statement:
        """Reads a statement. That of another version may say more, or have no mark.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        said = json.loads(text)
        return cls(**{each.name: said[each.name] for each in fields(cls) if each.name in said})

    def to_json(self, host: str) -> bytes:
        """Returns the statement, with the address from which it is sent."""
        return json.dumps(asdict(replace(self, host=host))).encode()


def versions() -> dict[str, str]:
    """Returns the versions in which processes of a run must agree. It does not load TensorFlow.

    Example:
        >>> sorted(versions())
        ['Keras', 'TensorFlow', 'tfrep_strategy']
    """
    return {"tfrep_strategy": __version__, "TensorFlow": _version(*_TENSORFLOW), "Keras": _version("keras")}


def misfit(statements: Sequence[Statement], place: Place) -> str | None:
    """Compares the statement of the last process that has come with the others.

    Args:
        statements: In the order in which the processes came, process 0 first.
        place: Where they meet.

    Returns:
        The error for all of them; None if it fits.
    """
    first, last = statements[0], statements[-1]
    noun = place.noun
    same = [each.who for each in statements if each.number == last.number]
    if last.count != first.count:
        what = f"{place.named([last.number])} says that there are {last.count} {noun}s, and {noun} 0 that there are {first.count}."
        hint = "start all with the same number."
    elif len(same) > 1:
        hint = f"give each process a {noun} of its own, and each run a port of its own."
        what = f"Two processes say that they are {noun} {last.number}: {' and '.join(same)}."
    elif name := differing(first.versions, last.versions):
        what = (
            f"{place.named([last.number])} ({last.who}) has {name} {last.versions.get(name)},"
            f" and {noun} 0 ({first.who}) has {first.versions[name]}."
        )
        hint = "install the same versions everywhere."
    else:
        return None
    return message(what, hint=hint, rendezvous=place.address)


def differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Returns the first name for which two mappings differ; None if there is none.

    Example:
        >>> differing({"Keras": "3.12", "TensorFlow": "2.19"}, {"Keras": "3.12", "TensorFlow": "2.20"})
        'TensorFlow'
    """
    return next((name for name, value in first.items() if other.get(name) != value), None)


def _version(*packages: str) -> str:
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return "unknown"
