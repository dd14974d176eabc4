"""Introductions: the place where processes meet, the server that greets them, and the statement that each of them makes."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
import math
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfrep_strategy._version import __version__
from tfrep_strategy.cluster.rendezvous.channel import GREETING_SECONDS, LONGEST, Channel, Schema, WrongSecretError
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, is_loopback
from tfrep_strategy.core.validation import Address, checked
from tfrep_strategy.errors import ConfigurationError, message

_log = logging.getLogger(__name__)

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
"""The packages that contain TensorFlow."""


@dataclass(frozen=True)
class Place:
    """The meeting point of some processes, and the number of this one.

    Args:
        address: "host:port" of process 0, as the others reach it.
        number: Number of this process, from 0.
        count: Number of processes.
        one_machine: Whether all are on this machine. They then meet on its loopback interface.
        noun: The word for a process in messages.
        shared: The word in messages for what the processes must share.
        setting: The setting of what they share.
        has_name: Whether the address is a name that the kernel of one machine keeps, for processes of one user. No network reaches
            it, and it ends with the process.

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
    has_name: bool = False

    def __post_init__(self) -> None:
        if not self.has_name:
            checked(Address, "rendezvous", self.address, hint="give the address at which the processes can meet.")

    @property
    def target(self) -> tuple[str, int] | str:
        """The host and the port to which the others connect; or the name."""
        if self.has_name:
            return "\0" + self.address.removeprefix("@")
        host, _, port = self.address.rpartition(":")
        return LOOPBACK if self.one_machine else host.strip("[]"), int(port)

    def named(self, numbers: Sequence[int]) -> str:
        """Names processes, as in "Rank 1" or "Ranks 1, 3"."""
        few = [str(number) for number in numbers[:20]]
        more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
        return f"{self.noun.capitalize()}{'s' * (len(numbers) > 1)} {', '.join(few)}{more}"


