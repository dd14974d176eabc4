"""The common path of all collectives: checks the arguments, finds the communicator, packs the result."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.communicators import REDUCE_OPS, Communicator, SingleCommunicator
from tfrep_strategy.communicators.local import ContextCommunicator
from tfrep_strategy.communicators.peers.checked import CheckedCommunicator
from tfrep_strategy.communicators.wire import from_bytes, gather_rows, to_bytes
from tfrep_strategy.core.step import current_share
from tfrep_strategy.errors import ConfigurationError, DesyncError, message
from tfrep_strategy.strategies.groups import ReplicaGroup
from tfrep_strategy.training.collectives.flow import Flow


def replica_id() -> Any:
    """Returns the id of this replica, 0 to `num_replicas() - 1`; 0 outside a step.

    Returns:
        An int. Under TensorFlow's strategies that number replicas at run time, an int32 scalar.

    Example:
        >>> tfrep.replica_id()
        0
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    known = tf.get_static_value(context.replica_id_in_sync_group)
    return context.replica_id_in_sync_group if known is None else int(known)


def num_replicas(group: ReplicaGroup | None = None) -> int:
    """Returns the number of replicas that run this step together; 1 outside a step.

    Args:
        group: A group whose members to count; None for all replicas.

    Example:
        >>> tfrep.num_replicas()
        1
    """
    if group is not None:
        return len(group)
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def to_real(tensor: tf.Tensor) -> tf.Tensor:
    """Converts bool to int32, and complex numbers to pairs along a new last dimension."""
    if tensor.dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tensor


