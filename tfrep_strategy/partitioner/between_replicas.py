"""How the replicas of a partitioned step talk: inside of one process, or between processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrep_strategy._tensorflow import NCCL_DTYPES, nccl_all_sum, run_independently
from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.base import carry, outside_xla, uncarry
from tfrep_strategy.communicators.strings import gather_rows
from tfrep_strategy.gradients import buckets
from tfrep_strategy.packing import Packed

_ON_GPUS = NCCL_DTYPES - {tf.int32}  # TensorFlow keeps int32 in the memory of the host.


class WithinProcess:
    """Replicas that are the devices of one process: what they send each other is arithmetic in the graph that they share.

    Args:
        devices: The device of each replica.
        nccl: Whether NCCL connects them.
    """

    def __init__(self, devices: Sequence[str], nccl: bool) -> None:
        self.devices, self._nccl = devices, nccl

    def sums(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        if not self._nccl:
            return [self._everywhere(tf.add_n(list(each)), like=each) for each in values]
        packed = []
        for replica, device in enumerate(self.devices):
            with tf.device(device), outside_xla():
                packed.append(Packed([carry(each[replica]) for each in values]))
        flats = [self._sum_of_flats(flat) for flat in zip(*(each.flats for each in packed), strict=True)]
        own = []
        for replica, device in enumerate(self.devices):
            with tf.device(device), outside_xla():
                totals = packed[replica].unpack([flat[replica] for flat in flats])
                own.append([uncarry(t, each[replica].dtype) for t, each in zip(totals, values, strict=True)])
        return [list(each) for each in zip(*own, strict=True)]

    def _sum_of_flats(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with outside_xla():
            if flats[0].dtype not in _ON_GPUS:
                return self._everywhere(tf.add_n(list(flats)), like=flats)
            sums = nccl_all_sum(list(flats))
        for total in sums:  # If one result is unused and thus not computed, NCCL waits forever for its replica.
            run_independently(total.op)
        return list(sums)

    def gathered(self, values: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
        with tf.device(self.devices[0]), outside_xla():
            return self._everywhere(tf.concat(list(values), axis), like=values)

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._everywhere(values[0], like=values)

    def _everywhere(self, value: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        copies = []
        for device in self.devices[: len(like)]:
            with tf.device(device), outside_xla():
                copies.append(tf.identity(value))
        return copies


class BetweenProcesses:
    """Replicas that are the processes of a run.

    Args:
        communicator: That of this process.
        device: The device of its replica.
        bucket_bytes_for: Says in buckets of how many bytes tensors travel.
    """

    def __init__(
        self, communicator: Communicator, device: str, bucket_bytes_for: Callable[[Sequence[tf.Tensor]], int]
    ) -> None:
        self._communicator, self._bucket_bytes_for = communicator, bucket_bytes_for
        self.devices: Sequence[str] = (device,)

    def sums(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        own = [each for (each,) in values]
        totals: dict[int, tf.Tensor] = {}
        # The first that are computed travel first, while the others are computed.
        later_first, backwards = own[::-1], range(len(own))[::-1]
        with self._placed():
            for bucket in buckets(backwards, later_first, self._bucket_bytes_for(own)):
                totals.update(zip(bucket, self._communicator.all_reduce([own[i] for i in bucket]), strict=True))
        return [[totals[i]] for i in range(len(own))]

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
