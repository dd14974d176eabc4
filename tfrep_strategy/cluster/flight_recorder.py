"""The flight recorder: the last collectives of this process, and where it is now, for the report of a hang.

Each rank records its collectives in memory. When ranks hang, each writes its record to a file, and rank 0 writes `hang.json`, from
which `tfrep doctor --hang` makes a table. A launcher or watcher reads the state of a stopped rank from its signs of life.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from tfrep_strategy.core.calls import Call, line_of_main_thread, lines_of_other_threads

KEPT = 1000
"""The number of collectives that are kept."""
VARIABLE = "TFREP_HANG_DIR"
"""The variable with the folder for the files of a hang. `tfrep run` sets it to the folder of the logs."""
FILE = "hang.json"
FLIGHTS = "flight*.json"
_MOST_THREADS = 3
_NAMED = 8
"""The number of ranks that a report lists one by one."""
_MOST_SHOWN = 1_000
LONGEST_LINE, MOST_LINES = 4_000, _MOST_SHOWN + 3
"""The longest line of a report in characters, and the most lines that it has."""
_LONGEST, _MOST_INSIDE, _MOST_GROUPS = 1_000, 8, 1_000
"""The most that a rank says of where it is: the characters of a text, the collectives that it is in, the groups that it counts."""

_Text = Annotated[str, Field(max_length=_LONGEST)]


@dataclass(frozen=True)
class Collective:
    """A collective of this process.

    Attributes:
        group: The ranks that take part, such as `"0-3"`.
        number: Its number among the collectives of these ranks, from 1. For one that TensorFlow runs itself: how often
            the collective at this place has begun.
        call: What was called, with dtypes and shapes, such as `"all_reduce(float32[3], sum)"`.
        line: The line of the user's program that called it, or that called it when its function was traced.
        state: `"entered"` or `"done"`.
        time: When it began, in seconds since 1970. For one that TensorFlow runs itself: when its end was noticed, or None.
        seconds: How long it took, or has taken until now. None if that is unknown.
    """

    group: _Text
    number: int
    call: _Text
    line: _Text
    state: _Text
    time: float | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.call}, number {self.number} of ranks {self.group}, at {self.line}"

    def short(self) -> Collective:
        """Returns it with texts that are short enough for a message."""
        return replace(self, call=_cut(self.call), line=_cut(self.line))


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is. Ranks send it to each other.

    Attributes:
        python: The line of its main thread.
        threads: The lines of other threads that run the user's code.
        now: The collectives that it is in.
        last: Its last collective.
        idle: Seconds since its last collective ended, if it is in none.
        calls: How many calls of functions with collectives, such as steps, have begun.
        in_call: Whether it is in such a call.
        counts: How many collectives it has begun, for each group.
    """

    python: _Text = "an unknown line"
    threads: Annotated[Sequence[_Text], Field(max_length=_MOST_THREADS)] = ()
    now: Annotated[Sequence[Collective], Field(max_length=_MOST_INSIDE)] = ()
    last: Collective | None = None
    idle: float | None = None
    calls: int = 0
    in_call: bool = False
    counts: Annotated[Mapping[_Text, int], Field(max_length=_MOST_GROUPS)] = field(default_factory=dict)

    @classmethod
    def of_json(cls, read: Mapping[str, Any]) -> Whereabouts:
        """Makes one of what `dataclasses.asdict` gave.

        Args:
            read: The fields.

        Example:
            >>> Whereabouts.of_json(asdict(Whereabouts("train.py:3 in main"))).python
            'train.py:3 in main'
        """
        last = read["last"] and Collective(**read["last"])
        return cls(**{**read, "now": [Collective(**each) for each in read["now"]], "last": last})

    def describe(self) -> str:
        """Describes it in one line, worded to follow "rank 1: ".

        Example:
            >>> Whereabouts("train.py:3 in main", idle=6.2).describe()
            'in no collective for 6 s; Python is at train.py:3 in main'
        """
        if self.now:
            where = " and in ".join(f"{each}{_for(each.seconds)}" for each in self.now)
            found = f"in {where}"
        else:
            found = f"in call {self.calls} of a function, in no collective that is known" if self.in_call else "in no collective"
            found += _for(None if self.in_call else self.idle)
            found += f", after {self.last}" if self.last else ""
        found += f"; Python is at {self.python}"
        return found + (f"; another thread is at {', at '.join(self.threads)}" if self.threads else "")

    def short(self) -> Whereabouts:
        """Returns it within the limits of a message: long texts are cut, and the longest collectives are kept.

        Example:
            >>> len(Whereabouts("f" * 5000).short().python)
            1000
        """
        now = sorted(self.now, key=lambda each: -(each.seconds or 0.0))[:_MOST_INSIDE]
        first = {each.group for each in now}
        counts = sorted(self.counts.items(), key=lambda each: each[0] not in first)[:_MOST_GROUPS]
        return replace(
            self,
            python=_cut(self.python),
            threads=[_cut(each) for each in self.threads[:_MOST_THREADS]],
            now=[each.short() for each in now],
            last=self.last and self.last.short(),
            counts=dict(counts),
        )


