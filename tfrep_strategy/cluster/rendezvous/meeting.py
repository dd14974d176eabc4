"""A meeting: processes that know one address and one secret go there, exchange statements, and get all addresses.

Process 0 listens. The others connect, prove that they know the secret, and make a statement. When all have come, each gets the
statements of all. If they do not fit, each gets the error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_cache_dir

from tfrep_strategy.cluster.rendezvous.channel import (
    Channel,
    Schema,
    UnreadableError,
    WrongSecretError,
    introduced,
    speaking,
    write,
)
from tfrep_strategy.cluster.rendezvous.confinement import confine, machines_of_run
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, free_ports, is_loopback
from tfrep_strategy.cluster.rendezvous.introductions import (
    STATEMENT,
    Guest,
    Place,
    Reception,
    Statement,
    is_of_user,
    listen_at,
    misfit,
    unusable,
)
from tfrep_strategy.core.limits import meeting_seconds
from tfrep_strategy.errors import ConfigurationError, PeerError, TfrepError, message

_SHORTEST, _LONGEST = 16, 1 << 16
_MAKE_ONE = "(umask 077; openssl rand -hex 32 > FILE) makes one; copy it to all machines."


def shared_secret(one_machine: bool) -> bytes:
    """Returns the secret that the processes of a run share.

    `TFREP_SECRET_FILE` names its file. Processes on one machine use the user's own secret by default, which is made when it is
    first needed, in the user's cache folder.

    Args:
        one_machine: Whether all processes are on this machine.

    Returns:
        The secret.

    Raises:
        ConfigurationError: The file cannot be read, or other users may read it, or there is none and the processes are on several
            machines.

    Example:
        >>> shared_secret(one_machine=True) == shared_secret(one_machine=True)
        True
    """
    named = os.environ.get("TFREP_SECRET_FILE")
    if named:
        return _read(Path(named), TFREP_SECRET_FILE=named)
    if not one_machine:
        raise ConfigurationError(
            message(
                "Processes on several machines need a secret to meet.",
                hint=f"set TFREP_SECRET_FILE to a file with the same content everywhere, with mode 600. {_MAKE_ONE}",
                code="TFREP-E015",
                TFREP_SECRET_FILE=None,
            )
        )
    own = Path(user_cache_dir("tfrep-strategy"), "rendezvous.secret")
    try:
        if not own.exists():
            _make(own)
    except OSError as error:
        raise ConfigurationError(
            message(
                f"Cannot make a secret ({error.strerror}).",
                hint=f"set TFREP_SECRET_FILE. {_MAKE_ONE}",
                code="TFREP-E015",
                file=str(own),
            )
        ) from None
    return _read(own, file=str(own))


def _read(path: Path, **setting: str) -> bytes:
    try:
        found = path.stat()
        # Reading something other than a file may never end.
        secret = path.read_bytes().strip() if stat.S_ISREG(found.st_mode) and found.st_size <= _LONGEST else None
    except OSError as error:
        raise ConfigurationError(
            message(
                f"The secret cannot be read ({error.strerror}).",
                hint="name a file of yours; a pod of Kubernetes that does not run as root needs `fsGroup`.",
                code="TFREP-E015",
                **setting,
            )
        ) from None
    if secret is None:
        raise ConfigurationError(
            message(f"The secret must be a file of at most {_LONGEST} bytes.", hint=_MAKE_ONE, code="TFREP-E015", **setting)
        )
    # Kubernetes gives a Secret to a pod that does not run as root through the group of the pod (fsGroup).
    from_root = found.st_uid == 0 and os.geteuid() != 0
    mode = stat.S_IMODE(found.st_mode)
    if mode & (0o037 if from_root else 0o077):
        raise ConfigurationError(
            message(
                f"Other users may read the secret: its file has mode {mode:o}.",
                hint="chmod 600; for a Secret of Kubernetes, `defaultMode: 0400`, and `fsGroup` if the pod does not run as root.",
                code="TFREP-E015",
                **setting,
            )
        )
    if len(secret) < _SHORTEST:
        raise ConfigurationError(
            message(f"The secret is shorter than {_SHORTEST} characters.", hint=_MAKE_ONE, code="TFREP-E015", **setting)
        )
    return secret


def _make(file: Path) -> None:
    """Writes a new secret. Processes may do so at once; all read the first one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
        new.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink()


