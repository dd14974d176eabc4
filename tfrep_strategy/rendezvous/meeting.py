"""A meeting: processes that know one address tell each other who they are.

Process 0 listens. The others connect, prove that they know the secret, and make a statement. When all have come, each gets the
statements of all. If they do not fit, each gets the error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from tfrep_strategy.errors import ConfigurationError, PeerError
from tfrep_strategy.limits import meeting_seconds
from tfrep_strategy.rendezvous.connections import LOOPBACK, is_loopback, set_patience
from tfrep_strategy.rendezvous.listening import listen, unusable
from tfrep_strategy.rendezvous.reception import Guest, Reception
from tfrep_strategy.rendezvous.secret import shared_secret
from tfrep_strategy.rendezvous.statements import Place, Statement, misfit
from tfrep_strategy.rendezvous.visiting import LINE_SECONDS, Visit, given_up

_log = logging.getLogger(__name__)

_GREETING_SECONDS = 10
"""How long process 0 waits for the proof and the statement of a process that has connected."""
_LINGER_SECONDS = 10.0
"""How long process 0 tells an error to processes that come late."""
_LOOK_SECONDS = 0.2
_LONGEST_STATEMENT, _LONGEST_ANSWER = 1 << 16, 1 << 26


@dataclass(frozen=True)
class Met:
    """A process of the meeting.

    Attributes:
        host: Address of its machine, at which the others reach it.
        told: What it told.
    """

    host: str
    told: dict[str, Any]


def meet(
    place: Place,
    told: Mapping[str, Any],
    *,
    secret: bytes | None = None,
    seconds: float | None = None,
    guard: Callable[[socket.socket], None] | None = None,
) -> list[Met]:
    """Meets the other processes. Every one must call it.

    Args:
        place: Where they meet, and which of them this one is.
        told: What the others should know of this one: what JSON can hold.
        secret: Default: from `shared_secret`.
        seconds: How long to wait for all of them. Default: from `meeting_seconds`.
        guard: Process 0 calls it with the socket at which it listens. It may keep strangers away.

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
    visit = _Visit(place, Statement.of(place, told), key, meeting_seconds() if seconds is None else seconds)
    return _Host(visit, guard).receive() if place.number == 0 else visit.until_all_have_come()


class _Visit(Visit):
    """The part of a process that goes to the address."""

    def until_all_have_come(self) -> list[Met]:
        """Goes there again and again, until it gets an answer."""
        return self.insist(self.once)

    def once(self, patience: int | None = None, silence: float | None = None) -> list[Met]:
        """Goes there once.

        Args:
            patience: How many seconds to wait until it is let in. Default: as `enter`.
            silence: For how many seconds it may then hear nothing. Default: 30.

        Raises:
            OSError, EOFError: Nobody is there, or the connection broke.
        """
        with self.enter(patience) as connection:
            set_patience(connection, 0)
            problem = f"{self.place.named([0])} has gone silent"
            while connection.poll(max(0.0, min(silence or 3 * LINE_SECONDS, self.deadline - time.monotonic()))):
                kind, content = json.loads(connection.recv_bytes(_LONGEST_ANSWER))
                if kind == "all":
                    return [Met(**each) for each in content]
                if kind == "error":
                    raise (PeerError if content["lost"] else ConfigurationError)(content["text"])
                problem = content
                _log.warning("Waiting at %s. %s.", self.place.address, problem)
        late = time.monotonic() > self.deadline
        raise given_up(self.place, self.seconds, problem) if late else TimeoutError(problem)