@dataclass(frozen=True)
class Statement:
    """The statement of a process: its number, the number of processes, its name and host, its versions, and data for the others."""

    number: int
    count: int
    who: str
    versions: dict[str, str]
    told: dict[str, Any]
    host: str = LOOPBACK
    mark: str = ""
    """Random for each statement, so that a process recognises its own."""

    @classmethod
    def of(cls, place: Place, told: Mapping[str, Any]) -> Statement:
        """Returns the statement of this process."""
        who = f"{socket.gethostname()}, process {os.getpid()}"
        return cls(place.number, place.count, who, versions(), dict(told), mark=secrets.token_hex(8))


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
        statements: In the order of arrival, process 0 first.
        place: Where they meet.

    Returns:
        The error for all of them; None if it fits.
    """
    first, last = statements[0], statements[-1]
    noun, code = place.noun, ""
    same = [each.who for each in statements if each.number == last.number]
    if last.count != first.count:
        what = f"{place.named([last.number])} says that there are {last.count} {noun}s, and {noun} 0 that there are {first.count}."
        hint = "start all with the same number."
    elif last.number not in range(first.count):
        what, hint = f"{place.named([last.number])} is not one of the {first.count} {noun}s.", f"number the {noun}s from 0."
    elif len(same) > 1:
        hint = f"give each process its own {noun}, and each run its own port."
        what = f"Two processes say that they are {noun} {last.number}: {' and '.join(same)}."
    elif name := differing(first.versions, last.versions):
        what = (
            f"{place.named([last.number])} ({last.who}) has {name} {last.versions.get(name)},"
            f" and {noun} 0 ({first.who}) has {first.versions[name]}."
        )
        hint, code = "install the same versions everywhere.", "TFREP-E003"
    else:
        return None
    return message(what, hint=hint, code=code, rendezvous=place.address)


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


_WAITING = 4096
"""Connections that may wait to be accepted. All ranks of a run may come at once."""


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


def listen_at(place: Place) -> tuple[socket.socket, bool]:
    """Listens where process 0 is awaited, as `listen` does."""
    target = place.target
    if not isinstance(target, str):
        return listen(*target, one_machine=place.one_machine)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(target)
        server.listen(_WAITING)
    except OSError:
        server.close()
        raise
    return server, True


def is_of_user(peer: socket.socket) -> bool:
    """Returns whether a process at the other end may be spoken to: over a local socket only one of this user."""
    if peer.family != socket.AF_UNIX:
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def unusable(place: Place, error: OSError) -> ConfigurationError:
    """Returns the error of process 0 if it cannot listen.

    Args:
        place: The place where it tried to listen.
        error: The system's error.
    """
    return ConfigurationError(
        message(
            f"{place.named([0])} cannot listen at the rendezvous ({os.strerror(error.errno or 0)}).",
            hint="use a free port, and the address of this machine; only one process can have this number.",
            code="TFREP-E014",
            rendezvous=place.address,
        )
    )


_MOST_AT_ONCE = 256
"""Connections that are greeted at once. Others wait until one of them has been greeted."""
_TURN_SECONDS = 1.0
"""Seconds after which the greeted connections are closed, if none of them has finished and others wait."""
_LOOK_SECONDS = 0.2
_LONGEST_FIRST = 1 << 16


STATEMENT = Schema({"statement": tuple[Statement]})
"""The first message of a process that comes to a meeting."""


class Guest(NamedTuple):
    """A process that has connected.

    Attributes:
        channel: The connection.
        said: The content of its first message after the proof.
    """

    channel: Channel
    said: Any


class Reception:
    """Lets each process that connects prove that it knows the secret, and reads its first message, each in its own thread.

    Args:
        server: The socket where they connect. The reception closes it.
        key: Shared secret.
        seconds: How long each may take.
        first: The first message of each. A process that sends another one is dropped.
        then: The messages that may follow.
        place: Where they meet, to warn of processes with another secret.

    Attributes:
        refused: The addresses of processes with another secret, the first one first.
        own_host: The address of this machine at which the others came; one that other machines reach if one of them came there.
    """

    def __init__(
        self, server: socket.socket, key: bytes, seconds: int, first: Schema, then: Schema, place: Place | None = None
    ) -> None:
        self._server, self._key, self._seconds, self._first, self._then = server, key, seconds, first, then
        self._place = place
        self.refused: list[str] = []
        self.own_host = LOOPBACK
        self._guests: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self._deadlines: dict[Channel, float] = {}  # Of connections that are being greeted, in the order of arrival.
        self._lock = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="tfrep-reception")
        self._thread.start()

    def guests(self, seconds: float) -> list[Guest]:
        """Returns those that have been greeted since the last call.

        Args:
            seconds: How long to wait if there is none.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._guests.get(timeout=seconds))
            while True:
                found.append(self._guests.get_nowait())
        return found

    def close(self) -> None:
        """Closes the server, and the connections that have not been taken."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # Wakes the thread, for which a local socket needs a guest.
            if self._server.family == socket.AF_UNIX:
                with socket.socket(socket.AF_UNIX) as last:
                    last.connect(self._server.getsockname())
            else:
                self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._give_up(math.inf)
        for guest in self.guests(0.0):
            guest.channel.close()

    def _accept(self) -> None:
        self._server.settimeout(_LOOK_SECONDS)
        while not self._is_closed:
            with contextlib.suppress(OSError):  # No process came, or one came and left.
                self._begin(*self._server.accept())
            self._give_up(time.monotonic())

    def _begin(self, peer: socket.socket, address: Any) -> None:
        if self._is_closed or not is_of_user(peer):
            peer.close()
            return
        is_local = peer.family == socket.AF_UNIX
        reached = LOOPBACK if is_local else peer.getsockname()[0].removeprefix("::ffff:")
        channel = Channel(peer, self._first, self._seconds, _LONGEST_FIRST)
        with self._lock:
            while len(self._deadlines) == _MOST_AT_ONCE and not self._is_closed:
                if not self._lock.wait(_TURN_SECONDS):
                    for silent in self._deadlines:
                        silent.interrupt()
                    self._deadlines.clear()
            self._deadlines[channel] = time.monotonic() + self._seconds
        arguments = channel, reached, LOOPBACK if is_local else address[0]
        threading.Thread(target=self._greet, args=arguments, daemon=True, name="tfrep-greeting").start()

    def _give_up(self, now: float) -> None:
        with self._lock:
            for channel, deadline in self._deadlines.items():
                if now > deadline:
                    channel.interrupt()

    def _greet(self, channel: Channel, reached: str, address: str) -> None:
        greeted = None
        try:
            channel.admit(self._key)
            greeted = Guest(channel, channel.receive()[1])
            channel.schema, channel.longest = self._then, LONGEST
            channel.limit(GREETING_SECONDS)
        except WrongSecretError:  # The others are still awaited.
            self._refuse(address)
        except (OSError, EOFError):  # Another program may connect and send anything.
            pass
        with self._lock:
            if self._deadlines.pop(channel, None) is None:  # It had to make room, and has been told so.
                greeted = None
            self._lock.notify_all()
            if greeted is None or self._is_closed:
                channel.close()
            else:
                self.own_host = reached if is_loopback(self.own_host) else self.own_host
                self._guests.put(greeted)

    def _refuse(self, address: str) -> None:
        if address in self.refused:
            return
        self.refused.append(address)
        if self._place is not None:
            what = "At %s, a process at %s has another %s, and is refused."
            _log.warning(what, self._place.address, address, self._place.shared)
