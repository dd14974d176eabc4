"""What is refused before a collective starts, in words that say which replica passed what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.collectives.replicas import replica_id
from tfrep_strategy.communicators import REDUCE_OPS
from tfrep_strategy.errors import ConfigurationError, DesyncError, message
from tfrep_strategy.strategies.groups import ReplicaGroup


class Call(NamedTuple):
    """What a replica calls; all replicas have to call the same.

    Attributes:
        kind: Name of the collective.
        options: What else it was given, such as `op`.
        structure: The nest, with each tensor as its dtype and static shape.
    """

    kind: str
    options: tuple[tuple[str, Any], ...]
    structure: str

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{self.kind}({self.structure}{options})"


def describe(kind: str, options: dict[str, Any], nest: Any, tensors: Sequence[tf.Tensor]) -> Call:
    """Describes what a replica is about to call."""
    leaves = [_Leaf(f"{t.dtype.name}{t.shape.as_list()}") for t in tensors]
    return Call(kind, tuple(options.items()), str(tf.nest.pack_sequence_as(nest, leaves)))


class _Leaf(str):
    def __repr__(self) -> str:
        return str(self)


def to_tensor(kind: str, leaf: Any) -> tf.Tensor:
    """Converts what a replica brings, or says why it cannot be sent."""
    try:
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError("sparse and ragged tensors are not taken; pass their parts")
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            message(f"{kind} on replica {replica_id()}: something is no tensor ({error}).", type=type(leaf).__name__)
        ) from None
    if tensor.shape.rank is None or tensor.dtype in (tf.resource, tf.variant):
        raise ConfigurationError(
            message(
                f"{kind} on replica {replica_id()}: a tensor of a dtype or a shape that cannot be sent.",
                hint="set the number of dimensions by tf.ensure_shape.",
                dtype=tensor.dtype.name,
                shape=str(tensor.shape),
            )
        )
    return tensor


def check_equal(calls: Sequence[tuple[int, Call, list[tf.Tensor]]]) -> None:
    """Refuses replicas that call different collectives, or bring what does not fit together.

    Args:
        calls: Each replica's number, what it is about to call, and with which tensors.

    Raises:
        DesyncError: says which replica passed what.
    """
    first, call, tensors = calls[0]
    for replica, other, other_tensors in calls[1:]:
        same = call[:2] == other[:2] and _skeleton(call.structure) == _skeleton(other.structure)
        if not same or not all(_fit(call, a, b) for a, b in zip(tensors, other_tensors, strict=True)):
            raise DesyncError(
                f"Replicas {first} and {replica} do not fit together.\n"
                f"Replica {first} called {call}\nReplica {replica} called {other}"
            )


def _fit(call: Call, a: tf.Tensor, b: tf.Tensor) -> bool:
    if a.shape.rank != b.shape.rank or a.dtype != b.dtype:
        return False
    options = dict(call.options)
    free = 0 if call.kind == "all_to_all" else None
    if call.kind == "all_gather" and not options["stack"]:
        free = options["axis"] % a.shape.rank
    pairs = zip(a.shape.as_list(), b.shape.as_list(), strict=True)
    return all(i == free or None in (m, n) or m == n for i, (m, n) in enumerate(pairs))


def _skeleton(structure: str) -> str:
    """The structure without dtypes and shapes, which `_fit` compares."""
    return re.sub(r"\w+\[[\dNone, ]*\]", "", structure)


def check_op(op: str, tensor: tf.Tensor) -> None:
    """Refuses a reduction that is unknown, or that a dtype cannot do."""
    if op not in REDUCE_OPS:
        raise ConfigurationError(message("Unknown reduction.", hint=f"use one of {REDUCE_OPS}.", op=op))
    dtype = tensor.dtype
    allowed: Sequence[str] = REDUCE_OPS
    if dtype == tf.string or dtype.is_quantized:
        allowed = ()
    elif dtype.is_bool:
        allowed = ("min", "max")
    elif dtype.is_complex:
        allowed = ("sum", "mean", "product")
    if op not in allowed:
        hint = f"it can do {', '.join(allowed)}." if allowed else "all_gather moves tensors of any dtype."
        raise ConfigurationError(message("The dtype cannot do that.", hint=hint, op=op, dtype=dtype.name))


def check_rows(kind: str, tensor: tf.Tensor) -> None:
    """Refuses a scalar."""
    if tensor.shape.rank == 0:
        raise ConfigurationError(message(f"{kind} needs tensors that have rows.", shape=tensor.shape))


def check_source(source: int, group: ReplicaGroup | None, size: int) -> int:
    """Returns the place of the source among `size` communicating replicas, or refuses one that does not exist."""
    members = list(range(size)) if group is None else list(group.replicas)
    if isinstance(source, bool) or source not in members:
        raise ConfigurationError(
            message(f"broadcast on replica {replica_id()}: no such source.", hint=f"use one of {members}.", source=source)
        )
    return members.index(source) if size > 1 else 0  # An outsider of the group keeps its own.
