"""Names for collectives that depend on the structure of the program, and on nothing else.

Transports match a collective of one rank with those of the others by its name. A counter would not do: a rank whose last
batch has another shape retraces a `tf.function` that the others do not, and from then on counts differently.
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
        kind: What it is, such as `"all_reduce"`.

    Returns:
        The path of nested functions and branches that the call stands in, and how many of its kind came before it there.
        Eager calls need no more than their kind, since they happen one after the other.
    """
    if tf.executing_eagerly():
        return f"eager.{kind}"
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph)}.{kind}{_next(graph, kind)}"


def replica_name(kind: str, replica: int) -> str:
    """Names a collective of one of several replicas whose operations are built in one graph, each by itself.

    Args:
        kind: What it is, such as `"all_reduce"`.
        replica: Whose operation it is. It does not appear in the name, which all replicas have to agree on, but each
            replica's functions and branches are counted apart.

    Returns:
        As `structural_name`.
    """
    graph = tf.compat.v1.get_default_graph()
    return f"{_graph_name(graph, replica)}.{kind}{_next(graph, f'{replica}.{kind}')}"


def in_nested_graph() -> bool:
    """Whether the call stands in a function or branch inside another function, which may run more than once per step."""
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not tf.executing_eagerly() and getattr(outer, "building_function", False)


def _graph_name(graph: Any, replica: int | None = None) -> str:
    if graph not in _graph_names:
        # TensorFlow numbers functions throughout a process, and ranks may have built a different number of them.
        own = re.sub(r"_\d+", "", getattr(graph, "name", None) or "graph")
        own = re.sub(r"^_|[^A-Za-z0-9_.]", ".", own)  # An operation may not be called `<lambda>` or `_step`.
        outer = getattr(graph, "outer_graph", None)
        if not getattr(outer, "building_function", False):
            _graph_names[graph] = own
        elif replica is None:
            _graph_names[graph] = f"{_graph_name(outer)}/{own}{_next(outer, own)}"
        else:  # The names of branches hold the replica, and how many branches the graph has so far.
            _graph_names[graph] = f"{_graph_name(outer, replica)}/{_next(outer, f'{replica}.graph')}"
    return _graph_names[graph]


def _next(graph: Any, label: str) -> int:
    counts = _ordinals.setdefault(graph, {})
    counts[label] = counts.get(label, -1) + 1
    return counts[label]
