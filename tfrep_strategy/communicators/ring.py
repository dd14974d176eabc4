"""TensorFlow's collective operations as a communicator, for replicas in one process or in several.

Between CPUs TensorFlow runs the ring all-reduce of Patarasuk and Yuan ("Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009); between GPUs, NCCL.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.devices import identity_of_gpu, is_gpu, nccl_connects, warn_if_shared
from tfrep_strategy.communicators.base import (
    Communicator,
    carry,
    carry_moved,
    from_bits,
    outside_xla,
    to_bits,
    uncarry,
    uncarry_moved,
)
from tfrep_strategy.communicators.order import Order, in_nested_graph, structural_name
from tfrep_strategy.communicators.peers.position import Position, sizes_of
from tfrep_strategy.communicators.wire import Packed
from tfrep_strategy.core.limits import is_debugging, timeout_seconds
from tfrep_strategy.core.tf import run_independently
from tfrep_strategy.errors import ConfigurationError, message

_AT_ONCE = 4
_HOSTS_KEY = 2**30 + 2  # Above the keys of groups.
_MERGE_OPS = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max", "product": "Mul"}

_MERGE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "Add": tf.add, "Min": tf.minimum, "Max": tf.maximum, "Mul": tf.multiply,
}  # fmt: skip
_GATHERED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""The dtypes that TensorFlow gathers between CPUs."""
_BYTES_PER_MESSAGE = 16 << 10
"""The number of bytes that take as long as an empty message, at least. Measured values are higher, as on a 1 Gb/s network."""
_MOST_GATHERED_BYTES = 256 << 10

_PRIME = 2**31 - 1
_MOST_SIZES = 4096
_TOLD_SIZES = 16
_TOLD_DIMENSIONS = 8
"""The number of dimensions of a gathered tensor that members compare. Others are part of the instance key only."""