def _cut(text: str, longest: int = _LONGEST) -> str:
    """Leaves out the middle of a long text: a call begins with its kind, and a path ends with its file and line."""
    half = longest // 2 - 2
    return text if len(text) <= longest else f"{text[:half]}... {text[-half:]}"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:.0f} s"


class _Entry:
    """A collective that Python runs. Its text is made when it is asked for."""

    __slots__ = ("began", "call", "ended", "group", "number", "time")

    def __init__(self, group: Sequence[int], number: int, call: Call) -> None:
        self.group, self.number, self.call = group, number, call
        self.time, self.began, self.ended = time.time(), time.monotonic(), 0.0

    def told(self, now: float) -> Collective:
        state = "done" if self.ended else "entered"
        seconds = round((self.ended or now) - self.began, 6)
        return Collective(name_of(self.group), self.number, self.call.what, self.call.line, state, round(self.time, 3), seconds)


def _end(collective: Collective) -> float:
    return (collective.time or 0.0) + (collective.seconds or 0.0)


class Recorder:
    """Records the collectives of a process.

    Attributes:
        places: Functions that tell of collectives that TensorFlow runs itself: the group, how many have begun, and those known.
        calls: The number of calls of functions with collectives.
        in_call: Whether such a call runs.

    Example:
        >>> recorder = Recorder()
        >>> with recorder.collective(range(2), Call("barrier", "", (), "train.py:3")):
        ...     print(recorder.whereabouts().now[0])
        barrier(), number 1 of ranks 0-1, at train.py:3
    """

    def __init__(self) -> None:
        self._kept: collections.deque[_Entry] = collections.deque(maxlen=KEPT)
        self._numbers: dict[Sequence[int], itertools.count[int]] = {}
        self._counts: dict[Sequence[int], int] = {}
        self._began = time.time()
        self.places: list[Callable[[], tuple[Sequence[int], int, list[Collective]]]] = []
        self.calls = 0
        self.in_call = False

    def enter(self, group: Sequence[int], call: Call) -> _Entry:
        """Records the begin of a collective. `leave` records its end.

        Args:
            group: The ranks that take part.
            call: The collective.
        """
        numbers = self._numbers.get(group)
        if numbers is None:
            numbers = self._numbers.setdefault(group, itertools.count(1))
        number = self._counts[group] = next(numbers)
        entry = _Entry(group, number, call)
        self._kept.append(entry)
        return entry

    def leave(self, entry: _Entry) -> None:
        """Records the end of a collective."""
        entry.ended = time.monotonic()

    @contextlib.contextmanager
    def collective(self, group: Sequence[int], call: Call) -> Any:
        """Records a collective that the body runs.

        Args:
            group: The ranks that take part.
            call: The collective.
        """
        entry = self.enter(group, call)
        try:
            yield
        finally:
            self.leave(entry)

    def longest(self) -> float:
        """Returns how many seconds this process has been in a collective that Python runs; 0 if it is in none."""
        now = time.monotonic()
        return max((now - each.began for each in list(self._kept) if not each.ended), default=0.0)

    def collectives(self) -> list[Collective]:
        """Returns the collectives that TensorFlow runs itself, one for each place, and then the last ones of others."""
        now = time.monotonic()
        _, of_places = self._of_places()
        return [*of_places, *(each.told(now) for each in list(self._kept))]

    def whereabouts(self) -> Whereabouts:
        """Returns where this process is."""
        now, kept = time.monotonic(), list(self._kept)
        counts, of_places = self._of_places()
        for group, count in list(self._counts.items()):
            counts[name_of(group)] = counts.get(name_of(group), 0) + count
        inside = [each.told(now) for each in kept if not each.ended] + [each for each in of_places if each.state == "entered"]
        newest = [each.told(now) for each in itertools.islice((each for each in reversed(kept) if each.ended), 1)]
        ended = [each for each in of_places if each.state == "done"] + newest
        last = max(ended, key=_end, default=None)
        idle = None if inside else round(time.time() - (_end(last) if last else self._began), 3)
        threads = lines_of_other_threads()
        return Whereabouts(line_of_main_thread(), threads, inside, last, idle, self.calls, self.in_call, counts).short()

    def _of_places(self) -> tuple[dict[str, int], list[Collective]]:
        counts: dict[str, int] = {}
        found = []
        for place in list(self.places):
            group, begun, known = place()
            counts[name_of(group)] = counts.get(name_of(group), 0) + begun
            found += known
        return counts, found

    def write(self, rank: int) -> None:
        """Writes the record to the folder of `TFREP_HANG_DIR`, if it is set. A full disk costs the file, and nothing else.

        Args:
            rank: The rank of this process.

        Example:
            >>> os.environ["TFREP_HANG_DIR"] = "."
            >>> Recorder().write(3)
            >>> Path("flight3.json").exists()
            True
        """
        if (folder := folder_of_hangs()) is not None:
            told = {"rank": rank, "where": asdict(self.whereabouts()), "collectives": [asdict(each) for each in self.collectives()]}
            _write(folder / f"flight{rank}.json", told)