def from_real(real: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Undoes `to_real`."""
    if like.dtype.is_complex:
        return tf.complex(real[..., 0], real[..., 1])
    return tf.cast(real, like.dtype)


def product(flow: Flow, tensor: tf.Tensor) -> tf.Tensor:
    """Multiplies complex tensors over the replicas. Their product is not the product of their parts."""
    return tf.reduce_prod(gather_along(flow, tensor[tf.newaxis], 0), 0)


def gather_along(flow: Flow, tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Gathers a tensor of any dtype along any axis."""
    axis %= tensor.shape.rank
    order = [axis] + [i for i in range(tensor.shape.rank) if i != axis]
    moved = tensor if axis == 0 else tf.transpose(tensor, order)
    gathered = from_real(gather_rows(flow.all_gather, to_real(moved)), moved)
    return gathered if axis == 0 else tf.transpose(gathered, [order.index(i) for i in range(tensor.shape.rank)])


def broadcast_strings(flow: Flow, tensor: tf.Tensor, root: int) -> tf.Tensor:
    """Sends strings as bytes. Only the root knows their number, so all replicas gather, and the others send none."""
    is_root = tf.equal(flow.communicator.rank, root)
    lengths = flow.broadcast([tf.strings.length(tensor)], root)[0]
    sent = to_bytes(tf.where(is_root, tensor, tf.constant("")))
    return tf.reshape(from_bytes(flow.all_gather(sent), tf.reshape(lengths, [-1])), tf.shape(tensor))


def exchange_rows(flow: Flow, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges rows of any dtype."""
    if tensor.dtype != tf.string:
        rows, received = flow.all_to_all(to_real(tensor), splits)
        return from_real(rows, tensor), received
    lengths = tf.reshape(tf.strings.length(tensor), [tf.shape(tensor)[0], -1])
    received_lengths, received = flow.all_to_all(lengths, splits)
    part = tf.RaggedTensor.from_row_lengths(tf.reduce_sum(lengths, 1), splits)
    data, _ = flow.all_to_all(to_bytes(tensor), tf.reduce_sum(part, 1))
    strings = from_bytes(data, tf.reshape(received_lengths, [-1]))
    return tf.reshape(strings, tf.concat([[-1], tf.shape(tensor)[1:]], 0)), received


class CollectiveCall(NamedTuple):
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


def describe(kind: str, options: dict[str, Any], nest: Any, tensors: Sequence[tf.Tensor]) -> CollectiveCall:
    """Describes the collective that a replica is about to call."""
    leaves = [_Leaf(f"{t.dtype.name}{t.shape.as_list()}") for t in tensors]
    specs = tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    return CollectiveCall(kind, tuple(options.items()), str(tf.nest.pack_sequence_as(nest, leaves)), specs)


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


def check_equal(calls: Sequence[tuple[int, CollectiveCall]]) -> list[int]:
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
                message(
                    f"Replicas {first} and {replica} called different collectives.\n"
                    f"Replica {first} called {call}\nReplica {replica} called {other}",
                    hint="all replicas must call the same collectives in the same order, with shapes that fit.",
                    code="TFREP-E019",
                )
            )
    sizes = [d for _, each in calls for spec in each.specs for d in _fixed_sizes(each, spec.shape.as_list())]
    return [replica for replica, _ in calls] if None in sizes and len(calls) > 1 else []


def check_shapes(
    call: CollectiveCall, tensors: Sequence[tf.Tensor], replicas: Sequence[int], communicator: Communicator
) -> list[tf.Tensor]:
    """Returns the tensors; using them raises an error with all shapes if the shapes of the replicas do not match."""
    own = tf.stack([size for t in tensors for size in _fixed_sizes(call, tf.unstack(tf.shape(t), t.shape.rank))])
    what = f"{call.kind}: the replicas pass tensors of different shapes. The dimensions that must be equal are,"
    return _if_equal(tensors, communicator.all_gather(own[tf.newaxis]), replicas, what)


def check_structures(call: CollectiveCall, tensors: Sequence[tf.Tensor], replicas: Sequence[int], flow: Flow) -> list[tf.Tensor]:
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


def has_names(call: CollectiveCall) -> bool:
    """Returns whether the nest has dict keys or tuple fields, which may differ even if the tensors match."""
    return any(sign in _skeleton(call.structure) for sign in "{=")


def _if_equal(tensors: Sequence[tf.Tensor], everyone: tf.Tensor, replicas: Sequence[int], what: str) -> list[tf.Tensor]:
    shown: list[Any] = [what]
    for i, replica in enumerate(replicas):
        shown += [f"on replica {replica}:", everyone[i]]
    equal = tf.reduce_all(tf.equal(everyone, everyone[:1]))
    with tf.control_dependencies([tf.debugging.Assert(equal, shown, summarize=100)]):
        return [tf.identity(t) for t in tensors]


def _fit(call: CollectiveCall, a: tf.TensorSpec, b: tf.TensorSpec) -> bool:
    if a.shape.rank != b.shape.rank or a.dtype != b.dtype:
        return False
    pairs = zip(*(_fixed_sizes(call, spec.shape.as_list()) for spec in (a, b)), strict=True)
    return all(None in (m, n) or m == n for m, n in pairs)


def _fixed_sizes(call: CollectiveCall, sizes: list[Any]) -> list[Any]:
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


Nest = Any


def launch(
    kind: str,
    nest: Nest,
    group: ReplicaGroup | None,
    work: Callable[[Flow, list[tf.Tensor]], list[tf.Tensor]],
    check: Callable[[tf.Tensor], None] = lambda tensor: None,
    **options: Any,
) -> Nest:
    """Runs one collective. All collectives pass through here.

    Args:
        kind: The name of the collective.
        nest: The nest of this replica.
        group: The replicas that take part; None for all.
        work: Runs the collective: takes this replica's flow and tensors, returns the resulting tensors.
        check: Raises a ConfigurationError for a tensor that the collective cannot take.
        **options: Further arguments that all replicas must agree on.

    Returns:
        The result, in the structure of `nest`.
    """
    tensors = [to_tensor(kind, leaf) for leaf in tf.nest.flatten(nest)]
    flow = flow_of(group)
    try:
        for tensor in tensors:
            check(tensor)
    except ConfigurationError as error:
        raise ConfigurationError(f"{kind} on replica {replica_id()}: {error}") from None
    call = describe(kind, options, nest, tensors)
    if isinstance(flow.communicator, CheckedCommunicator):
        if tensors and (flow.communicator.monitor.checks_every_call or has_names(call)):
            members = range(flow.communicator.size) if group is None else group.replicas
            tensors = check_structures(call, tensors, members, flow)
    elif hasattr(flow.communicator, "compare"):
        replicas = flow.communicator.compare((replica_id(), call), check_equal)
        if replicas:
            tensors = check_shapes(call, tensors, replicas, flow.communicator)
    results = work(flow, tensors) if tensors else []
    return tf.nest.pack_sequence_as(nest, results)


def flow_of(group: ReplicaGroup | None) -> Flow:
    """Returns the collectives of the calling replica, between all replicas or those of a group.

    Args:
        group: The group; None for all replicas.

    Raises:
        ConfigurationError: The replicas cannot communicate, or the group belongs to another strategy.
    """
    context = tf.distribute.get_replica_context()
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ConfigurationError(
            message(
                "The workers of a ParameterServerStrategy do not wait for each other, so they cannot run collectives.",
                hint="use a MirroredStrategy or a MultiWorkerStrategy for collectives.",
                strategy=type(strategy).__name__,
            )
        )
    if group is not None and not isinstance(group, ReplicaGroup):
        raise ConfigurationError(
            message("`group` is not a ReplicaGroup.", hint="make one with strategy.new_group([0, 2]).", group=group)
        )
    if context is None or (context.num_replicas_in_sync == 1 and not hasattr(strategy.extended, "communicator_of")):
        return Flow(SingleCommunicator(), None)
    if group is not None and group.strategy is not strategy:
        hint = "make it with the strategy in whose scope it is used."
        raise ConfigurationError(message("The group belongs to another strategy.", hint, group=group))
    replica = replica_id()
    communicator: Communicator
    if group is not None:
        communicator = group.communicator_of(replica)
    elif hasattr(strategy.extended, "communicator_of"):
        communicator = strategy.extended.communicator_of(replica)
    else:
        communicator = ContextCommunicator(context)
    return Flow(communicator, current_share())


def outside_step() -> bool:
    """Returns whether the caller is outside replicas: in the scope of a strategy, or in none."""
    return not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None