_log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Interval at which a process reports for whom it waits."""
_ANSWER_SECONDS, _SILENCES = 10, 2
"""Seconds to wait for an answer at the address, and unanswered attempts after which it belongs to another program."""
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_LOCAL_PAUSE = 0.1, 5.0, 0.02

T = TypeVar("T")


class Visit:
    """A process that goes to the address.

    Args:
        place: Where to go, and the number of this process.
        own: Its statement.
        key: Shared secret.
        seconds: How long it tries.
    """

    def __init__(self, place: Place, own: Statement, key: bytes, seconds: float) -> None:
        self.place, self.own, self.key, self.seconds = place, own, key, seconds
        self.deadline = time.monotonic() + seconds
        self._next_line = time.monotonic() + LINE_SECONDS

    def insist(self, do: Callable[[], T]) -> T:
        """Calls a function again and again, until another process answers.

        Args:
            do: The function. It calls `enter`.

        Returns:
            Its result.

        Raises:
            ConfigurationError: Another program answers, or a process with another secret.
            PeerError: No process answered in time.
        """
        pause, silences = _LONGEST_LOCAL_PAUSE if self.place.has_name else _FIRST_PAUSE, 0
        while True:
            try:
                return do()
            except _Silence as error:
                problem, silences = str(error), silences + 1
                if silences == _SILENCES:
                    raise self._other_program() from None
            except (OSError, EOFError) as error:
                problem, silences = f"{self.place.named([0])} cannot be reached ({str(error) or 'it hung up'})", 0
            now = time.monotonic()
            if now > self.deadline:
                raise given_up(self.place, self.seconds, problem)
            if now > self._next_line:
                self._next_line += LINE_SECONDS
                _log.warning("Waiting at %s. %s.", self.place.address, problem)
            time.sleep(min(pause, self.deadline - now))
            pause = min(1.5 * pause, _LONGEST_LOCAL_PAUSE if self.place.has_name else _LONGEST_PAUSE)

    def enter(self, schema: Schema, patience: int | None = None) -> Channel:
        """Goes there once, and makes its statement.

        Args:
            schema: The messages that come from there.
            patience: How many seconds to wait for an answer. Default: 10.

        Returns:
            The connection.

        Raises:
            OSError, EOFError: No process listens there, or the connection broke.
            ConfigurationError: Another program answers, or a process with another secret.
        """
        target, problems = self.place.target, list[Exception]()
        if isinstance(target, str):
            addresses: list[tuple[Any, Any]] = [(socket.AF_UNIX, target)]
        else:
            addresses = [(family, each) for family, _, _, _, each in socket.getaddrinfo(*target, type=socket.SOCK_STREAM)]
        for family, address in addresses:  # A name may have several, and another program may listen at one of them.
            try:
                return self._entered(family, address, schema, patience or _ANSWER_SECONDS)
            except (OSError, EOFError, ConfigurationError) as error:
                problems.append(error)
        raise max(problems, key=lambda error: isinstance(error, ConfigurationError))

    def _entered(self, family: int, address: Any, schema: Schema, patience: int) -> Channel:
        peer = socket.socket(family)
        try:
            peer.settimeout(patience)
            peer.connect(address)
            own = peer.getsockname()
            # A process that connects to a free port of this machine may get this very port.
            if own == peer.getpeername() or not is_of_user(peer):
                raise ConnectionRefusedError("Connection refused")
        except OSError:
            peer.close()
            raise
        statement = replace(self.own, host=LOOPBACK if family == socket.AF_UNIX else own[0])
        try:
            return introduced(peer, self.key, schema, patience, "statement", statement)
        except WrongSecretError:
            raise ConfigurationError(
                message(
                    f"The {self.place.shared} of this process is not that of {self.place.named([0]).lower()}.",
                    hint=f"use one {self.place.shared} everywhere ({self.place.setting}), and a different address for each run.",
                    code="TFREP-E014",
                    rendezvous=self.place.address,
                )
            ) from None
        except BlockingIOError:
            raise _Silence("The program that listens there is silent") from None
        except UnreadableError:
            raise self._other_program() from None

    def _other_program(self) -> ConfigurationError:
        return ConfigurationError(
            message(
                "Another program listens at the rendezvous.",
                hint="use another port, the same for all processes. It may be an earlier run that has not ended, or another"
                " version of this package.",
                code="TFREP-E014",
                rendezvous=self.place.address,
            )
        )


def given_up(place: Place, seconds: float, problem: str) -> PeerError:
    """Returns the error of processes whose time is over.

    Args:
        place: Where they wanted to meet.
        seconds: How long they tried.
        problem: The reason for the failure.
    """
    return PeerError(
        message(
            f"Not all {place.noun}s came to the rendezvous within {seconds:g} seconds. {problem}.",
            hint="check that all were started, and that they reach this address; TFREP_RENDEZVOUS_TIMEOUT sets the limit.",
            code="TFREP-E013",
            rendezvous=place.address,
        )
    )


class _Silence(TimeoutError):
    """The other end listens, but sends nothing."""


_GREETING_SECONDS = 10
"""Seconds that process 0 waits for the proof and the statement of a process that has connected."""
_GRACE_SECONDS = 2.0
"""The additional time that other processes wait. Process 0 ends first, because it knows who is missing."""
_LINGER_SECONDS = 10.0
"""Seconds in which process 0 sends an error to processes that come late."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Met:
    """A process of the meeting.

    Attributes:
        host: Address of its machine, at which the others reach it.
        told: The data in its statement.
    """

    host: str
    told: dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """The reason why a process cannot take part.

    Attributes:
        text: The error.
        lost: Whether a process is missing, so that it may go well another time.
    """

    text: str
    lost: bool

    def error(self) -> TfrepError:
        """Returns the error of the process."""
        return (PeerError if self.lost else ConfigurationError)(self.text)