class _Host:
    """The part of process 0, to which the others come."""

    def __init__(self, visit: _Visit, guard: Callable[[socket.socket], None] | None) -> None:
        self._visit, self._place, self._own, self._guard = visit, visit.place, visit.own, guard
        self._here: dict[Connection, Statement] = {}
        self._selector = selectors.DefaultSelector()
        self._own_host = LOOPBACK
        self._strangers: dict[str, None] = {}
        self._next_line = time.monotonic() + LINE_SECONDS

    def receive(self) -> list[Met]:
        try:
            server, is_certain = listen(*self._place.target, one_machine=self._place.one_machine)
        except OSError as error:
            self._look_for_another_host()
            raise unusable(self._place, error) from None
        if self._guard:
            self._guard(server)
        hear = functools.partial(Connection.recv_bytes, maxlength=_LONGEST_STATEMENT)
        self._reception = Reception(server, self._visit.key, _GREETING_SECONDS, lambda each: Statement.from_json(hear(each)))
        with contextlib.closing(self._reception):
            try:
                while missing := self._missing():
                    self._serve()
                    self._remind(missing, is_certain)
                return self._tell_all()
            except (ConfigurationError, PeerError) as error:
                self._tell_error(error)
                raise
            finally:
                self._selector.close()
                for connection in self._here:
                    connection.close()

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self._place.count)) - {each.number for each in self._here.values()})

    def _serve(self) -> None:
        guests = [guest for guest in self._reception.guests(_LOOK_SECONDS) if not self._is_this_process(guest)]
        for key, _ in self._selector.select(0):  # It said all before, so that now it has ended. It may come again.
            connection: Connection = key.fileobj  # type: ignore[assignment]
            self._selector.unregister(connection)
            del self._here[connection]
            connection.close()
        for guest in guests:
            if guest.said is not None:
                self._here[guest.connection] = guest.said
                self._selector.register(guest.connection, selectors.EVENT_READ)
        for guest in guests:
            self._look_at(guest)

    def _is_this_process(self, guest: Guest) -> bool:
        """Whether it has come to its own address, where it looks for another process 0. It then goes away again."""
        is_own = guest.said is not None and guest.said.mark == self._own.mark
        if is_own:
            guest.connection.close()
        return is_own

    def _look_at(self, guest: Guest) -> None:
        if guest.said is None:  # Anybody may come and say anything. The others are still waited for.
            if guest.address not in self._strangers:
                self._strangers[guest.address] = None
                what = "At %s, a process at %s has another %s, and is not let in."
                _log.warning(what, self._place.address, guest.address, self._place.shared)
            return
        if is_loopback(self._own_host):
            self._own_host = guest.reached
        # Several may have come at once: each is compared, and not the last of them only.
        others = [said for connection, said in self._here.items() if connection is not guest.connection]
        if error := misfit([self._own, *others, guest.said], self._place):
            raise ConfigurationError(error)

    def _remind(self, missing: list[int], is_certain: bool) -> None:
        now = time.monotonic()
        problem = f"{self._place.named(missing)} {'has' if len(missing) == 1 else 'have'} not come"
        if self._strangers:
            problem += f". A process at {next(iter(self._strangers))} has another {self._place.shared} ({self._place.setting})"
        if now > self._visit.deadline:
            raise given_up(self._place, self._visit.seconds, problem)
        if now > self._next_line:
            self._next_line += LINE_SECONDS
            _log.warning("Waiting at %s. %s.", self._place.address, problem)
            self._send("line", problem)
            if not is_certain:
                self._look_for_another_host()

    def _look_for_another_host(self) -> None:
        """Goes to the address itself. If another process 0 listens there, both get an error, and all that wait."""
        with contextlib.suppress(OSError, EOFError):
            self._visit.once(patience=1, silence=1)

    def _tell_all(self) -> list[Met]:
        statements = sorted([self._own, *self._here.values()], key=lambda each: each.number)
        everybody = [Met(self._own_host if is_loopback(each.host) else each.host, each.told) for each in statements]
        self._send("all", [asdict(each) for each in everybody])
        return everybody

    def _tell_error(self, error: Exception) -> None:
        """Tells it to all that are here. Those that come late get it for some time, unless all were waited for."""
        is_late = isinstance(error, PeerError)
        deadline, told = time.monotonic() + (0 if is_late else _LINGER_SECONDS), set[int]()
        content = {"text": str(error), "lost": is_late}
        while True:
            told |= {each.number for each in self._here.values()}
            self._send("error", content)
            for connection in self._here:
                self._selector.unregister(connection)
                connection.close()
            self._here.clear()
            if told >= set(range(1, self._place.count)) or time.monotonic() > deadline:
                return
            with contextlib.suppress(ConfigurationError):
                self._serve()

    def _send(self, kind: str, content: Any) -> None:
        data = json.dumps([kind, content]).encode()
        for connection in self._here:
            with contextlib.suppress(OSError):  # It has ended.
                connection.send_bytes(data)
