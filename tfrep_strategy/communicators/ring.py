"""TensorFlow's collective operations as a communicator: what its users in one process and in many have in common."""

from __future__ import annotations

import collections
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import run_independently
from tfrep_strategy.communicators.base import Communicator, carry, mean_of_sum, uncarry
from tfrep_strategy.communicators.gpus import identity_of_gpu, nccl_connects, warn_if_shared
from tfrep_strategy.communicators.limits import is_debugging, timeout_seconds
from tfrep_strategy.communicators.naming import in_nested_graph, structural_name
from tfrep_strategy.communicators.order import Order
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.packing import Packed

_AT_ONCE = 4
_HOSTS_KEY = 2**30 + 2  # Above the keys of groups.
_MERGE_OPS = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max", "product": "Mul"}


class RingCommunicator(Communicator):
    """Collectives between devices that TensorFlow's runtime already connects: a ring between CPUs, NCCL between GPUs.

    Args:
        rank: Which of the group's members this is.
        size: How many members there are.
        device: Full name of the device that this member's operations run on.
        group_key: A positive int32 that all members of the group, and no others, use.
        group_name: Goes into the names of its operations, so that what members call among themselves is not counted among
            what all call.
        place: Names the place in the program where a collective is called, given its kind; the same on all members.
        nccl: Whether NCCL connects the members, and not TensorFlow's ring; the same on all members.
    """

    name = "ring"

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        group_key: int,
        group_name: str = "",
        place: Callable[[str], str] = structural_name,
        nccl: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self._device, self._group_key, self._group_name, self._place = device, group_key, group_name, place
        self._nccl = nccl
        self._functions: dict[Any, Any] = {}
        self._in_flight: weakref.WeakKeyDictionary[Any, collections.deque[str]] = weakref.WeakKeyDictionary()
        # TensorFlow lets two threads sleep for every collective until its time limit is over, however soon it has finished:
        # thousands in a fast training loop. Between processes the peer monitor keeps the limit.
        self._timeout = timeout_seconds() if is_debugging() else 0.0
        self._order = Order.of(device)

    def choose_transport(self) -> None:
        """Uses NCCL where it connects the members, else TensorFlow's ring. All members have to call it.

        Raises:
            ConfigurationError: some members are on GPUs, and others are not.
        """
        cpu = tf.DeviceSpec.from_string(self._device).replace(device_type="CPU", device_index=0).to_string()
        hosts = RingCommunicator(self.rank, self.size, cpu, _HOSTS_KEY, f"{self._group_name}hosts/", self._place)
        gpus = hosts.all_gather_object(identity_of_gpu(self._device))
        if None in gpus and any(gpus):
            raise ConfigurationError(
                message(
                    "Some ranks are on GPUs and others are not, between which TensorFlow's collectives cannot sum.",
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
        packed = Packed([carry(t, op) for t in tensors])
        reduced = packed.unpack([self._reduce(flat, op) for flat in packed.flats])
        return [uncarry(result, tensor.dtype, op) for result, tensor in zip(reduced, tensors, strict=True)]

    def _reduce(self, flat: tf.Tensor, op: str) -> tf.Tensor:
        result = self._run(tf.raw_ops.CollectiveReduceV2, "all_reduce", flat, merge_op=_MERGE_OPS[op], final_op="Id")
        return mean_of_sum(result, self.size) if op == "mean" else result

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        rows = tf.shape(tensor)[:1]
        counts = self._gather(rows)
        # The ring gathers equal parts only, so that all are padded to the longest.
        longest = tf.maximum(tf.reduce_max(counts), 1)
        padding = [[0, longest - rows[0]]] + [[0, 0]] * (tensor.shape.rank - 1)
        gathered = self._gather(tf.pad(carry(tensor), padding))
        result = uncarry(tf.boolean_mask(gathered, tf.reshape(tf.sequence_mask(counts, longest), [-1])), tensor.dtype)
        return tf.ensure_shape(result, [None, *tensor.shape[1:]])

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._run(tf.raw_ops.CollectiveGatherV2, "all_gather", tensor)

    def _run(self, operation: Callable[..., tf.Tensor], kind: str, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
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

        key = (kind, tensor.dtype, tensor.shape.rank, *options.values())
        instance_key = self._instance_key(kind, tensor)
        if tf.executing_eagerly() or self._nccl:
            return self._run_in_place(run, key, tensor, instance_key)
        # The resource orders the calls of a function, and the steps of a loop. Within them, the ring tells collectives apart by
        # their keys, so that they need no order. Each occupies a thread, which is why they are not all let go at once.
        graph = tf.compat.v1.get_default_graph()
        before = self._in_flight.setdefault(graph, collections.deque(maxlen=_AT_ONCE))
        with tf.control_dependencies([graph.get_operation_by_name(before[0])] if len(before) == _AT_ONCE else []):
            result = self._run_in_place(run, key, tensor, instance_key)
        run_independently(result.op)
        before.append(result.op.name)
        return result

    def _run_in_place(
        self, run: Callable[..., tf.Tensor], key: Any, tensor: tf.Tensor, instance_key: tf.Tensor
    ) -> tf.Tensor:
        if not in_nested_graph():
            return run(tensor, instance_key, self._order.handle())
        # TensorFlow tells apart what runs in different loops, and the members' loops are different ones. A function that is
        # called, and not copied, into the body of a loop belongs to none.
        if key not in self._functions:
            signature = [
                tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.resource),
            ]
            self._functions[key] = tf.function(
                run, signature, autograph=False, experimental_attributes={"_noinline": True}
            )
        return self._functions[key](tensor, instance_key, self._order.handle())

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        return self.all_reduce([t if self.rank == root else tf.zeros_like(t) for t in tensors], "sum")

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        table = tf.reshape(self.all_gather(tf.cast(splits, tf.int32)), [self.size, self.size])
        receivers = tf.repeat(tf.tile(tf.range(self.size), [self.size]), tf.reshape(table, [-1]))
        rows = tf.boolean_mask(self.all_gather(tensor), tf.equal(receivers, self.rank))
        return tf.ensure_shape(rows, [None, *tensor.shape[1:]]), table[:, self.rank]

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        name = f"{self._group_name}{'-'.join(map(str, ranks))}/"
        key = 2 + zlib.crc32(name.encode()) % 2**30
        group = RingCommunicator(ranks.index(self.rank), len(ranks), self._device, key, name, self._place, self._nccl)
        group.local_rank, group.local_size = self.local_rank, self.local_size
        return group

    def _instance_key(self, kind: str, tensor: tf.Tensor) -> tf.Tensor:
        """Identifies one collective: by its place in the program and by its shape, which TensorFlow caches with the key."""
        place = zlib.crc32(f"{self._place(self._group_name + kind)}.{tensor.dtype.name}".encode())
        powers = [31**i for i in range(tensor.shape.rank)]
        if tensor.shape.is_fully_defined():
            mixed = sum(d * p for d, p in zip(tensor.shape.as_list(), powers, strict=True))
            return tf.constant((place + mixed * 0x9E3779B1) % (2**31 - 1), tf.int32)
        with tf.device(self._device):  # On another device, the whole tensor would be copied to where its shape is taken.
            shape = tf.shape(tensor, out_type=tf.int64)
        with tf.device("CPU:0"):
            mixed = tf.reduce_sum(shape * tf.constant(powers, tf.int64))
            return tf.cast((place + mixed * 0x9E3779B1) % (2**31 - 1), tf.int32)
