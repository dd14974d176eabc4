"""Going to the address where another process listens, again and again, until somebody of this run is there."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TypeVar

from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.rendezvous.connections import connection_of, prove
from tfrep_strategy.rendezvous.statements import Place, Statement

_log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""How often a process says whom it awaits."""
_ANSWER_SECONDS, _SILENCES = 10, 2
"""How long a process waits for the first words at the address, and after how many silences a stranger listens there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

T = TypeVar("T")


class Visit:
    """A process that goes to the address.

    Args:
        place: Where to go, and which of the processes this one is.
        own: What it states there.
        key: Shared secret.
        seconds: How long it tries.
    """

    def __init__(self, place: Place, own: Statement, key: bytes, seconds: float) -> None:
        self.place, self.own, self.key, self.seconds = place, own, key, seconds
        self.deadline = time.monotonic() + seconds
        self._next_line = time.monotonic() + LINE_SECONDS

    def insist(self, do: Callable[[], T]) -> T:
        """Does something there again and again, until it does not fail for want of somebody who answers.

        Args:
            do: What to do. It calls `enter`.

        Returns:
            What that returned.

        Raises:
            ConfigurationError: A stranger is there, or one with another secret.
            PeerError: Nobody came in time.
        """
        pause, silences = _FIRST_PAUSE, 0
        while True:
            try:
                return do()
            except _Silence as error:
                problem, silences = str(error), silences + 1
                if silences == _SILENCES:
                    raise self._stranger() from None
            except (OSError, EOFError) as error:
                problem, silences = f"{self.place.named([0])} cannot be reached ({str(error) or 'it hung up'})", 0
            now = time.monotonic()
            if now > self.deadline:
                raise given_up(self.place, self.seconds, problem)
            if now > self._next_line:
                self._next_line += LINE_SECONDS
                _log.warning("Waiting at %s. %s.", self.place.address, problem)
            time.sleep(min(pause, self.deadline - now))
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def enter(self, patience: int | None = None) -> Connection:
        """Goes there once, and makes its statement.

        Args:
            patience: How many seconds to wait for an answer. Default: 10.

        Returns:
            The connection.

        Raises:
            OSError, EOFError: Nobody is there, or the connection broke.
            ConfigurationError: A stranger is there, or one with another secret.
        """
        patience = patience or _ANSWER_SECONDS
        peer = socket.create_connection(self.place.target, timeout=patience)
        own, other = peer.getsockname()[0], peer.getpeername()
        if peer.getsockname() == other:  # A process that calls a free port of its own machine may be given this very port.
            peer.close()
            raise ConnectionRefusedError("Connection refused")
        connection = connection_of(peer, patience)
        try:
            self._prove(connection)
            connection.send_bytes(self.own.to_json(host=own))
        except BaseException:
            connection.close()
            raise
        return connection

    def _prove(self, connection: Connection) -> None:
        try:
            prove(connection, self.key, listens=False)
        except AuthenticationError:
            raise ConfigurationError(
                message(
                    f"The {self.place.shared} of this process is not that of {self.place.named([0]).lower()}.",
                    hint=f"use one {self.place.shared} everywhere ({self.place.setting}), and an address of its own for each run.",
                    rendezvous=self.place.address,
                )
            ) from None
        except BlockingIOError:
            raise _Silence("Whoever listens there is silent") from None
        except (AssertionError, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise self._stranger() from None

    def _stranger(self) -> ConfigurationError:
        return ConfigurationError(
            message(
                "Another program listens at the rendezvous.",
                hint="use another port, the same for all processes. It may be an earlier run that has not ended.",
                rendezvous=self.place.address,
            )
        )


def given_up(place: Place, seconds: float, problem: str) -> PeerError:
    """Returns the error of processes whose time is over.

    Args:
        place: Where they wanted to meet.
        seconds: How long they tried.
        problem: Why it was in vain.
    """
    return PeerError(
        message(
            f"The {place.noun}s did not meet within {seconds:g} seconds. {problem}.",
            hint="check that all were started, and that they reach this address; TFREP_RENDEZVOUS_TIMEOUT sets the limit.",
            rendezvous=place.address,
        )
    )


class _Silence(TimeoutError):
    """Somebody listens, and says nothing."""
