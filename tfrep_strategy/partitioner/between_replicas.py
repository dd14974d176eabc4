"""The communication between the replicas of a partitioned step, inside one process or between processes."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.base import carry, outside_xla, uncarry
from tfrep_strategy.communicators.gradients import buckets
from tfrep_strategy.communicators.local import summed_everywhere
from tfrep_strategy.communicators.wire import DTYPES, Packed, compressed_gather, compressed_scatter, compressed_sum, gather_rows
from tfrep_strategy.partitioner.emitter import GroupTransport
from tfrep_strategy.partitioner.step import PartitionedStep

Values = Sequence[Sequence[tf.Tensor]]
BucketBytes = Callable[[Sequence[tf.Tensor]], int]
"""Returns the size in bytes of the buckets in which tensors travel."""

_FEW = 4096
"""The largest number of float32 values that are sent as float64."""


class Gradients(NamedTuple):
    """The way in which gradients travel.

    Attributes:
        bucket_bytes_for: See `BucketBytes`. It holds for all sums.
        compression: Returns the setting of this name.
        run: Runs a function on each replica of this process, given a tuple of arguments for each.
        timed: Calls a function with tensors, and measures the time from the last input to the last result.
    """

    bucket_bytes_for: BucketBytes
    compression: Callable[[], str | None]
    run: Callable[[Callable[..., Any], Sequence[Sequence[Any]]], Sequence[Any]]
    timed: Callable[[Callable[[Any], Any], Any], Any]


class _InBuckets(abc.ABC):
    """Sums tensors in buckets. Those that are computed first travel while the others are computed."""

    devices: Sequence[str]
    _are_packed = True
    logical_devices: Sequence[Sequence[str]]

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.groups: Mapping[str, GroupTransport] = {}

    def sums(self, values: Values, gradients: Sequence[bool]) -> list[list[tf.Tensor]]:
        compression = self._gradients.compression()
        if not any(gradients):
            return self._sums_of_one_dtype(values)
        if compression is None:
            return self._gradients.timed(functools.partial(self._in_buckets, talk=self._sums), values)
        own = [each for each, is_gradient in zip(values, gradients, strict=True) if is_gradient]
        others = [each for each, is_gradient in zip(values, gradients, strict=True) if not is_gradient]
        talk = functools.partial(self._compressed_sums, kind=compression)
        totals = iter(self._gradients.timed(functools.partial(self._in_buckets, talk=talk), own))
        plain = iter(self._in_buckets(others, self._sums))
        return [next(totals if is_gradient else plain) for is_gradient in gradients]

    def scattered(self, values: Values) -> list[list[tf.Tensor]]:
        return self._gradients.timed(functools.partial(self._in_buckets, talk=self._scattered), values)

    def rows_of_all(self, values: Values) -> list[list[tf.Tensor]]:
        return self._in_buckets(values, self._rows_of_all)

    def called(self, function: Callable[..., Any], values: Values) -> list[list[tf.Tensor]]:
        def call(*own: tf.Tensor) -> Sequence[tf.Tensor]:
            return function(own)

        return self._gradients.timed(lambda each: list(map(list, self._gradients.run(call, each))), values)

    def _sums_of_one_dtype(self, values: Values) -> list[list[tf.Tensor]]:
        """Sums tensors. A few float32 values travel with float64 ones, since a bucket has one dtype."""
        short = [i for i, each in enumerate(values) if each[0].dtype == tf.float32]
        sizes = [values[i][0].shape.num_elements() for i in short]
        has_long = any(each[0].dtype == tf.float64 for each in values)
        if not self._are_packed or not has_long or None in sizes or sum(sizes) > _FEW:
            return self._in_buckets(values, self._sums)
        sent = list(values)
        for i in short:
            sent[i] = self._cast(values[i], tf.float64)
        totals = self._in_buckets(sent, self._sums)
        for i in short:
            totals[i] = self._cast(totals[i], tf.float32)
        return totals

    def _cast(self, of_replicas: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
        cast = []
        for device, own in zip(self.devices, of_replicas, strict=True):
            with tf.device(device), outside_xla():
                cast.append(tf.cast(own, dtype))
        return cast

    def _in_buckets(self, values: Values, talk: Callable[[Values], list[list[tf.Tensor]]]) -> list[list[tf.Tensor]]:
        totals: dict[int, list[tf.Tensor]] = {}
        later_first, backwards = [each[0] for each in values][::-1], range(len(values))[::-1]
        for bucket in buckets(backwards, later_first, self._gradients.bucket_bytes_for(later_first)):
            totals.update(zip(bucket, talk([values[i] for i in bucket]), strict=True))
        return [totals[i] for i in range(len(values))]

    def compare(self, name: str, step: PartitionedStep) -> None:  # noqa: B027 (Replicas of one process have one step.)
        """Refuses a step that differs from that of other processes.

        Args:
            name: The name of the step, equal in all processes.
            step: The step, before it has run.
        """

    @abc.abstractmethod
    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        """Sums the tensors of a bucket."""

    @abc.abstractmethod
    def _compressed_sums(self, values: Values, kind: str) -> list[list[tf.Tensor]]:
        """Sums the tensors of a bucket. Float32 tensors travel in 16 bits."""

    @abc.abstractmethod
    def _scattered(self, values: Values) -> list[list[tf.Tensor]]:
        """Sums the tensors of a bucket, of shape `[replicas, width]`, and gives each replica its row."""

    @abc.abstractmethod
    def _rows_of_all(self, values: Values) -> list[list[tf.Tensor]]:
        """Gathers the vectors of a bucket."""


class WithinProcess(_InBuckets):
    """Replicas that are the devices of one process. Their communication is arithmetic in their common graph.

    Args:
        devices: The logical devices of each replica.
        nccl: Whether NCCL connects them.
        gradients: The way in which gradients travel.
    """

    def __init__(self, devices: Sequence[Sequence[str]], nccl: bool, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.logical_devices, self.devices, self._nccl = devices, [each[0] for each in devices], nccl
        self._are_packed = nccl

    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        own = self._at_each(lambda replica: [carry(each[replica]) for each in values])
        if self._nccl:  # NCCL launches a kernel on every GPU for each sum, so it gets few large tensors.
            packed = self._at_each(lambda replica: Packed(own[replica]))
            flats = self._summed([each.flats for each in packed])
            totals = self._at_each(lambda replica: packed[replica].unpack(flats[replica]))
        else:
            totals = self._summed(own)
        dtypes = [each[0].dtype for each in values]
        results = self._at_each(lambda replica: list(map(uncarry, totals[replica], dtypes)))
        return [list(each) for each in zip(*results, strict=True)]

    def _compressed_sums(self, values: Values, kind: str) -> list[list[tf.Tensor]]:
        long = [each for each in values if each[0].dtype != tf.float32]
        sums = iter(self._sums(long) if long else ())
        return [self._compressed_sum(each, DTYPES[kind]) if each[0].dtype == tf.float32 else next(sums) for each in values]

    def _compressed_sum(self, own: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
        halves = self._at_each(lambda replica: tf.cast(own[replica], dtype))
        with tf.device(self.devices[0]), outside_xla():
            total = tf.cast(tf.add_n([tf.cast(half, tf.float32) for half in halves]), dtype)
        return self._at_each(lambda replica: tf.cast(tf.identity(total), tf.float32))

    def _scattered(self, values: Values) -> list[list[tf.Tensor]]:
        kind = self._gradients.compression()
        totals = self._sums(values) if kind is None else self._compressed_sums(values, kind)
        return [self._own_rows(each) for each in totals]

    def _own_rows(self, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._at_each(lambda replica: totals[replica][replica])

    def _rows_of_all(self, values: Values) -> list[list[tf.Tensor]]:
        return [self.gathered([own[tf.newaxis] for own in each], 0) for each in values]

    def _summed(self, own: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Returns the sums over the replicas, for each replica."""
        with outside_xla():
            sums = [summed_everywhere(values, self._nccl) for values in zip(*own, strict=True)]
        return self._at_each(lambda replica: [tf.identity(each[replica]) for each in sums])

    def gathered(self, values: Sequence[tf.Tensor], axis: int, is_gradient: bool = False) -> list[tf.Tensor]:
        kind = self._gradients.compression() if is_gradient else None
        sent, dtype = list(values), values[0].dtype
        if kind is not None and dtype == tf.float32:
            short = DTYPES[kind]
            sent = self._at_each(lambda replica: tf.cast(values[replica], short))
        with tf.device(self.devices[0]), outside_xla():
            whole = tf.concat(sent, axis)
        return self._at_each(lambda replica: tf.cast(tf.identity(whole), dtype))

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._at_each(lambda replica: tf.identity(values[0]))

    def _at_each(self, make: Callable[[int], Any]) -> list[Any]:
        """Calls a function for each replica on its device, outside XLA."""
        made = []
        for replica, device in enumerate(self.devices):
            with tf.device(device), outside_xla():
                made.append(make(replica))
        return made


