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
    """A node of a program: what must be equal on all ranks, and the node."""

    text: str
    node: Any


def digest(program: Program) -> bytes:
    """Returns what is equal for programs that consist of the same operations and constants, however these are connected."""
    found = hashlib.sha256()
    for text in sorted(line.text for line in _lines(program)):
        found.update(text.encode() + b"\n")
    return found.digest()


def lines(program: Program) -> list[tuple[str, str]]:
    """Returns for each node of a program what must be equal on all ranks, and what to tell of it where it is not."""
    found, whose = [], ""  # What has no line of its own was added for what comes after it.
    for text, node in reversed(list(_lines(program))):
        told, traced = _told(node), getattr(node, "traced", None)
        if traced is not None:
            whose = line_of(traced)
            told += f" at {whose}"
        elif whose:
            told += f", for {whose}"
        found.append((text, told))
    return sorted(found)


def line_of(operation: Any) -> str:
    """Returns the line of the user's program that has made an operation of a trace."""
    return user_line((frame.filename, frame.lineno) for frame in reversed(operation.traceback))


def _lines(program: Program, inside: str = "") -> Iterator[_Line]:
    """Yields what a program consists of. TensorFlow may trace parts of it in another order in each process."""
    for node in live(program.nodes, program.results):
        if isinstance(node, Collective):
            yield _Line(f"{inside}{node.kind} {node.axis}", node)
            continue
        yield _Line(f"{inside}{node.type} {_attributes(node)}", node)
        for name, body in node.bodies:
            yield from _lines(body, f"{inside}{name} ")


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
