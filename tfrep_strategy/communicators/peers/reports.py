"""Reports of the collectives and programs that ranks are about to run, for comparison on rank 0.

Rank 0 compares programs and called functions without waiting for ranks that run none. A rank sends a digest of its program
under a name, and gets an answer from rank 0 at once. If the digest differs from that of the first rank with such a program, both
send the lines of their programs, and all ranks get an error with the first line that differs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from tfrep_strategy.cluster.flight_recorder import LONGEST_LINE, MOST_LINES, Whereabouts
from tfrep_strategy.cluster.rendezvous.channel import Schema
from tfrep_strategy.core.calls import Call
from tfrep_strategy.core.validation import MOST_RANKS
from tfrep_strategy.errors import DesyncError, is_count, message

_NAMED = 8
"""The number of ranks that a message names one by one."""


def _group(found: Any) -> Sequence[int]:
    """Reads a group from a message."""
    numbers = [found.get("start"), found.get("stop")] if isinstance(found, dict) else found
    if not isinstance(numbers, list) or not all(is_count(each, 0, MOST_RANKS) for each in numbers):
        raise ValueError("no group")
    return range(*numbers) if isinstance(found, dict) else tuple(numbers)


Group = Annotated[Any, BeforeValidator(_group)]
"""The ranks of a group, from `group_of`."""


class Report(NamedTuple):
    """A rank's report of its next collective, or of one in a function that it has been in for some time.

    Attributes:
        group: The ranks that take part, from `group_of`.
        number: For an eager collective: the number of earlier collectives of this group on the rank. For a collective in a
            function: the number of the group's communicator, the place in the program, and how often it has begun there.
        call: The collective.
        waits: Whether the rank waits for the others' reports before it continues.
        is_limited: Whether a long wait is an error.
    """

    group: Group
    number: int | tuple[int, str, int]
    call: Call
    waits: bool
    is_limited: bool = False


SAME_CALLS = "all ranks of a group have to call the same collectives in the same order, with the same dtypes and shapes."
"""What to do about ranks that called different collectives."""


def group_of(ranks: Sequence[int]) -> Sequence[int]:
    """Returns the ranks of a group in the form of reports: a range if possible, which is short for any number of ranks.

    Example:
        >>> group_of([0, 1, 2]), group_of([0, 2])
        (range(0, 3), (0, 2))
    """
    following = range(ranks[0], ranks[0] + len(ranks))
    return following if list(ranks) == list(following) else tuple(ranks)


def some_of(ranks: Sequence[int]) -> str:
    """Lists ranks, but only the first of many.

    Example:
        >>> some_of([0, 2]), some_of(range(1024))
        ('0, 2', '0, 1, 2, 3, 4, 5, 6, 7 and 1016 more')
    """
    named = ", ".join(map(str, ranks[:_NAMED]))
    return f"{named} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else named


def describe_difference(what: str, words: Sequence[tuple[int, str]]) -> str:
    """Formats an error with one line for each rank. If there are many, equal ranks share a line.

    Example:
        >>> print(describe_difference("Ranks called different collectives.", [(0, "a"), (1, "b")]).partition("Hint")[0])
        Ranks called different collectives.
          rank 0: a
          rank 1: b
        <BLANKLINE>
    """
    lines = [f"  rank {rank}: {word}" for rank, word in words]
    if len(words) > _NAMED:
        alike: dict[str, list[int]] = {}
        for rank, word in words:
            alike.setdefault(word, []).append(rank)
        lines = [f"  rank{'s' * (len(ranks) > 1)} {some_of(ranks)}: {word}" for word, ranks in alike.items()]
    return message("\n".join([what, *lines]), SAME_CALLS, code="TFREP-E019")


Lines = Sequence[tuple[str, str]]
"""For each line of a program: a text that must be equal on all ranks, and a description for the error."""

OF_RANK, OF_HUB = ("program compared", "program wanted"), ("program", "program lines", "called")

_Key = tuple[Group, int | tuple[int, str, int]]
_HangLines = Annotated[list[Annotated[str, Field(max_length=LONGEST_LINE)]], Field(max_length=MOST_LINES)]


class State(NamedTuple):
    """The state of a rank, which it tells the hub from time to time.

    Attributes:
        busy: Seconds that it has been in a call; None if it is in none.
        idle: Seconds since its last call ended.
        where: Where it is.
    """

    busy: float | None
    idle: float
    where: Whereabouts | None = None


RANK = Schema({"rank": tuple[int]})
"""The first message to the hub."""
TO_HUB = Schema(
    {
        "report": tuple[Report],
        "state": State,
        "where": tuple[Whereabouts],
        "late": tuple[bool],
        "ended": tuple[bool, str | None],
        "frozen": tuple[int, str, Whereabouts | None],
        "program": tuple[str, str],
        "program lines": tuple[str, list[tuple[str, str]]],
        "called": tuple[str, tuple[str, str]],
    }
)
TO_RANKS = Schema(
    {
        "agreed": tuple[_Key],
        "refused": tuple[_Key, str],
        "desync": tuple[str],
        "where": tuple[()],
        "hang": tuple[_HangLines],
        "silent": tuple[dict[int, float]],
        "ended": tuple[list[tuple[int, bool, str | None] | tuple[int, bool, str | None, _HangLines]]],
        "frozen": tuple[int, str, Whereabouts | None],
        "program compared": tuple[str],
        "program wanted": tuple[str],
    }
)

_KEPT = 1000
"""The largest number of recorded calls of functions. A rank cannot be further ahead, because it waits in a collective."""


class OwnPrograms:
    """The programs of a rank.

    Args:
        send: Sends a message to the hub.
        news: Is notified of messages from the hub.
        desync: Returns the error that the hub has reported, if any.
        is_there: Returns whether a thread listens to the hub.
        limit: The seconds that a rank waits for the hub.
    """

    def __init__(
        self, send: Callable[[Any], None], news: Any, desync: Callable[[], str | None], is_there: Callable[[], bool], limit: float
    ) -> None:
        self._send, self._news, self._desync, self._is_there, self._limit = send, news, desync, is_there, limit
        self._lines: dict[str, Callable[[], Lines]] = {}
        self._compared: set[str] = set()
        self._calls: Counter[str] = Counter()

    def compare(self, name: str, digest: bytes, lines: Callable[[], Lines]) -> None:
        """Compares a program with programs of other ranks under the same name.

        Args:
            name: Its name, equal on all ranks.
            digest: A digest that is equal for equal programs.
            lines: Returns the program; called if the digests differ.

        Raises:
            DesyncError: The programs differ.
        """
        self._lines[name], began = lines, time.monotonic()
        self._send((OF_HUB[0], name, digest.hex()))
        with self._news:
            while not self._news.wait_for(lambda: name in self._compared or self._desync() or not self._is_there(), 1.0):
                if time.monotonic() - began > self._limit:
                    return
        if error := self._desync():
            raise DesyncError(error)

    def note_call(self, group: str, what: str, line: str) -> None:
        """Reports a function that this rank calls now. If another rank calls a different one, all soon get an error.

        Args:
            group: The ranks that call it.
            what: The function and its shapes.
            line: The line of the call.
        """
        self._calls[group] += 1
        self._send(("called", f"call {self._calls[group]} of {group}", (what, line)))

    def hear(self, kind: str, name: str) -> None:
        """Handles a message of the hub."""
        if kind == OF_RANK[0]:
            self._compared.add(name)
        else:
            self._send((OF_HUB[1], name, self._lines[name]()))


class Programs:
    """The programs of all ranks that have been reported to the hub.

    Args:
        tell: Sends a message to some ranks, or to all.
    """

    def __init__(self, tell: Callable[[Any, Sequence[int] | None], None]) -> None:
        self._tell = tell
        self._first: dict[str, tuple[int, str]] = {}
        self._lines: dict[str, dict[int, Lines]] = {}
        self._calls: dict[str, tuple[int, tuple[str, str]]] = {}

    def hear(self, rank: int, kind: str, name: str, what: Any) -> None:
        """Handles a message of a rank."""
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
        lines = self._lines.get(name, {})  # Lines for which the hub has not asked change nothing.
        lines[rank] = what
        if len(lines) == 2:
            self._tell(("desync", _difference(lines)), None)

    def forget(self, rank: int) -> None:
        """Forgets the programs of a rank that has ended, because it cannot send their lines."""
        self._first = {name: first for name, first in self._first.items() if first[0] != rank}


def _difference(of_ranks: dict[int, Lines]) -> str:
    (first, one), (second, other) = sorted(of_ranks.items())

    def only(lines: Lines, others: Lines) -> str:
        more = Counter(text for text, _ in lines) - Counter(text for text, _ in others)
        known = {line for _, line in others}
        found = [line for text, line in lines if more[text]]
        return min(found, key=lambda line: line in known) if found else "nothing that others have not"

    words = [f"  rank {first}: {only(one, other)}", f"  rank {second}: {only(other, one)}"]
    hint = (
        "all ranks have to run the same step. Look for what differs between them, such as the rank, the time, or numbers that"
        " Python draws while the step is traced."
    )
    what = f"Ranks {some_of(sorted(of_ranks))} have different steps. What only one of them has is"
    return message("\n".join([what, *words]), hint=hint, code="TFREP-E019")
