"""Programs that ranks are about to run, and functions that they call, which rank 0 compares. No rank waits for one that runs none.

A rank sends a digest of its program under a name, and gets an answer from rank 0 at once. If the digest is another one than that of
the first rank with such a program, both send the lines of theirs, and all ranks get an error with the first that differs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tfrep_strategy.communicators.peers.reports import describe_difference, some_of
from tfrep_strategy.errors import DesyncError, message

Lines = Sequence[tuple[str, str]]
"""Of each line of a program: what must be equal on all ranks, and what to tell of it where it is not."""

OF_RANK, OF_HUB = ("program compared", "program wanted"), ("program", "program lines", "called")

_KEPT = 1000
"""So many calls of functions are kept at most. A rank that is as far ahead of another one waits for it in a collective."""


class OwnPrograms:
    """The programs of a rank.

    Args:
        send: Sends something to the hub.
        news: Is notified when the hub has said something.
        desync: Returns the error that the hub has told of, if there is one.
        is_there: Returns whether somebody listens to the hub.
        limit: For how many seconds a rank waits for the hub.
    """

    def __init__(
        self, send: Callable[[Any], None], news: Any, desync: Callable[[], str | None], is_there: Callable[[], bool], limit: float
    ) -> None:
        self._send, self._news, self._desync, self._is_there, self._limit = send, news, desync, is_there, limit
        self._lines: dict[str, Callable[[], Lines]] = {}
        self._compared: set[str] = set()
        self._calls: Counter[str] = Counter()

    def compare(self, name: str, digest: bytes, lines: Callable[[], Lines]) -> None:
        """Compares a program with those that other ranks have under the same name.

        Args:
            name: The same on all ranks.
            digest: Is equal for equal programs.
            lines: Returns the program; called if it differs.

        Raises:
            DesyncError: It differs.
        """
        self._lines[name], began = lines, time.monotonic()
        self._send((OF_HUB[0], name, digest))
        with self._news:
            while not self._news.wait_for(lambda: name in self._compared or self._desync() or not self._is_there(), 1.0):
                if time.monotonic() - began > self._limit:
                    return
        if error := self._desync():
            raise DesyncError(error)

    def note_call(self, group: str, what: str, line: str) -> None:
        """Tells of a function that this rank calls now. If another rank calls another one, all get an error soon.

        Args:
            group: The ranks that call it.
            what: The function, and the shapes that it is called with.
            line: Where it is called.
        """
        self._calls[group] += 1
        self._send(("called", f"call {self._calls[group]} of {group}", (what, line)))

    def hear(self, kind: str, name: str) -> None:
        """Hears the hub."""
        if kind == OF_RANK[0]:
            self._compared.add(name)
        else:
            self._send((OF_HUB[1], name, self._lines[name]()))


class Programs:
    """The programs of all ranks, as the hub knows them.

    Args:
        tell: Sends something to some ranks, or to all.
    """

    def __init__(self, tell: Callable[[Any, Sequence[int] | None], None]) -> None:
        self._tell = tell
        self._first: dict[str, tuple[int, bytes]] = {}
        self._lines: dict[str, dict[int, Lines]] = {}
        self._calls: dict[str, tuple[int, tuple[str, str]]] = {}

    def hear(self, rank: int, kind: str, name: str, what: Any) -> None:
        """Hears a rank."""
        if kind == "called":
            first, called = self._calls.setdefault(name, (rank, what))
            if what[0] != called[0]:
                words = [(each, f"{function} at {line}") for each, (function, line) in sorted([(first, called), (rank, what)])]
                self._tell(("desync", describe_difference("Ranks called different functions.", words)), None)
            elif len(self._calls) > _KEPT:
                del self._calls[next(iter(self._calls))]
            return
        if kind == OF_HUB[0]:
            first, digest = self._first.setdefault(name, (rank, what))
            if what == digest:
                self._tell((OF_RANK[0], name), [rank])
            elif name not in self._lines:
                self._lines[name] = {}
                self._tell((OF_RANK[1], name), sorted({first, rank}))
            return
        told = self._lines[name]
        told[rank] = what
        if len(told) == 2:
            self._tell(("desync", _difference(told)), None)

    def forget(self, rank: int) -> None:
        """Forgets the programs of a rank that has ended, which cannot tell of them."""
        self._first = {name: first for name, first in self._first.items() if first[0] != rank}


def _difference(of_ranks: dict[int, Lines]) -> str:
    (first, one), (second, other) = sorted(of_ranks.items())

    def only(lines: Lines, others: Lines) -> str:
        more = Counter(text for text, _ in lines) - Counter(text for text, _ in others)
        known = {told for _, told in others}
        found = [told for text, told in lines if more[text]]
        return min(found, key=lambda told: told in known) if found else "nothing that others have not"

    words = [f"  rank {first}: {only(one, other)}", f"  rank {second}: {only(other, one)}"]
    hint = (
        "all ranks have to run the same step. Look for what differs between them, such as the rank, the time, or numbers that"
        " Python draws while the step is traced."
    )
    what = f"Ranks {some_of(sorted(of_ranks))} have different steps. What only one of them has is"
    return message("\n".join([what, *words]), hint=hint)
