"""What tells whether the ranks of a run have made the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.peers.reports import user_line
from tfrep_strategy.partitioner.program import Collective, Program, live

_OF_PROCESS = frozenset({"container", "debug_name", "shared_name", "token"})
"""Attributes that name something of a process."""


class _Line(NamedTuple):
    """A node of a program: what must be equal on all ranks, and the node.

    Attributes:
        text: Of the operation, its attributes and constants.
        wired: Of that, and of all that it is computed from.
        node: The node.
    """

    text: str
    wired: str
    node: Any


def digest(program: Program) -> bytes:
    """Returns what is equal for programs that compute the same, in whatever order they were traced."""
    found = hashlib.sha256()
    for wired in sorted(line.wired for line in _lines(program)):
        found.update(wired.encode() + b"\n")
    return found.digest()


def lines(program: Program) -> list[tuple[str, str]]:
    """Returns for each node of a program what must be equal on all ranks, and what to tell of it where it is not.

    What a program consists of comes first, then what each of it is computed from, in the order of the program.
    """
    consists, computed, whose = [], [], ""  # What has no line of its own was added for what comes after it.
    for text, wired, node in reversed(list(_lines(program))):
        told, traced = _told(node), getattr(node, "traced", None)
        if traced is not None:
            whose = line_of(traced)
            told += f" at {whose}"
        elif whose:
            told += f", for {whose}"
        consists.append((text, told))
        computed.append((wired, f"{told}, of other inputs"))
    return sorted(consists, key=lambda line: line[1]) + computed[::-1]


def line_of(operation: Any) -> str:
    """Returns the line of the user's program that has made an operation of a trace."""
    return user_line((frame.filename, frame.lineno) for frame in reversed(operation.traceback))


def _lines(program: Program, inside: str = "") -> Iterator[_Line]:
    """Yields what a program consists of. TensorFlow may trace parts of it in another order in each process."""
    wired: dict[int, str] = {}
    for node in live(program.nodes, program.results):
        text = f"{inside}{node.kind} {node.axis}" if isinstance(node, Collective) else f"{inside}{node.type} {_attributes(node)}"
        given = [f"{wired[id(x.node)]} {_place(x)}" if x.node else f"{x.dtype} {x.shape}" for x in node.inputs]
        if getattr(node, "type", None) == "AddN":
            given.sort()
        waits = sorted(wired[id(x)] for x in node.control_inputs if id(x) in wired)
        bodies: list[str] = []
        for name, body in getattr(node, "bodies", ()):
            found = list(_lines(body, f"{inside}{name} "))
            bodies += sorted(line.wired for line in found)
            yield from found
        wired[id(node)] = hashlib.sha256("\n".join([text, *given, "after", *waits, *bodies]).encode()).hexdigest()
        yield _Line(text, wired[id(node)], node)


def _place(tensor: Any) -> int:
    """Returns which output of its node a tensor is. Its name counts all nodes of the process."""
    return next(place for place, each in enumerate(tensor.node.outputs) if each is tensor)


def _attributes(node: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(node.attributes.items()):
        if name not in _OF_PROCESS and value.WhichOneof("value") != "func" and not value.list.func:
            found.update(name.encode() + value.SerializeToString(deterministic=True))
    return found.hexdigest()


def _told(node: Any) -> str:
    if node is None:
        return "the end of the step"
    if isinstance(node, Collective):
        return f"a {node.kind} between replicas"
    if node.type != "Const":
        return str(node.type)
    value = tf.make_ndarray(node.attributes["value"].tensor)
    return f"the constant {np.array2string(value, threshold=8, edgeitems=2, separator=', ')}"
