"""How the replicas of a partitioned step talk: inside of one process, or between processes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.base import carry, outside_xla, uncarry
from tfrep_strategy.communicators.local import summed_everywhere
from tfrep_strategy.communicators.strings import gather_rows
from tfrep_strategy.gradients import buckets
from tfrep_strategy.packing import Packed

Values = Sequence[Sequence[tf.Tensor]]
BucketBytes = Callable[[Sequence[tf.Tensor]], int]
"""Says in buckets of how many bytes tensors travel."""


class _InBuckets(abc.ABC):
    """Sums tensors in buckets: the first that are computed travel first, while the others are computed."""

    def __init__(self, bucket_bytes_for: BucketBytes) -> None:
        self._bucket_bytes_for = bucket_bytes_for

    def sums(self, values: Values) -> list[list[tf.Tensor]]:
        totals: dict[int, list[tf.Tensor]] = {}
        later_first, backwards = [each[0] for each in values][::-1], range(len(values))[::-1]
        for bucket in buckets(backwards, later_first, self._bucket_bytes_for(later_first)):
            totals.update(zip(bucket, self._sums([values[i] for i in bucket]), strict=True))
        return [totals[i] for i in range(len(values))]

    @abc.abstractmethod
    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        """Sums the tensors of a bucket."""


class WithinProcess(_InBuckets):
    """Replicas that are the devices of one process: what they send each other is arithmetic in the graph that they share.

    Args:
        devices: The device of each replica.
        nccl: Whether NCCL connects them.
        bucket_bytes_for: See `BucketBytes`.
    """

    def __init__(self, devices: Sequence[str], nccl: bool, bucket_bytes_for: BucketBytes) -> None:
        super().__init__(bucket_bytes_for)
        self.devices, self._nccl = devices, nccl

    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        own = self._at_each(lambda replica: [carry(each[replica]) for each in values])
        if self._nccl:  # It launches a kernel on every GPU for each sum, so it gets few large tensors.
            packed = self._at_each(lambda replica: Packed(own[replica]))
            flats = self._summed([each.flats for each in packed])
            totals = self._at_each(lambda replica: packed[replica].unpack(flats[replica]))
        else:
            totals = self._summed(own)
        dtypes = [each[0].dtype for each in values]
        results = self._at_each(lambda replica: list(map(uncarry, totals[replica], dtypes)))
        return [list(each) for each in zip(*results, strict=True)]

    def _summed(self, own: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Returns, for each replica, the sums of tensors of which each replica has its own."""
        with outside_xla():
            sums = [summed_everywhere(values, self._nccl) for values in zip(*own, strict=True)]
        return self._at_each(lambda replica: [tf.identity(each[replica]) for each in sums])

    def gathered(self, values: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
        with tf.device(self.devices[0]), outside_xla():
            whole = tf.concat(list(values), axis)
        return self._at_each(lambda replica: tf.identity(whole))

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._at_each(lambda replica: tf.identity(values[0]))

    def _at_each(self, make: Callable[[int], Any]) -> list[Any]:
        """Makes something on the device of each replica, which XLA leaves alone."""
        made = []
        for replica, device in enumerate(self.devices):
            with tf.device(device), outside_xla():
                made.append(make(replica))
        return made


class BetweenProcesses(_InBuckets):
    """Replicas that are the processes of a run.

    Args:
        communicator: That of this process.
        device: The device of its replica.
        bucket_bytes_for: See `BucketBytes`.
    """

    def __init__(self, communicator: Communicator, device: str, bucket_bytes_for: BucketBytes) -> None:
        super().__init__(bucket_bytes_for)
        self._communicator = communicator
        self.devices: Sequence[str] = (device,)

    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        with self._placed():
            return [[total] for total in self._communicator.all_reduce([own for (own,) in values])]

    def gathered(self, values: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
        (own,) = values
        gather = functools.partial(gather_rows, self._communicator.all_gather)
        with self._placed():
            if not axis:
                return [gather(own)]
            order = [axis, *(i for i in range(own.shape.rank) if i != axis)]
            back = [order.index(i) for i in range(own.shape.rank)]
            return [tf.transpose(gather(tf.transpose(own, order)), back)]

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with self._placed():
            return self._communicator.broadcast(list(values))

    def _placed(self) -> tf.device:
        return tf.device(self.devices[0])
