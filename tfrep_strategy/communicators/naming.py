"""Names for collectives that depend on the structure of the program only.

Transports match the collectives of different ranks by name. A counter would fail: a rank whose last batch has another
shape retraces a `tf.function` that the others do not retrace, and counts differently from then on.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import tensorflow as tf

_ordinals: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_graph_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def structural_name(kind: str) -> str:
    """Names the collective that is about to be called.

    Args:
        kind: The kind of the collective, such as `"all_reduce"`.

    Returns:
        The path of nested functions and branches around the call, and how many calls of its kind came before it there.
        An eager call needs its kind only, since eager calls happen one after the other.
    """
    if tf.executing_eagerly():
        return f"eager.{kind}"
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph)}.{kind}{_next(graph, kind)}"


def replica_name(kind: str, replica: int) -> str:
    """Names a collective of one of several replicas that build their operations in one graph.

    Args:
        kind: The kind of the collective, such as `"all_reduce"`.
        replica: The replica that builds the operation. The functions and branches of each replica are counted separately.
            The id is not part of the name, since the name must be equal on all replicas.

    Returns:
        The same kind of name as from `structural_name`.
    """
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph, replica)}.{kind}{_next(graph, f'{replica}.{kind}')}"


def in_nested_graph() -> bool:
    """Returns whether the call is in a function or branch inside another function. It may run several times per step."""
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not tf.executing_eagerly() and getattr(outer, "building_function", False)


def _graph_name(graph: Any, replica: int | None = None) -> str:
    if graph not in _graph_names:
        # TensorFlow numbers the functions of a process, and ranks may have built different numbers of functions.
        own = re.sub(r"_\d+", "", getattr(graph, "name", None) or "graph")
        own = re.sub(r"^_|[^A-Za-z0-9_.]", ".", own)  # An operation may not be called `<lambda>` or `_step`.
        outer = getattr(graph, "outer_graph", None)
        if not getattr(outer, "building_function", False):
            _graph_names[graph] = own
        elif replica is None:
            _graph_names[graph] = f"{_graph_name(outer)}/{own}{_next(outer, own)}"
        else:  # TensorFlow's names of branches contain the replica and a count of branches, so they are not used.
            _graph_names[graph] = f"{_graph_name(outer, replica)}/{_next(outer, f'{replica}.graph')}"
    return _graph_names[graph]


def _next(graph: Any, label: str) -> int:
    counts = _ordinals.setdefault(graph, {})
    counts[label] = counts.get(label, -1) + 1
    return counts[label]