class RingCommunicator(Communicator):
    """Collectives between devices that TensorFlow's runtime already connects: a ring between CPUs, NCCL between GPUs.

    Args:
        rank: The rank of this member in the group.
        size: Number of members.
        device: Full name of the device that this member's operations run on.
        group_key: A positive int32 that only the members of the group use.
        group_name: Part of the names of the group's collectives, which are counted separately from those of all ranks.
        place: Takes the kind of a collective and returns a name for its place in the program, equal on all members.
        position: Records the collectives that this member is in, for the monitor.
        nccl: Whether NCCL, not TensorFlow's ring, connects the members; equal on all members.
    """

    name = "ring"
    gathers_few = False
    """Whether small sums are gathered and added. All members must know equally much of the size when they trace."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        group_key: int,
        group_name: str = "",
        place: Callable[[str], str] = structural_name,
        position: Position | None = None,
        nccl: bool = False,
    ) -> None:
        self.position = position
        self.rank, self.size = rank, size
        self._device, self._group_key, self._group_name, self._place = device, group_key, group_name, place
        self._nccl = nccl
        self._is_on_gpu = is_gpu(device)
        self._functions: dict[Any, Any] = {}
        self._in_flight: weakref.WeakKeyDictionary[Any, collections.deque[str]] = weakref.WeakKeyDictionary()
        # With a time limit, TensorFlow keeps two threads asleep for every collective until the limit, even after the
        # collective has finished: thousands in a fast training loop. Between processes the monitor applies the limit.
        self._timeout = timeout_seconds() if is_debugging() and timeout_seconds() < math.inf else 0.0
        self._order = Order.of(device)

    def choose_transport(self) -> None:
        """Chooses NCCL if it connects the members, else TensorFlow's ring. All members must call it.

        Raises:
            ConfigurationError: Some members are on GPUs, and others are not.
        """
        cpu = tf.DeviceSpec.from_string(self._device).replace(device_type="CPU", device_index=0).to_string()
        hosts = RingCommunicator(self.rank, self.size, cpu, _HOSTS_KEY, f"{self._group_name}hosts/", self._place)
        gpus = hosts.all_gather_object(identity_of_gpu(self._device))
        if None in gpus and any(gpus):
            raise ConfigurationError(
                message(
                    "Some ranks are on GPUs and others are not. TensorFlow's collectives cannot connect them.",
                    hint='give every rank a GPU, or device="CPU:0".',
                    ranks_without_gpu=[rank for rank, gpu in enumerate(gpus) if gpu is None],
                )
            )
        if self.rank == 0:
            warn_if_shared(gpus)
        self._nccl = nccl_connects(gpus)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        reduced = self._reduce_all([carry(t, op) for t in tensors], op, tensors)
        return [uncarry(result, tensor.dtype, op, self.size) for result, tensor in zip(reduced, tensors, strict=True)]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        # NCCL moves floats unchanged. TensorFlow would copy their bits, as int32, to host memory.
        stay = [self._nccl and t.dtype.is_floating for t in tensors]
        sent = [carry(t) if stays else to_bits(t) for t, stays in zip(tensors, stay, strict=True)]
        if self.rank != root:
            sent = [-tf.zeros_like(t) for t in sent]  # A sum with -0.0, or with the integer 0, changes nothing.
        received = zip(self._reduce_all(sent, "sum", tensors), tensors, stay, strict=True)
        return [uncarry(total, t.dtype) if stays else from_bits(total, t.dtype) for total, t, stays in received]

    def _reduce_all(self, carried: list[tf.Tensor], op: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Reduces tensors of dtypes that the ring supports; for a mean, it sums. `tensors` are those of the caller."""
        packed = Packed(carried)
        return packed.unpack([self._reduce(flat, op, tensors) for flat in packed.flats])

    def _reduce(self, flat: tf.Tensor, op: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        options = {"merge_op": _MERGE_OPS[op]}
        if self.gathers_few and not self._nccl and flat.dtype in _GATHERED and 0 < _bytes(flat) <= self._most_gathered_bytes():
            return self._run(_gather_and_merge, "all_reduce", flat, tensors, **options)
        return self._run(tf.raw_ops.CollectiveReduceV2, "all_reduce", flat, tensors, **options, final_op="Id")

    def _most_gathered_bytes(self) -> float:
        """Returns the largest size in bytes for which gathering and adding is faster than a ring reduction.

        The ring sends `2 (n - 1)` messages in sequence; a gather sends half of these, but more bytes if there are more than two
        members.
        """
        travels_more = (self.size - 1) * (1 - 2 / self.size)  # In multiples of the tensor.
        return min(_BYTES_PER_MESSAGE * (self.size - 1) / travels_more if travels_more else math.inf, _MOST_GATHERED_BYTES)

    def of_equal_shapes(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors. Their use fails on all members if the members call different collectives. Costs one small gather.

        Args:
            kind: The collective that they are for.
            tensors: Equally many tensors, with the same ranks, on all members.
        """
        sizes = sizes_of(tensors)
        summary = _instance_key(".".join([kind, *(tensor.dtype.name for tensor in tensors)]), sizes)
        own_sizes, count = sizes[:_TOLD_SIZES], tf.minimum(tf.size(sizes), _TOLD_SIZES)
        own = tf.concat([[summary, count], own_sizes, tf.zeros([_TOLD_SIZES - count], tf.int32)], 0)
        # All of these have one place and one shape, so members in different collectives still meet in it. Gathers stay in order.
        each = tf.reshape(self._run(tf.raw_ops.CollectiveGatherV2, "all_gather", own, [own], place="agree"), [self.size, -1])
        words: list[Any] = [f"{kind}: the replicas pass tensors of different shapes. Number of dimensions and sizes"]
        for member in range(self.size):
            words += [f"on replica {member}:", each[member, 2 : 2 + each[member, 1]]]
        with (
            tf.device("CPU:0"),
            tf.control_dependencies(
                [tf.debugging.Assert(tf.reduce_all(tf.equal(each[:, 0], each[0, 0])), words, summarize=_TOLD_SIZES)]
            ),
        ):
            fits = tf.constant(0)
        with tf.control_dependencies([fits]):
            return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        rows = tf.shape(tensor)[:1]
        counts = self._shapes_of_all("all_gather", tensor)[:, 0]
        # The ring gathers only parts of equal size, so all are padded to the longest.
        longest = tf.maximum(tf.reduce_max(counts), 1)
        carried = carry_moved(tensor)
        padding = [[0, longest - rows[0]]] + [[0, 0]] * (carried.shape.rank - 1)
        gathered = self._gather(tf.pad(carried, padding))
        mask = tf.reshape(tf.sequence_mask(counts, longest), [-1])
        result = uncarry_moved(tf.boolean_mask(gathered, mask), tensor.dtype)
        return tf.ensure_shape(result, [None, *tensor.shape[1:]])

    def all_gather_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return uncarry_moved(self._gather(carry_moved(tensor)), tensor.dtype)

    def _gather_words(self, words: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Gathers padded parts, or sums parts that are zero elsewhere, whichever sends less."""
        longest, total = max(counts), sum(counts)
        if self.size * longest <= 2 * total:
            rows = tf.reshape(self.all_gather_equal(tf.pad(words, [[0, longest - len(words)]])), [self.size, longest])
            return tf.boolean_mask(rows, tf.sequence_mask(counts, longest))
        before = sum(counts[: self.rank])
        return self.all_reduce([tf.pad(words, [[before, total - before - len(words)]])])[0]

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """Sends each member its rows, which it adds in the order of ranks. NCCL does both in one operation."""
        tensor = tf.convert_to_tensor(tensor)
        rows = tensor.shape[0]
        if op not in ("sum", "mean") or rows is None or rows % self.size:
            return super().reduce_scatter(tensor, op)
        carried = carry(tensor, op)
        if self._nccl:
            options = {"merge_op": _MERGE_OPS[op], "final_op": "Id"}
            total = self._run(tf.raw_ops.CollectiveReduceScatterV2, "reduce_scatter", carried, [tensor], **options)
        else:
            parts = tf.reshape(carried, tf.concat([[self.size, rows // self.size], tf.shape(carried)[1:]], 0))
            received = self._run(tf.raw_ops.CollectiveAllToAllV2, "reduce_scatter", parts, [tensor])
            total = tf.reduce_sum(received, 0)
        return tf.ensure_shape(uncarry(total, tensor.dtype, op, self.size), [rows // self.size, *tensor.shape[1:]])

    def _shapes_of_all(self, method: str, tensor: tf.Tensor, more: Any = ()) -> tf.Tensor:
        """Gathers the dimensions of each member's tensor, and more numbers. Refuses different dtypes, or rows of different shapes.

        Returns:
            int32, of shape `[size, _TOLD_DIMENSIONS + len(more)]`.
        """
        rank = min(tensor.shape.rank, _TOLD_DIMENSIONS)
        kind = [tensor.dtype.as_datatype_enum, tensor.shape.rank]
        own = tf.concat([kind, tf.shape(tensor)[:rank], [0] * (_TOLD_DIMENSIONS - rank), tf.cast(more, tf.int32)], 0)
        gathered = tf.reshape(self._gather(own), [self.size, -1])
        shapes = gathered[:, : 2 + _TOLD_DIMENSIONS]
        fits = tf.reduce_all(tf.equal(shapes[:, :2], shapes[0, :2])) & tf.reduce_all(tf.equal(shapes[:, 3:], shapes[0, 3:]))

        def refuse() -> tf.Tensor:
            with tf.device("CPU:0"):  # Strings exist on the CPU only.
                names = tf.constant([f"number {i}" if i in (0, *range(24, 64)) else tf.as_dtype(i).name for i in range(64)])
                words: list[Any] = [f"{method}: the ranks pass tensors whose dtypes differ, or shapes beside the first dimension:"]
                for member in range(self.size):
                    words += [f"\nrank {member}:", names[gathered[member, 0]], gathered[member, 2 : 2 + gathered[member, 1]]]
                with tf.control_dependencies([tf.debugging.Assert(False, words, summarize=_TOLD_DIMENSIONS)]):
                    return tf.constant(False)

        with tf.control_dependencies([tf.cond(fits, lambda: tf.constant(True), refuse)]):
            return tf.identity(gathered[:, 2:])

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        splits = tf.cast(splits, tf.int32)
        table = self._shapes_of_all("all_to_all", tensor, splits)[:, _TOLD_DIMENSIONS:]
        # Only parts of equal size are possible, so all are as long as the longest. The receiver cuts off the excess.
        longest = tf.maximum(tf.reduce_max(table), 1)
        carried = carry_moved(tensor)
        rows = tf.cumsum(splits, exclusive=True)[:, tf.newaxis] + tf.range(longest)
        padded = tf.pad(carried, [[0, 1]] + [[0, 0]] * (carried.shape.rank - 1))
        parts = tf.gather(padded, tf.minimum(rows, tf.shape(carried)[0]))
        received = self._run(tf.raw_ops.CollectiveAllToAllV2, "all_to_all", parts, [parts])
        counts = table[:, self.rank]
        kept = tf.boolean_mask(received, tf.sequence_mask(counts, longest))
        return tf.ensure_shape(uncarry_moved(kept, tensor.dtype), [None, *tensor.shape[1:]]), counts

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._run(tf.raw_ops.CollectiveGatherV2, "all_gather", tensor, [tensor])

    def _run(
        self,
        operation: Callable[..., tf.Tensor],
        kind: str,
        tensor: tf.Tensor,
        brought: Sequence[tf.Tensor],
        place: str | None = None,
        **options: Any,
    ) -> tf.Tensor:
        if tensor.dtype == tf.int32 and self._is_on_gpu:
            # TensorFlow keeps int32 in host memory, and refuses it between GPUs.
            return tf.cast(self._run(operation, kind, tf.cast(tensor, tf.int64), brought, place, **options), tf.int32)

        def run(tensor: tf.Tensor, instance_key: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
            with tf.device(self._device):
                return operation(
                    input=tensor,
                    group_size=self.size,
                    group_key=self._group_key,
                    instance_key=instance_key,
                    ordering_token=[order],
                    communication_hint="nccl" if self._nccl else "ring",
                    timeout_seconds=self._timeout,
                    **options,
                )

        given, may_be_empty = tensor, kind != "all_reduce" and not tensor.shape.num_elements()
        with outside_xla():
            tensor = _with_an_element(given) if may_be_empty else given
            place, sizes = self._group_name + place if place else self._place(self._group_name + kind), sizes_of(brought)
            # Eager calls of one kind share a place, so the key also has the dtypes of the caller's tensors: several dtypes
            # travel as int32, and seven scalars of one dtype are not six and one of another. It also has the kind of transport.
            name = ".".join([place, operation.__name__, *(each.dtype.name for each in (tensor, *brought))])
            instance_key = _instance_key(name, sizes_of([tensor, *brought]))
            position = self.position
            entered = position.enter(kind, place, brought, sizes) if position is not None else None
            after = [] if entered is None else list(entered[:1])
            # The resource orders the calls of a function, and the steps of a loop. Within one call the reductions of the ring
            # need no order, since their keys differ. Each occupies a thread, so only some run at once. Gathers stay in order: a
            # gather may refuse its tensors, and then no later collective may have begun.
            is_free = kind in ("all_reduce", "reduce_scatter") and not self._nccl and not tf.executing_eagerly()
            in_flight = self._in_flight_here() if is_free else None
            if in_flight is not None and len(in_flight) == _AT_ONCE:
                after.append(tf.compat.v1.get_default_graph().get_operation_by_name(in_flight[0]))
            with tf.control_dependencies(after):
                result = self._run_in_place(run, (kind, *options.values()), tensor, instance_key)
            if in_flight is not None:
                run_independently(result.op)
                in_flight.append(result.op.name)
            if position is not None and entered is not None:
                position.leave(entered, [result])
            return _without_padding(result, given) if may_be_empty else result

    def _in_flight_here(self) -> collections.deque[str]:
        """Returns the names of the last collectives in the graph that is being built."""
        return self._in_flight.setdefault(tf.compat.v1.get_default_graph(), collections.deque(maxlen=_AT_ONCE))

    def _run_in_place(
        self, run: Callable[..., tf.Tensor], which: tuple[Any, ...], tensor: tf.Tensor, instance_key: tf.Tensor
    ) -> tf.Tensor:
        if not in_nested_graph():
            return run(tensor, instance_key, self._order.handle())
        # TensorFlow separates the collectives of different loops, and each member has its own loop. A function that is
        # called in a loop body, and not inlined, belongs to no loop.
        key = (*which, tensor.dtype, tensor.shape.rank)
        if key not in self._functions:
            signature = [
                tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.resource),
            ]
            self._functions[key] = tf.function(run, signature, autograph=False, experimental_attributes={"_noinline": True})
        return self._functions[key](tensor, instance_key, self._order.handle())

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        name = f"{self._group_name}{'-'.join(map(str, ranks))}/"
        key = group_key(name)
        position = Position() if self.position else None
        place, nccl = self._place, self._nccl
        group = RingCommunicator(ranks.index(self.rank), len(ranks), self._device, key, name, place, position, nccl)
        group.local_rank, group.local_size, group.gathers_few = self.local_rank, self.local_size, self.gathers_few
        return group


def group_key(name: str) -> int:
    """Returns the key of a group of processes: 1 for all processes, a hash of the name for another group."""
    return 2 + zlib.crc32(name.encode()) % 2**30 if name else 1


def _with_an_element(tensor: tf.Tensor) -> tf.Tensor:
    """Pads dimensions of size 0, because gathering no elements would end the process."""
    shape = tf.shape(tensor)
    return tf.pad(tensor, tf.stack([tf.zeros_like(shape), 1 - tf.minimum(shape, 1)], 1))


def _without_padding(result: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """Removes the padding of `_with_an_element`, after a collective that may have changed the first dimension."""
    shape = tf.shape(given)
    sizes = tf.concat([tf.shape(result)[:1] * tf.minimum(shape[:1], 1), shape[1:]], 0)
    return tf.slice(result, tf.zeros_like(sizes), sizes)


def _instance_key(place: str, sizes: tf.Tensor) -> tf.Tensor:
    """Returns the key of a collective from its place and shapes, because TensorFlow caches the shapes of each key."""
    start = zlib.crc32(place.encode())
    known = tf.get_static_value(sizes)
    factors = itertools.accumulate(itertools.repeat(16807), lambda a, b: a * b % _PRIME)
    if known is not None:
        mixed = sum((int(n) + 1) * factor % _PRIME for n, factor in zip(known, factors, strict=False))
        return tf.constant((start + mixed) % _PRIME, tf.int32)
    count = _MOST_SIZES if sizes.shape[0] is None else sizes.shape[0]
    with tf.device("CPU:0"):
        own = tf.constant(list(itertools.islice(factors, count)), tf.int64)[: tf.size(sizes)]
        mixed = tf.reduce_sum((tf.cast(sizes, tf.int64) + 1) * own % _PRIME)
        return tf.cast((start + mixed) % _PRIME, tf.int32)


def _gather_and_merge(input: tf.Tensor, merge_op: str, **options: Any) -> tf.Tensor:
    """Replaces `CollectiveReduceV2`. All members add in the same order, so that they get the same bits."""
    gathered = tf.raw_ops.CollectiveGatherV2(input=input, **{k: v for k, v in options.items() if k != "final_op"})
    if not tf.executing_eagerly():
        run_independently(gathered.op)
    return functools.reduce(_MERGE[merge_op], tf.unstack(tf.reshape(gathered, [options["group_size"], -1])))


def _bytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor in bytes; 0 if it is unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
