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
    return f"{_graph_name(graph)}.{_next(graph, kind)}"


def _graph_name(graph: Any) -> str:
    if graph not in _graph_names:
        own = re.sub(r"(_\d+)+$", "", getattr(graph, "name", None) or "graph")
        outer = getattr(graph, "outer_graph", None)
        inside_function = outer is not None and getattr(outer, "building_function", False)
        _graph_names[graph] = f"{_graph_name(outer)}/{_next(outer, own)}" if inside_function else own
    return _graph_names[graph]


def _next(graph: Any, kind: str) -> str:
    counts = _ordinals.setdefault(graph, {})
    counts[kind] = counts.get(kind, -1) + 1
    return f"{kind}{counts[kind]}"