RECORDER = Recorder()
"""The record of this process."""


def flight_recorder() -> list[Collective]:
    """Returns the last collectives of this process: up to 1,000, the oldest first.

    Collectives that TensorFlow runs itself, in a `tf.function` over TensorFlow's own transport or Horovod, come first. Of these the
    recorder knows how often each place in the program has begun one, and whether it runs now.

    When a rank waits longer than `TFREP_TIMEOUT`, the error lists where all ranks are, and each rank writes its record beside the
    logs. `tfrep doctor --hang FOLDER` shows them.

    Returns:
        The collectives, each with its number, its dtypes and shapes, the line of the program, its state and its time.

    Example:
        >>> [str(each) for each in tfrep.flight_recorder()][-1:]
        []
    """
    return RECORDER.collectives()


def name_of(group: Sequence[int]) -> str:
    """Names the ranks of a group.

    Example:
        >>> name_of(range(4)), name_of((0, 2))
        ('0-3', '0, 2')
    """
    if isinstance(group, range) and len(group) > 1:
        return f"{group[0]}-{group[-1]}"
    named = ", ".join(map(str, group[:_NAMED]))
    return f"{named} and {len(group) - _NAMED} more" if len(group) > _NAMED else named


# The report of all ranks.


@dataclass(frozen=True)
class Hang:
    """The report of a hang.

    Attributes:
        what: What happened.
        ranks: Where each rank is, in words.
        lags: The first rank that lags, if one does.
        time: When it was noticed, in seconds since 1970.
    """

    what: str
    ranks: Mapping[int, str]
    lags: int | None
    time: float

    def lines(self) -> list[str]:
        """Returns a line for each rank, or for ranks that are alike if there are many, and one that says which rank lags.

        Example:
            >>> print("\\n".join(Hang("", {0: "in barrier()", 1: "in no collective"}, 1, 0.0).lines()))
              rank 0: in barrier()
              rank 1: in no collective
            The first rank that lags is rank 1.
        """
        alike: dict[str, list[int]] = {}
        for rank, word in self.ranks.items():
            alike.setdefault(word if len(self.ranks) > _NAMED else f"{rank}: {word}", []).append(rank)
        if len(alike) > _MOST_SHOWN:  # Of thousands of ranks the first are enough; `hang.json` has all.
            shown = {key for key, ranks in alike.items() if self.lags in ranks}.union(list(alike)[: _MOST_SHOWN - 1])
            alike = {key: alike[key] for key in alike if key in shown}
        lines = [f"  rank{'s' * (len(ranks) > 1)} {name_of(ranks)}: {self.ranks[ranks[0]]}" for ranks in alike.values()]
        left = len(self.ranks) - sum(map(len, alike.values()))
        lines += [f"  and {left} more ranks"] if left else []
        return [_cut(each, LONGEST_LINE) for each in [*lines, self.last_line]]

    @property
    def last_line(self) -> str:
        """The sentence that says which rank lags."""
        if self.lags is None:
            return "No rank lags: all are in a collective, of which they have called equally many."
        return f"The first rank that lags is rank {self.lags}."

    def write(self, folder: Path | None) -> None:
        """Writes `hang.json` to a folder, if there is one.

        Example:
            >>> Hang("Rank 1 is stopped.", {1: "silent"}, 1, 0.0).write(Path())
            >>> read_hang(Path()).what
            'Rank 1 is stopped.'
        """
        if folder is not None:
            _write(folder / FILE, asdict(self))


