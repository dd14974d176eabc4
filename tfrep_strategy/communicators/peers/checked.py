"""A communicator that wraps another one, compares the ranks' calls, and reports missing ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.flight_recorder import RECORDER
from tfrep_strategy.communicators.base import Communicator, HostCommunicator, SingleCommunicator
from tfrep_strategy.communicators.order import Order
from tfrep_strategy.communicators.peers.monitor import PeerMonitor
from tfrep_strategy.communicators.peers.reports import describe_difference, group_of
from tfrep_strategy.core.calls import Call, line_of, purpose, user_line
from tfrep_strategy.errors import DesyncError

_Result = TypeVar("_Result")


class CheckedCommunicator(Communicator):
    """Reports collectives to the other ranks before the inner communicator runs them.

    Every eager collective is reported. It begins when all ranks have reported the same call. If the calls differ, every
    rank gets an error and can continue afterwards. With `TFREP_DEBUG=1` collectives in functions are reported too, each time
    they run.

    Args:
        inner: The communicator that does the work.
        monitor: Sends the reports.
        group: The ranks that take part. Default: all.

    If rank 0 calls `all_reduce([tf.ones([1])])` and rank 1 calls `all_reduce([tf.ones([2])])`, both raise::

        DesyncError: Ranks called different collectives.
          rank 0: all_reduce(float32[1], sum) at train.py:7
          rank 1: all_reduce(float32[2], sum) at train.py:7

    Example:
        >>> inner = tfrep.communicators.SingleCommunicator()
        >>> communicator = CheckedCommunicator(inner, PeerMonitor.start(inner))
        >>> communicator.all_reduce([tf.ones([2])])[0].numpy().tolist()
        [1.0, 1.0]
        >>> communicator.close()
    """

    def __init__(self, inner: Communicator, monitor: PeerMonitor, group: Sequence[int] | None = None) -> None:
        self.inner, self.monitor = inner, monitor
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.bucket_bytes = inner.bucket_bytes
        self._group = group_of(range(inner.size) if group is None else group)
        if getattr(inner, "position", None) is not None:
            monitor.follow(self._group, inner.position)  # type: ignore[attr-defined]
        if isinstance(inner, HostCommunicator):
            inner.group = self._group
        if hasattr(inner, "on_refusal"):
            inner.on_refusal = monitor.refuse_in_function
        if monitor.checks_every_call:
            # TensorFlow may run a Python function at any time; this resource keeps the reports in program order.
            self._order = Order(f"tfrep_checked_order_{'_'.join(map(str, self._group))}", "CPU:0")

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose errors of collectives name a rank that has ended; see `PeerMonitor.watching`."""
        return self.monitor.watching(self._group)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        return self._call("all_reduce", op, tensors, lambda ts: self.inner.all_reduce(ts, op)) if tensors else []

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._call("all_gather", "", [tensor], lambda ts: self.inner.all_gather(ts[0]))

    def all_gather_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._call("all_gather_equal", "", [tensor], lambda ts: self.inner.all_gather_equal(ts[0]))

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        option = f"root={root}"
        return self._call("broadcast", option, tensors, lambda ts: self.inner.broadcast(ts, root)) if tensors else []

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._call("all_to_all", "", [tensor], lambda ts: self.inner.all_to_all(ts[0], splits))

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        return self._call("reduce_scatter", op, [tensor], lambda ts: self.inner.reduce_scatter(ts[0], op))

    def barrier(self) -> None:
        return self._call("barrier", "", [], lambda ts: self.inner.barrier())

    def all_gather_object(self, value: Any) -> list[Any]:
        own = Call("all_gather_object", purpose(), (), user_line())
        gathered = self._call(own.kind, own.option, [], lambda ts: self.inner.all_gather_object((own, value)))
        calls = [call for call, _ in gathered]
        if not all(call.fits(own) for call in calls):  # The gathered objects would belong to different calls.
            words = list(zip(self._group, map(str, calls), strict=True))
            raise DesyncError(describe_difference("Ranks called different collectives.", words))
        return [value for _, value in gathered]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        option = f"root={root}, {purpose()}"
        return self._call("broadcast_object", option, [], lambda ts: self.inner.broadcast_object(value, root))

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        inner = self._call("subgroup", str(list(ranks)), [], lambda ts: self.inner.subgroup(ranks))
        return None if inner is None else CheckedCommunicator(inner, self.monitor, [self._group[r] for r in ranks])

    def check_program(self, name: str, digest: bytes, lines: Callable[[], Sequence[tuple[str, str]]]) -> None:
        self.monitor.programs.compare(f"{name} of {self._group}", digest, lines)

    def note_call(self, what: str) -> None:
        self.monitor.check(self._group)
        self.monitor.programs.note_call(str(self._group), what, user_line())

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.monitor.close()
        self.inner.close()

    def _call(self, kind: str, option: str, tensors: Sequence[Any], work: Callable[[list[tf.Tensor]], _Result]) -> _Result:
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tf.executing_eagerly():
            return work(self._report_in_graph(kind, option, tensors) if self.monitor.checks_every_call else tensors)
        self.monitor.check(self._group)
        shapes = tuple((tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors)
        call = Call(kind, option, shapes, user_line())
        # What an error of the collective says needs the record of it, so that is the outer block.
        with RECORDER.collective(self._group, call), self.monitor.watching(self._group, single=True):
            self.monitor.report(self._group, call)
            return work(tensors)

    def _report_in_graph(self, kind: str, option: str, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds an operation that reports each time that the function runs, before the collective."""
        dtypes = [tensor.dtype.name for tensor in tensors]
        mark = self._order.mark()
        line = line_of(mark)

        def report(*shapes: Any) -> Any:
            described = tuple((dtype, tuple(map(int, shape))) for dtype, shape in zip(dtypes, shapes, strict=True))
            try:
                self.monitor.report(self._group, Call(kind, option, described, line))
            except DesyncError as error:  # TensorFlow replaces the error.
                self.monitor.refuse_in_function(error)
                raise
            return np.int32(0)

        with tf.control_dependencies([mark]), tf.device("CPU:0"):
            reported = tf.numpy_function(report, [tf.shape(tensor) for tensor in tensors], tf.int32)
        with tf.control_dependencies([reported]):
            self._order.mark()
            return [tf.identity(tensor) for tensor in tensors]


def watched(communicator: Communicator, hosts: Sequence[str] = (), watch: Callable[[int], Any] = lambda rank: None) -> Communicator:
    """Connects the monitors of all ranks, so that no rank waits for one that has ended.

    Args:
        communicator: The communicator of all ranks. Every rank must call this.
        hosts: The machine of each rank, as far as known.
        watch: Starts the watcher of this rank, if it needs one; see `cluster/watcher.py`.

    Returns:
        A checked communicator. The given communicator if it talks to no other process, or the ranks cannot be connected.
    """
    is_alone = communicator.size == 1 or isinstance(communicator, SingleCommunicator)
    monitor = None if is_alone else PeerMonitor.start(communicator, hosts, watch=watch)
    return communicator if monitor is None else CheckedCommunicator(communicator, monitor)