_TO_GUESTS = Schema({"all": tuple[list[Met]], "error": tuple[Refusal], "line": tuple[str]})


Then = Callable[[dict[int, Channel], list[Met]], None]


def meet(
    place: Place,
    told: Mapping[str, Any],
    *,
    secret: bytes | None = None,
    seconds: float | None = None,
    guard: Callable[[socket.socket], None] | None = None,
    then: Then = lambda channels, met: None,
) -> list[Met]:
    """Meets the other processes. Every one must call it.

    Args:
        place: Where they meet, and the number of this process.
        told: Data of this process for the others, as JSON can hold it.
        secret: Default: from `shared_secret`.
        seconds: How long to wait for all of them. Default: from `meeting_seconds`.
        guard: Process 0 calls it with the socket at which it listens. It may keep other machines away.
        then: Called with the open channels when all have come: process 0 has one to each of the others, and they have one to it.

    Returns:
        All processes, in the order of their numbers.

    Raises:
        ConfigurationError: Two processes have one number, their versions, secrets or numbers of processes differ, or another
            program listens at the address. All processes that come get the error.
        PeerError: Not all have come in time.

    Example:
        >>> [process] = meet(Place("localhost:29500", number=0, count=1, one_machine=True), {"port": 2222})
        >>> process.told
        {'port': 2222}
    """
    if place.count == 1:
        return [Met(LOOPBACK, dict(told))]
    key = secret or shared_secret(place.one_machine)
    visit = Visit(place, Statement.of(place, told), key, meeting_seconds() if seconds is None else seconds)
    return _Host(visit, guard).receive(then) if place.number == 0 else visit.insist(lambda: _go_once(visit, then))


def _go_once(visit: Visit, then: Then, patience: int | None = None, silence: float | None = None) -> list[Met]:
    """Goes to the meeting once.

    Args:
        visit: Of a process other than process 0.
        then: As for `meet`.
        patience: How many seconds to wait until it is let in. Default: as `Visit.enter`.
        silence: Longest silence after that, in seconds. Default: 30.

    Raises:
        OSError, EOFError: No process listens there, or the connection broke.
    """
    with visit.enter(_TO_GUESTS, patience) as channel:
        problem = f"{visit.place.named([0])} has gone silent"
        while channel.poll(max(0.0, min(silence or 3 * LINE_SECONDS, visit.deadline + _GRACE_SECONDS - time.monotonic()))):
            kind, content = channel.receive()
            if kind == "all":
                then({0: channel}, content)
                return content
            if kind == "error":
                raise content.error()
            problem = content
            _log.warning("Waiting at %s. %s.", visit.place.address, problem)
    late = time.monotonic() > visit.deadline
    raise given_up(visit.place, visit.seconds, problem) if late else TimeoutError(problem)