def hang_of(what: str, known: Mapping[int, Whereabouts | None], silent: Mapping[int, str]) -> Hang:
    """Makes the report of a hang.

    Args:
        what: What happened.
        known: Where each rank is, or was last; None if that is unknown.
        silent: For each rank that does not answer, what is seen of it. The first one lags.

    Returns:
        The report. If no rank is silent, the first that lags has begun the fewest of the longest collective's group.

    Example:
        >>> hang_of("They wait.", {0: Whereabouts(counts={"0-1": 3}), 1: Whereabouts(counts={"0-1": 2})}, {}).lags
        1
    """
    words = {}
    for rank, where in known.items():
        words[rank] = where.describe() if where else "not known"
        if rank in silent:
            words[rank] = f"{silent[rank]}" + (f"; before that {where.describe()}" if where else "")
    return Hang(what, words, _first_that_lags(known, silent), time.time())


def _first_that_lags(known: Mapping[int, Whereabouts | None], silent: Iterable[int]) -> int | None:
    if (first := next(iter(silent), None)) is not None:
        return first
    there = {rank: where for rank, where in known.items() if where is not None}
    waiting = [(each.seconds or 0.0, each.group) for where in there.values() for each in where.now]
    group = max(waiting)[1] if waiting else max((len(name), name) for where in there.values() for name in ("", *where.counts))[1]
    # One that has begun fewer lags. Of those that have begun equally many: one that is in none, and calls no function.
    marks = {
        rank: (where.counts[group], any(each.group == group for each in where.now), where.in_call)
        for rank, where in there.items()
        if group in where.counts
    }
    return min(marks, key=lambda rank: (marks[rank], rank)) if len(set(marks.values())) > 1 else None


def folder_of_hangs() -> Path | None:
    """Returns the folder for the files of a hang, from `TFREP_HANG_DIR`; None if it is not set.

    Example:
        >>> folder_of_hangs() is None
        True
    """
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def read_hang(folder: Path) -> Hang | None:
    """Reads the report of a hang; None if the folder has none.

    Args:
        folder: The folder of the logs.

    Example:
        >>> read_hang(Path()) is None
        True
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        read = json.loads((folder / FILE).read_text("utf-8"))
        return Hang(read["what"], {int(rank): word for rank, word in read["ranks"].items()}, read["lags"], read["time"])
    return None


class Flight(NamedTuple):
    """The record that a rank has written.

    Attributes:
        where: Where the rank was.
        collectives: Its last collectives, the newest last.
    """

    where: Whereabouts
    collectives: Sequence[Collective]


def read_flights(folder: Path) -> dict[int, Flight]:
    """Reads the records that ranks have written when they hung, by rank.

    Args:
        folder: The folder of the logs.

    Example:
        >>> read_flights(Path())
        {}
    """
    found = {}
    for path in folder.glob(FLIGHTS):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # A full disk has cut it.
            read = json.loads(path.read_text("utf-8"))
            found[int(read["rank"])] = Flight(
                Whereabouts.of_json(read["where"]), [Collective(**each) for each in read["collectives"]]
            )
    return dict(sorted(found.items()))


def _write(path: Path, told: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # The report is in the messages of the ranks, too.
        whole = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        whole.write_text(json.dumps(told, indent=1), "utf-8")
        os.replace(whole, path)
