"""Descriptions of the collectives that ranks are about to call, so that they can be compared."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfrep_strategy import errors

_FREE_ROWS = ("all_gather", "all_to_all")
_NAMED = 8
"""How many ranks a message names one by one."""


class Call(NamedTuple):
    """A collective as one rank calls it.

    Attributes:
        kind: Name of the collective.
        option: An argument that must be equal on all ranks, such as the reduction or the root.
        tensors: Dtype and shape of each tensor.
        line: File and line of the user's code.
    """

    kind: str
    option: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    line: str

    def __str__(self) -> str:
        tensors = [f"{dtype}{list(shape)}" for dtype, shape in self.tensors]
        return f"{self.kind}({', '.join([*tensors, *filter(None, [self.option])])}) at {self.line}"

    def fits(self, other: Call) -> bool:
        """Returns whether both calls can be part of one collective.

        Example:
            >>> Call("all_reduce", "sum", (("float32", (3,)),), "a.py:1").fits(
            ...     Call("all_reduce", "sum", (("float32", (4,)),), "a.py:1"))
            False
        """
        return self._agreed() == other._agreed()

    def _agreed(self) -> tuple[Any, ...]:
        free = self.kind in _FREE_ROWS
        return self.kind, self.option, tuple((dtype, shape[1:] if free else shape) for dtype, shape in self.tensors)


class Report(NamedTuple):
    """A rank's report of its next collective, or of one in a function that it has been in for some time.

    Attributes:
        group: The ranks that take part, from `group_of`.
        number: For an eager collective: how many collectives of this group the rank called before. For a collective in a
            function: the number of the group's communicator, the place in the program, and how often it has begun there.
        call: The collective.
        waits: Whether the rank waits for the others' reports before it goes on.
        is_limited: Whether a long wait is an error.
    """

    group: Sequence[int]
    number: int | tuple[int, str, int]
    call: Call
    waits: bool
    is_limited: bool = False


_OWN = tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (errors.__file__, tf.__file__, keras.__file__))
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")


def user_line(stack: Iterable[tuple[str, int]] | None = None) -> str:
    """Finds the current line of the user's program.

    Args:
        stack: File and line of each frame, the innermost first. Default: the caller's stack.

    Returns:
        The innermost frame outside TensorFlow, Keras, Python's own modules and this package, as `"file.py:12"`.
    """
    for file, line in _frames() if stack is None else stack:
        standard = file.startswith(_STANDARD) and "site-packages" not in file
        if not file.startswith((*_OWN, "<")) and not standard and "__autograph_generated" not in file:
            return f"{file}:{line}"
    return "an unknown line"


def _frames() -> Iterable[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def purpose() -> str:
    """Returns the name of this package's outermost function on the stack: the one that the user or Keras has called."""
    name, frame = "", sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN[0]):
        name = frame.f_code.co_name if frame.f_code.co_name != "replaced" else name
        frame = frame.f_back  # type: ignore[assignment]
    return name


def group_of(ranks: Sequence[int]) -> Sequence[int]:
    """Returns the ranks of a group as each report names them: as a range if possible, which is short for any number of ranks.

    Example:
        >>> group_of([0, 1, 2]), group_of([0, 2])
        (range(0, 3), (0, 2))
    """
    following = range(ranks[0], ranks[0] + len(ranks))
    return following if list(ranks) == list(following) else tuple(ranks)


def some_of(ranks: Sequence[int]) -> str:
    """Names ranks, and only the first of many.

    Example:
        >>> some_of([0, 2]), some_of(range(1024))
        ('0, 2', '0, 1, 2, 3, 4, 5, 6, 7 and 1016 more')
    """
    named = ", ".join(map(str, ranks[:_NAMED]))
    return f"{named} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else named


def describe_difference(what: str, words: Sequence[tuple[int, str]]) -> str:
    """Formats an error with one line for each rank. If there are many, those that say the same share a line.

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
    hint = "all ranks of a group have to call the same collectives in the same order, with the same dtypes and shapes."
    return "\n".join([what, *lines, f"Hint: {hint}"])
