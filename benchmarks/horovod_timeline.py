"""Reads the timeline that Horovod writes (`HOROVOD_TIMELINE`): what it does with the tensors of a step."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_COUNTED_STEPS = 10
"""The last steps of a run, which count."""
_COPIES = ("MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER")


class Activity(NamedTuple):
    """What Horovod did with a tensor, from when to when in microseconds."""

    tensor: int
    name: str
    begin: float
    end: float


def phases(timeline: Path, steps: int) -> dict[str, float]:
    """Returns medians over the last steps of a run, in milliseconds.

    Args:
        timeline: What rank 0 has written.
        steps: How many steps there were, at least ten. Tensors that travelled less often belong to none.

    Returns:
        "all": from when rank 0 hears of a step's first tensor until the last one has been reduced. "negotiation": while a tensor
        waits for the other rank, and for both to hear of it; "copies": into and out of Horovod's buffer; "sending": while a
        tensor is reduced. Times in which several tensors do the same count once.
    """
    by_tensor: dict[int, dict[str, list[Activity]]] = defaultdict(lambda: defaultdict(list))
    for each in activities(timeline):
        by_tensor[each.tensor][each.name].append(each)
    last: list[list[Activity]] = [[] for _ in range(_COUNTED_STEPS)]
    for by_name in by_tensor.values():
        for found in by_name.values():
            if len(found) >= steps:
                for step, each in zip(last, found[-_COUNTED_STEPS:], strict=True):
                    step.append(each)

    def median_ms(kind: str) -> float:
        return statistics.median(_covered(each for each in step if _kind(each.name) == kind) for step in last) / 1000

    whole = statistics.median(max(each.end for each in step) - min(each.begin for each in step) for step in last) / 1000
    return {"all": whole, **{kind: median_ms(kind) for kind in ("negotiation", "copies", "sending")}}


def activities(timeline: Path) -> list[Activity]:
    """Returns what Horovod did with each tensor, in the order in which it ended."""
    text = timeline.read_text("utf-8").rstrip().rstrip(",]")
    open_ones: dict[int, list[tuple[str, float]]] = defaultdict(list)
    found = []
    for event in json.loads(f"{text}]"):
        if event["ph"] == "B":
            open_ones[event["pid"]].append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            found.append(Activity(event["pid"], *open_ones[event["pid"]].pop(), event["ts"]))
    return found


def _kind(name: str) -> str:
    if name.startswith("NEGOTIATE"):
        return "negotiation"
    if name in _COPIES:
        return "copies"
    return "sending" if "_" in name else "whole"  # GLOO_ALLREDUCE is a part of ALLREDUCE.


def _covered(activities: Iterable[Activity]) -> float:
    """Returns for how many microseconds at least one of them lasts."""
    covered, reached = 0.0, float("-inf")
    for each in sorted(activities, key=lambda each: each.begin):
        covered += max(0.0, each.end - max(each.begin, reached))
        reached = max(reached, each.end)
    return covered