class _Host:
    """Process 0 in the meeting, to which the others come."""

    def __init__(self, visit: Visit, guard: Callable[[socket.socket], None] | None) -> None:
        self._visit, self._place, self._own, self._guard = visit, visit.place, visit.own, guard
        self._here: dict[Channel, Statement] = {}
        self._next_line = time.monotonic() + LINE_SECONDS

    def receive(self, then: Then) -> list[Met]:
        try:
            server, is_certain = listen_at(self._place)
        except OSError as error:
            self._look_for_another_host()
            raise unusable(self._place, error) from None
        if self._guard:
            self._guard(server)
        self._reception = Reception(server, self._visit.key, _GREETING_SECONDS, STATEMENT, Schema({}), self._place)
        with contextlib.closing(self._reception):
            try:
                while missing := self._missing():
                    self._serve()
                    self._remind(missing, is_certain)
                return self._tell_all(then)
            except (ConfigurationError, PeerError) as error:
                self._tell_error(error)
                raise
            finally:
                for channel in self._here:
                    channel.close()

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self._place.count)) - {each.number for each in self._here.values()})

    def _serve(self) -> None:
        guests = [guest for guest in self._reception.guests(_LOOK_SECONDS) if not self._is_this_process(guest)]
        for channel in speaking(list(self._here), 0):  # It has sent everything before, so it has ended. It may come again.
            del self._here[channel]
            channel.close()
        self._here |= {guest.channel: guest.said for guest in guests}
        for guest in guests:
            self._look_at(guest)

    def _is_this_process(self, guest: Guest) -> bool:
        """Whether the guest is this process, which has gone to its own address to look for another process 0. It is sent away."""
        is_own = guest.said.mark == self._own.mark
        if is_own:
            guest.channel.close()
        return is_own

    def _look_at(self, guest: Guest) -> None:
        # Several may have come at once, so each is compared.
        others = [said for channel, said in self._here.items() if channel is not guest.channel]
        if error := misfit([self._own, *others, guest.said], self._place):
            raise ConfigurationError(error)

    def _remind(self, missing: list[int], is_certain: bool) -> None:
        now = time.monotonic()
        problem = f"{self._place.named(missing)} {'has' if len(missing) == 1 else 'have'} not come"
        if self._reception.refused:
            problem += f". A process at {self._reception.refused[0]} has another {self._place.shared} ({self._place.setting})"
        if now > self._visit.deadline:
            raise given_up(self._place, self._visit.seconds, problem)
        if now > self._next_line:
            self._next_line += LINE_SECONDS
            _log.warning("Waiting at %s. %s.", self._place.address, problem)
            self._send("line", problem)
            if not is_certain:
                self._look_for_another_host()

    def _look_for_another_host(self) -> None:
        """Goes to its own address. If another process 0 listens there, both get an error, and so do all that wait."""
        with contextlib.suppress(OSError, EOFError):
            _go_once(self._visit, lambda channels, met: None, patience=1, silence=1)

    def _tell_all(self, then: Then) -> list[Met]:
        statements = sorted([self._own, *self._here.values()], key=lambda each: each.number)
        own_host = self._reception.own_host
        all_met = [Met(own_host if is_loopback(each.host) else each.host, each.told) for each in statements]
        self._send("all", all_met)
        then({said.number: channel for channel, said in self._here.items()}, all_met)
        return all_met

    def _tell_error(self, error: Exception) -> None:
        """Sends an error to all that are here. Late ones get it for some time, unless the time was over for all."""
        is_late = isinstance(error, PeerError)
        deadline, informed = time.monotonic() + (0 if is_late else _LINGER_SECONDS), set[int]()
        while True:
            informed |= {each.number for each in self._here.values()}
            self._send("error", Refusal(str(error), is_late))
            for channel in self._here:
                channel.close()
            self._here.clear()
            if informed >= set(range(1, self._place.count)) or time.monotonic() > deadline:
                return
            with contextlib.suppress(ConfigurationError):
                self._serve()

    def _send(self, kind: str, *contents: Any) -> None:
        body = write(kind, *contents)
        for channel in self._here:
            with contextlib.suppress(OSError):  # It has ended.
                channel.send_written(body)


@functools.cache
def addresses_of_ranks(place: Place) -> tuple[str, ...]:
    """Meets the other ranks, once in the life of this process.

    Args:
        place: Where they meet.

    Returns:
        `"host:port"` of each rank, where it may listen.

    Raises:
        ConfigurationError: The ranks do not fit.
        PeerError: Not all have come in time.

    Example:
        >>> addresses_of_ranks(Place("localhost:29500", number=0, count=1, one_machine=True))
        ('127.0.0.1:...',)
    """
    (port,) = free_ports(1, LOOPBACK if place.one_machine else "")
    met = meet(place, {"port": port})
    return tuple(with_port(each.host, each.told["port"]) for each in met)


def meet_at(addresses: Sequence[str], rank: int, source: str) -> None:
    """Meets the other ranks at the address of rank 0, if ranks know all addresses from the start.

    No server of TensorFlow may listen there yet. The ranks need no secret, since the servers obey all machines of the run anyway.
    Rank 0 accepts no connections from other machines if it knows those of the run. Programs with another list of addresses are not
    let in.

    Args:
        addresses: `"host:port"` of each rank.
        rank: The rank of this process.
        source: The source of the addresses, for messages.

    Raises:
        ConfigurationError: The ranks do not fit, or have other addresses, or another program listens there.
        PeerError: Not all have come in time.

    Example:
        >>> meet_at(["127.0.0.1:2222"], 0, "TF_CONFIG")
    """
    one_machine = all(is_loopback(address.rpartition(":")[0]) for address in addresses)
    place = Place(addresses[0], rank, len(addresses), one_machine, shared="list of addresses", setting=source)

    def guard(server: socket.socket) -> None:
        networks, problem = machines_of_run(addresses[rank], addresses)
        if problem is None:
            with contextlib.suppress(OSError):  # The system cannot confine it. TensorFlow's server warns of that.
                confine(server, networks)

    meet(place, {}, secret=hashlib.sha256(" ".join(addresses).encode()).digest(), guard=guard)


def with_port(host: str, port: int) -> str:
    """Returns an address.

    Example:
        >>> with_port("::1", 80)
        '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