class Groups:
    """Groups of the replicas of this process, each with a transport, as one transport.

    Args:
        members: The indices of the replicas of each group, among those of the process.
        transports: The transport of each group.
    """

    def __init__(self, members: Sequence[Sequence[int]], transports: Sequence[GroupTransport]) -> None:
        self._members, self._transports = members, transports
        order = sorted((replica, i, place) for i, group in enumerate(members) for place, replica in enumerate(group))
        self._places = [(i, place) for _, i, place in order]
        self.devices: Sequence[str] = [transports[i].devices[place] for i, place in self._places]
        self.logical_devices: Sequence[Sequence[str]] = [transports[i].logical_devices[place] for i, place in self._places]

    def sums(self, values: Values, gradients: Sequence[bool]) -> Values:
        return self._of_several(lambda transport, own: transport.sums(own, gradients), values)

    def scattered(self, values: Values) -> list[list[tf.Tensor]]:
        return self._of_several(lambda transport, own: transport.scattered(own), values)

    def rows_of_all(self, values: Values) -> list[list[tf.Tensor]]:
        return self._of_several(lambda transport, own: transport.rows_of_all(own), values)

    def gathered(self, values: Sequence[tf.Tensor], axis: int, is_gradient: bool = False) -> list[tf.Tensor]:
        return self._of_one(lambda transport, own: transport.gathered(own, axis, is_gradient), values)

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._of_one(lambda transport, own: transport.first(own), values)

    def _of_one(self, talk: Callable[[GroupTransport, Any], Any], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Lets each group talk about a tensor, given its value on each replica."""
        pairs = zip(self._members, self._transports, strict=True)
        results = [talk(transport, [values[i] for i in group]) for group, transport in pairs]
        return [results[i][place] for i, place in self._places]

    def _of_several(self, talk: Callable[[GroupTransport, Any], Any], values: Values) -> list[list[tf.Tensor]]:
        """Lets each group talk about several tensors."""
        pairs = zip(self._members, self._transports, strict=True)
        results = [talk(transport, [[each[i] for i in group] for each in values]) for group, transport in pairs]
        return [[results[i][tensor][place] for i, place in self._places] for tensor in range(len(values))]


class BetweenProcesses(_InBuckets):
    """Replicas that are the processes of a run.

    Args:
        communicator: The communicator of this process.
        device: The device of its replica.
        gradients: The way in which gradients travel.
    """

    def __init__(self, communicator: Communicator, device: str, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.communicator = communicator
        self.devices, self.logical_devices = (device,), ((device,),)

    def _sums(self, values: Values) -> list[list[tf.Tensor]]:
        with self._placed():
            return [[total] for total in self.communicator.all_reduce([own for (own,) in values])]

    def _compressed_sums(self, values: Values, kind: str) -> list[list[tf.Tensor]]:
        with self._placed():
            return [[total] for total in compressed_sum(self.communicator, [own for (own,) in values], kind)]

    def _scattered(self, values: Values) -> list[list[tf.Tensor]]:
        kind, widths = self._gradients.compression(), [tf.shape(own)[1] for (own,) in values]
        with self._placed():
            rows = tf.concat([own for (own,) in values], 1)
            if kind is None:
                row = self.communicator.reduce_scatter(rows)
            else:
                row = compressed_scatter(self.communicator, rows, kind)
            return [[own] for own in tf.split(row[0], widths)]

    def _rows_of_all(self, values: Values) -> list[list[tf.Tensor]]:
        widths = [tf.shape(own)[0] for (own,) in values]
        with self._placed():
            whole = self.communicator.all_gather_equal(tf.concat([own for (own,) in values], 0))
            rows = tf.reshape(whole, [self.communicator.size, -1])
            return [[each] for each in tf.split(rows, widths, 1)]

    def gathered(self, values: Sequence[tf.Tensor], axis: int, is_gradient: bool = False) -> list[tf.Tensor]:
        (own,), kind = values, self._gradients.compression() if is_gradient else None
        gather = functools.partial(gather_rows, self.communicator.all_gather)
        with self._placed():
            if kind is not None:
                return [compressed_gather(self.communicator, own, kind)]
            if not axis:
                return [gather(own)]
            order = [axis, *(i for i in range(own.shape.rank) if i != axis)]
            back = [order.index(i) for i in range(own.shape.rank)]
            return [tf.transpose(gather(tf.transpose(own, order)), back)]

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with self._placed():
            return self.communicator.broadcast(list(values))

    def compare(self, name: str, step: PartitionedStep) -> None:
        known = weakref.ref(step)  # The lines may be requested when the step is gone.
        self.communicator.check_program(name, step.digest(), lambda: [] if (one := known()) is None else one.lines())

    def _placed(self) -> tf.device:
        return tf.device(self.devices[0])
