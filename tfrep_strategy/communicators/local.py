"""Communication between the replicas of one process: in their common graph, and by collectives inside branches.

Also collectives under TensorFlow's own strategies, such as `tf.distribute.TPUStrategy`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.cluster.devices import identity_of_gpu, nccl_connects
from tfrep_strategy.communicators.base import Communicator, carry, outside_xla, uncarry
from tfrep_strategy.communicators.order import replica_name
from tfrep_strategy.communicators.ring import RingCommunicator
from tfrep_strategy.communicators.wire import Packed
from tfrep_strategy.core.tf import NCCL_DTYPES, BranchGraph, PerReplica, nccl_all_sum, run_independently
from tfrep_strategy.errors import ConfigurationError, DesyncError, message

_REDUCTIONS = {"min": tf.minimum, "max": tf.maximum, "product": tf.multiply}
_ON_GPUS = NCCL_DTYPES - {tf.int32}  # TensorFlow keeps int32 in host memory.
# Above the keys of groups of processes (`ring.py`).
_group_keys = itertools.count(2**30 + 1000)


class LocalGroup:
    """A group of replicas of one process; their communicators share it.

    Args:
        strategy: A `MirroredStrategy`.
        members: The replicas of the group, in order. Every other replica is alone in a group.
    """

    def __init__(self, strategy: Any, members: Sequence[int]) -> None:
        self.strategy, self.members = strategy, tuple(members)
        self.key = next(_group_keys)
        self.nccl = nccl_connects([identity_of_gpu(strategy.extended.worker_devices[replica]) for replica in self.members])
        self.called: weakref.WeakKeyDictionary[Any, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
        """The calls of the first member at each place, by graph for branches, or under the group for inner functions."""
        self._communicators: dict[int, LocalCommunicator] = {}

    def communicator(self, replica: int) -> LocalCommunicator:
        """Returns the communicator of one replica. For a replica outside the group it has size 1."""
        if replica not in self._communicators:
            self._communicators[replica] = LocalCommunicator(self, replica)
        return self._communicators[replica]


class _Sent(NamedTuple):
    """The arguments of one replica in a collective."""

    members: tuple[int, ...]
    values: Any


class LocalCommunicator(Communicator):
    """Runs collectives between the replicas of one process.

    All replicas build one graph (or run eagerly), in which a collective is ordinary arithmetic on the values of all
    replicas. Each replica builds its own branches, loop bodies and inner functions. There the replicas meet at run time,
    in TensorFlow's collective operations, which must all run at once.

    Args:
        group: The replicas that take part.
        replica: The replica that this communicator belongs to.
    """

    name = "local"

    def __init__(self, group: LocalGroup, replica: int) -> None:
        self._group, self._replica = group, replica
        self._members = group.members if replica in group.members else (replica,)
        self.rank, self.size = self._members.index(replica), len(self._members)
        self._device = group.strategy.extended.worker_devices[replica]
        self.local_rank, self.local_size = replica, group.strategy.num_replicas_in_sync

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        if self._apart():
            return tensors if self.size == 1 else self._ring.all_reduce(self._fitting("all_reduce", tensors), op)
        carried = [carry(t, op) for t in tensors]
        reduce = functools.partial(self._reduce, op=op)
        if self._group.nccl and self.size > 1:
            # NCCL launches a kernel on every GPU for each sum, so it gets few large tensors. On CPUs packing would only copy.
            with tf.device(self._device):
                packed = Packed(carried)
            reduced = packed.unpack(self._meet(packed.flats, reduce))
        else:
            reduced = self._meet(carried, reduce)
        return [uncarry(total, tensor.dtype, op, self.size) for total, tensor in zip(reduced, tensors, strict=True)]

    def _reduce(self, sent: Sequence[list[tf.Tensor]], op: str) -> list[list[tf.Tensor]]:
        """Returns the result for each member. For a mean it is the sum."""
        reduced = [self._reduce_values(values, op) for values in zip(*sent, strict=True)]
        return [[results[member] for results in reduced] for member in range(len(sent))]

    def _reduce_values(self, values: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
        if op in _REDUCTIONS:
            return [functools.reduce(_REDUCTIONS[op], values)] * len(values)
        return summed_everywhere(values, self._group.nccl)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if self._apart():
            return tensor if self.size == 1 else self._ring.all_gather(tensor)
        return self._meet(tensor, lambda sent: [tf.concat(list(sent), 0)] * len(sent))

    def all_gather_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._ring.all_gather_equal(tensor) if self._apart() and self.size > 1 else self.all_gather(tensor)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        if self._apart():
            return tensors if self.size == 1 else self._ring.broadcast(self._fitting("broadcast", tensors), root)
        return self._meet((tensors, root), lambda sent: [sent[sent[0][1]][0]] * len(sent))

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensor, splits = tf.convert_to_tensor(tensor), tf.cast(splits, tf.int32)
        if self._apart():
            return (tf.identity(tensor), tf.identity(splits)) if self.size == 1 else self._ring.all_to_all(tensor, splits)

        def exchange(sent: Sequence[tuple[tf.Tensor, tf.Tensor, int]]) -> list[Any]:
            parts = [tf.split(rows, counts, num=len(sent)) for rows, counts, _ in sent]
            results = []
            for place, (*_, replica) in enumerate(sent):
                with tf.device(self._group.strategy.extended.worker_devices[replica]):
                    arrived = tf.concat([own[place] for own in parts], 0)
                results.append((arrived, tf.stack([counts[place] for _, counts, _ in sent])))
            return results

        return self._meet((tensor, splits, self._replica), exchange)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        return LocalGroup(self._group.strategy, [self._members[r] for r in ranks]).communicator(self._replica)

    def compare(self, called: Any, check: Callable[[Sequence[Any]], Any]) -> Any:
        """Compares the calls of the replicas while the graph is built, which costs nothing at run time.

        Args:
            called: The call of this replica; it holds no tensors.
            check: Takes the calls of the members, in order.

        Returns:
            The result of `check` if the replicas build one graph. Otherwise None, and the collective compares the shapes.
            In an inner `tf.function`, a call is compared with all calls that the first replica ever made at this place. A
            replica that has traced the function before does not trace it again, so the replicas cannot wait for it.
        """
        shared = self._shared_graph()
        if not self._apart():
            return self._meet(called, lambda sent: [check(sent)] * len(sent))
        if _is_branch_of(shared):
            with tf.Graph.as_default(shared):  # Replicas can meet in this graph only.
                self._meet(called, lambda sent: [check(sent)] * len(sent))
        elif self.size > 1:
            self._matching("compare", called, check)
        return None

    def _matching(self, what: str, called: Any, check: Callable[[Sequence[Any]], Any]) -> Any:
        """Returns the first member's call that this call belongs to. Each member builds its own graph here.

        TensorFlow builds a step for the first member first. So the calls of other members in a correct program are known.
        """
        shared = self._shared_graph()
        owner = shared if _is_branch_of(shared) else self._group
        known = self._group.called.setdefault(owner, {}).setdefault(replica_name(what, self._replica), [])
        refused = None
        for first in reversed(known):
            try:
                check([first, called])
                return first
            except DesyncError as error:
                refused = refused or error
        if refused and self.rank:
            raise refused
        known.append(called)
        return called

    def _fitting(self, kind: str, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns tensors whose use fails if the replicas, which build separate graphs here, pass different shapes.

        Otherwise the replicas would wait for each other forever, since TensorFlow distinguishes collectives by their shapes. In
        branches, shapes that are known at trace time cost nothing. In functions a replica may use an earlier trace, so the
        shapes are compared in every call.
        """

        def check(calls: Sequence[Sequence[tf.TensorShape]]) -> None:
            first, own = calls
            if len(first) != len(own) or not all(a.is_compatible_with(b) for a, b in zip(first, own, strict=True)):
                what, hint = "The replicas pass tensors of different shapes.", "pass one shape on all replicas."
                raise DesyncError(message(what, hint, code="TFREP-E019", collective=kind, shapes=first, other_shapes=own))

        first = self._matching("shapes", [tensor.shape for tensor in tensors], check)
        if _is_branch_of(self._shared_graph()) and all(shape.is_fully_defined() for shape in first):
            return [tf.ensure_shape(tensor, shape) for tensor, shape in zip(tensors, first, strict=True)]
        return self._ring.of_equal_shapes(kind, tensors)

    def _apart(self) -> bool:
        """Returns whether this replica builds a separate graph."""
        return tf.compat.v1.get_default_graph() is not self._shared_graph()

    def _shared_graph(self) -> Any:
        """Returns the graph that all replicas build."""
        thread = threading.current_thread()
        shared = getattr(thread, "graph", None)
        if shared is None:
            raise ConfigurationError(
                "A collective of MirroredStrategy was called outside the step that it belongs to.\n"
                "Hint: take gradients inside the function that you pass to strategy.run."
            )
        if tf.compat.v1.get_default_graph() is not shared and getattr(thread, "in_eager", False):
            raise ConfigurationError(
                "A collective in a tf.function inside an eager step would wait forever: there the replicas of"
                " MirroredStrategy run one after the other.\n"
                "Hint: call strategy.run inside a tf.function."
            )
        return shared

    def _meet(self, values: Any, combine: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Passes the values of a group's members to `combine`, and returns this member's result."""

        def meet(strategy: Any, everything: Any) -> Any:
            sent = [opaque.content for opaque in getattr(everything, "values", [everything])]
            results: list[Any] = [None] * len(sent)
            with outside_xla():
                for members in dict.fromkeys(one.members for one in sent):
                    for replica, result in zip(members, combine([sent[r].values for r in members]), strict=True):
                        results[replica] = self._on_replica(result, replica)
            return PerReplica(tuple(_Opaque(result) for result in results))

        context = tf.distribute.get_replica_context()
        return context.merge_call(meet, args=(_Opaque(_Sent(self._members, values)),)).content

    def _on_replica(self, result: Any, replica: int) -> Any:
        """Copies a result to the replica's device. TensorFlow would take a shared object for one value of all replicas."""
        with tf.device(self._group.strategy.extended.worker_devices[replica]):
            return tf.nest.map_structure(
                lambda v: v.values[replica] if isinstance(v, PerReplica) else tf.identity(v) if tf.is_tensor(v) else v, result
            )

    @functools.cached_property
    def _ring(self) -> RingCommunicator:
        place = functools.partial(replica_name, replica=self._replica)
        key, nccl = self._group.key, self._group.nccl
        return RingCommunicator(self.rank, self.size, self._device, key, f"group{key}/", place, nccl=nccl)


def summed_everywhere(values: Sequence[tf.Tensor], nccl: bool) -> list[tf.Tensor]:
    """Sums the values of the replicas of a process, and returns the sum for each of them. NCCL puts it on each device.

    Args:
        values: The value of each replica.
        nccl: Whether NCCL connects their devices.
    """
    if nccl and len(values) > 1 and values[0].dtype in _ON_GPUS:
        sums: list[tf.Tensor] = nccl_all_sum(list(values))
        for total in sums:  # If one result is unused and thus not computed, NCCL waits forever for its member.
            if not tf.executing_eagerly():
                run_independently(total.op)
        return sums
    return [tf.add_n(list(values)) if len(values) > 1 else values[0]] * len(values)


def _is_branch_of(shared: Any) -> bool:
    """Returns whether only branches and loop bodies lie between the current graph and the shared graph."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, BranchGraph):
        graph = graph.outer_graph
    return graph is shared


class _Opaque:
    """Hides a value from TensorFlow, which would regroup its parts by replica."""

    def __init__(self, content: Any) -> None:
        self.content = content


_REDUCTIONS_ALONG_AXES = {"min": tf.reduce_min, "max": tf.reduce_max, "product": tf.reduce_prod}


class ContextCommunicator(Communicator):
    """Builds every collective from the two of TensorFlow's strategies: a sum, and a gather of equal shapes.

    Args:
        context: The `tf.distribute.ReplicaContext` of this replica.
    """

    name = "context"

    def __init__(self, context: Any) -> None:
        self._context = context
        known = tf.get_static_value(context.replica_id_in_sync_group)
        self.rank = context.replica_id_in_sync_group if known is None else int(known)
        self.size = context.num_replicas_in_sync

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        return [self._reduce(tf.convert_to_tensor(t), op) for t in tensors]

    def _reduce(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        carried = carry(tensor, op)
        if op in _REDUCTIONS_ALONG_AXES:
            return uncarry(_REDUCTIONS_ALONG_AXES[op](self.all_gather(carried[tf.newaxis]), axis=0), tensor.dtype, op)
        total = self._context.all_reduce(tf.distribute.ReduceOp.SUM, carried)
        return uncarry(total, tensor.dtype, op, self.size)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return uncarry(self._context.all_gather(carry(tensor), axis=0), tensor.dtype)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        raise ConfigurationError(
            message(
                "Groups of replicas need a strategy of this package.",
                hint="use tfrep.MirroredStrategy or tfrep.MultiWorkerStrategy.",
                strategy=type(self._context.strategy).__name__,
            )
        )
