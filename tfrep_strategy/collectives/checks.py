"""Checks the arguments of a collective before it starts; the errors name each replica and what it passed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.collectives.dtypes import gather_along
from tfrep_strategy.collectives.flow import Flow
from tfrep_strategy.collectives.replicas import replica_id
from tfrep_strategy.communicators import REDUCE_OPS, Communicator
from tfrep_strategy.errors import ConfigurationError, DesyncError, message
from tfrep_strategy.strategies.groups import ReplicaGroup


class Call(NamedTuple):
    """A collective as one replica calls it; all replicas must call the same.

    Attributes:
        kind: Name of the collective.
        options: Its other arguments, such as `op`.
        structure: The nest, with each tensor as its dtype and static shape.
        specs: Dtype and static shape of each tensor.
    """

    kind: str
    options: tuple[tuple[str, Any], ...]
    structure: str
    specs: tuple[tf.TensorSpec, ...]

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{self.kind}({self.structure}{options})"


def describe(kind: str, options: dict[str, Any], nest: Any, tensors: Sequence[tf.Tensor]) -> Call:
    """Describes the collective that a replica is about to call."""
    leaves = [_Leaf(f"{t.dtype.name}{t.shape.as_list()}") for t in tensors]
    specs = tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    return Call(kind, tuple(options.items()), str(tf.nest.pack_sequence_as(nest, leaves)), specs)


class _Leaf(str):
    def __repr__(self) -> str:
        return str(self)


def to_tensor(kind: str, leaf: Any) -> tf.Tensor:
    """Converts a leaf of a nest to a tensor; raises a ConfigurationError for one that cannot be sent."""
    try:
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError("sparse and ragged tensors are not supported; pass their parts")
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            message(
                f"{kind} on replica {replica_id()}: a leaf is not a tensor ({error}).",
                hint="pass tensors, or what tf.convert_to_tensor takes, in nests of lists, tuples and dicts.",
                type=type(leaf).__name__,
            )
        ) from None
    if tensor.shape.rank is None or tensor.dtype in (tf.resource, tf.variant):
        raise ConfigurationError(
            message(
                f"{kind} on replica {replica_id()}: a tensor has a dtype or a shape that cannot be sent.",
                hint="set the number of dimensions by tf.ensure_shape.",
                dtype=tensor.dtype.name,
                shape=str(tensor.shape),
            )
        )
    return tensor


def check_equal(calls: Sequence[tuple[int, Call]]) -> list[int]:
    """Refuses replicas that call different collectives, or pass nests that do not match.

    Args:
        calls: The id of each replica, and the call that it is about to make.

    Returns:
        The replica ids, if some dimensions are known only when the step runs and must be compared then; else nothing.

    Raises:
        DesyncError: The calls differ. The message shows both.
    """
    first, call = calls[0]
    for replica, other in calls[1:]:
        same = call[:2] == other[:2] and _skeleton(call.structure) == _skeleton(other.structure)
        if not same or not all(_fit(call, a, b) for a, b in zip(call.specs, other.specs, strict=True)):
            raise DesyncError(
                f"Replicas {first} and {replica} called different collectives.\n"
                f"Replica {first} called {call}\nReplica {replica} called {other}\n"
                "Hint: all replicas must call the same collectives in the same order, with shapes that fit."
            )
    sizes = [d for _, each in calls for spec in each.specs for d in _fixed_sizes(each, spec.shape.as_list())]
    return [replica for replica, _ in calls] if None in sizes and len(calls) > 1 else []


def check_shapes(call: Call, tensors: Sequence[tf.Tensor], replicas: Sequence[int], communicator: Communicator) -> list[tf.Tensor]:
    """Returns the tensors; using them raises an error with all shapes if the shapes of the replicas do not match."""
    own = tf.stack([size for t in tensors for size in _fixed_sizes(call, tf.unstack(tf.shape(t), t.shape.rank))])
    what = f"{call.kind}: the replicas pass tensors of different shapes. The dimensions that must be equal are,"
    return _if_equal(tensors, communicator.all_gather(own[tf.newaxis]), replicas, what)


def check_structures(call: Call, tensors: Sequence[tf.Tensor], replicas: Sequence[int], flow: Flow) -> list[tf.Tensor]:
    """Returns the tensors; using them raises an error if the replicas pass different nests. Costs one small reduction."""
    own = _skeleton(call.structure)
    digest = zlib.crc32(own.encode()) % 2**31
    highest = flow.all_reduce([tf.constant([digest, -digest])], "max")[0]
    everyone = tf.cond(
        tf.equal(highest[0], -highest[1]),
        lambda: tf.fill([len(replicas)], own),
        lambda: tf.ensure_shape(gather_along(flow, tf.constant([own]), 0), [len(replicas)]),
    )
    return _if_equal(tensors, everyone, replicas, f"{call.kind}: the replicas pass different nests,")


def has_names(call: Call) -> bool:
    """Returns whether the nest has dict keys or tuple fields, which could differ where the tensors match."""
    return any(sign in _skeleton(call.structure) for sign in "{=")


def _if_equal(tensors: Sequence[tf.Tensor], everyone: tf.Tensor, replicas: Sequence[int], what: str) -> list[tf.Tensor]:
    told: list[Any] = [what]
    for i, replica in enumerate(replicas):
        told += [f"on replica {replica}:", everyone[i]]
    equal = tf.reduce_all(tf.equal(everyone, everyone[:1]))
    with tf.control_dependencies([tf.debugging.Assert(equal, told, summarize=100)]):
        return [tf.identity(t) for t in tensors]


def _fit(call: Call, a: tf.TensorSpec, b: tf.TensorSpec) -> bool:
    if a.shape.rank != b.shape.rank or a.dtype != b.dtype:
        return False
    pairs = zip(*(_fixed_sizes(call, spec.shape.as_list()) for spec in (a, b)), strict=True)
    return all(None in (m, n) or m == n for m, n in pairs)


def _fixed_sizes(call: Call, sizes: list[Any]) -> list[Any]:
    """Leaves out the dimension that may differ between replicas."""
    options = dict(call.options)
    free = 0 if call.kind == "all_to_all" else None
    if call.kind == "all_gather" and not options["stack"]:
        free = options["axis"] % len(sizes)
    return [size for i, size in enumerate(sizes) if i != free]


def _skeleton(structure: str) -> str:
    """Returns the structure without dtypes and shapes, which `_fit` compares."""
    return re.sub(r"\w+\[[\dNone, ]*\]", "_", structure)


def check_op(op: str, tensor: tf.Tensor) -> None:
    """Refuses an unknown reduction, and one that the dtype does not support."""
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
        hint = f"use {' or '.join(allowed)}." if allowed else "all_gather moves tensors of any dtype."
        raise ConfigurationError(message("The dtype does not support this reduction.", hint=hint, op=op, dtype=dtype.name))


def check_rows(kind: str, tensor: tf.Tensor) -> None:
    """Refuses a scalar."""
    if tensor.shape.rank == 0:
        hint = "give a scalar a dimension: tf.reshape(x, [1])."
        raise ConfigurationError(message(f"{kind} needs tensors with at least one dimension.", hint, shape=tensor.shape))


def check_root(root: int, group: ReplicaGroup | None, size: int) -> int:
    """Returns the position of the root among `size` communicating replicas; refuses one that does not exist."""
    members = list(range(size)) if group is None else list(group.replicas)
    if isinstance(root, bool) or root not in members:
        raise ConfigurationError(
            message(f"broadcast on replica {replica_id()}: there is no such root.", hint=f"use one of {members}.", root=root)
        )
    return members.index(root) if size > 1 else 0  # A replica outside the group keeps its own tensors.
