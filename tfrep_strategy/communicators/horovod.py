"""Horovod's TensorFlow operations as a communicator, over Gloo, MPI or NCCL, as Horovod was built.

Only the operations of `horovod.tensorflow` are used. Horovod's Keras front end does not reduce the gradients of Keras 3
optimizers. Horovod: Sergeev and Del Balso, arXiv:1802.05799.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfrep_strategy.cluster.devices import identity_of_gpu, nccl_connects, replica_device, warn_if_shared
from tfrep_strategy.cluster.horovod.gloo import SECRET, horovod_server, new_secret
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, sockets_closed_in_children
from tfrep_strategy.communicators.base import Communicator, carry, carry_moved, outside_xla, uncarry, uncarry_moved
from tfrep_strategy.communicators.order import Order, structural_name
from tfrep_strategy.communicators.peers.position import Position, sizes_of
from tfrep_strategy.communicators.wire import Packed, from_ordered, to_ordered
from tfrep_strategy.errors import ConfigurationError, message

_TAKES_GROUPS = "HOROVOD_DYNAMIC_PROCESS_SETS"
_KINDS = {
    "allreduce": "all_reduce", "grouped_allreduce": "all_reduce", "allgather": "all_gather",
    "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
"""Horovod's names of collectives, and those of a communicator."""


class HorovodCommunicator(Communicator):
    """Runs collectives over Horovod. A launcher that Horovod supports must have started the processes.

    Such launchers are `tfrep run` and `horovodrun`, and `mpirun` if Horovod was built with MPI.

    Args:
        process_set: A `horovod.tensorflow.ProcessSet`, for a subgroup. Default: all processes.
        device: The device of this process's replica. Default: chosen by the local rank.

    Raises:
        ConfigurationError: Horovod is not installed, or was built for another TensorFlow.
    """

    name = "horovod"
    _is_ours = False
    """Whether this class, and not the user's program, has started Horovod."""
    _groups: ClassVar[dict[tuple[int, ...], HorovodCommunicator | None]] = {}
    """The communicator of each group of global ranks. Horovod refuses a second process set of the same ranks."""

    _on_host = False
    """Whether tensors go through the memory of the host, because NCCL cannot connect the ranks' GPUs."""

    def __init__(self, process_set: Any = None, device: str | None = None) -> None:
        try:
            import horovod.tensorflow as hvd
        except Exception as error:  # Horovod raises errors of several types if its library does not load.
            raise ConfigurationError(
                message(
                    f"Horovod is not installed for this TensorFlow: {error}",
                    hint="run `tfrep horovod install`; `tfrep horovod status` shows details.",
                    code="TFREP-E005",
                )
            ) from error
        self._hvd = hvd
        is_of_all = process_set is None
        if is_of_all:
            if not hvd.is_initialized():
                self._start()
            process_set = hvd.global_process_set
        self._process_set = process_set
        self.rank, self.size = process_set.rank(), process_set.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._order = Order(f"tfrep_horovod_order_{process_set.process_set_id}", "CPU:0")
        self.position = Position()
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
        if is_of_all and self.size > 1 and hvd.nccl_built():
            self._choose_memory(device or replica_device(self.local_rank))

    def _choose_memory(self, device: str) -> None:
        """Leaves tensors on the GPUs if NCCL connects them. All ranks must call it."""
        self._on_host = True
        gpus = self.all_gather_object(identity_of_gpu(device))
        if self.rank == 0:
            warn_if_shared(gpus)
        self._on_host = any(gpus) and not nccl_connects(gpus)

    def _start(self) -> None:
        # All ranks must decide alike. HOROVOD_CROSS_SIZE may be 1 on a rank whose local rank occurs on one machine only.
        on_one_machine = os.environ.get("HOROVOD_LOCAL_SIZE") == os.environ.get("HOROVOD_SIZE")
        if self._hvd.mpi_built() or not on_one_machine:  # Then Horovod cannot be started again.
            os.environ.setdefault(_TAKES_GROUPS, "1")
        with sockets_closed_in_children():
            self._hvd.init()
        HorovodCommunicator._is_ours = True

    def _start_again(self) -> None:
        """Starts Horovod again, with support for groups. That support makes each cycle slower, so it is off at first.

        Rank 0 starts a rendezvous server for this start. The launcher's server may still hold the addresses of the first
        start: it removes them reliably only if no rank is ahead of another.
        """
        os.environ[_TAKES_GROUPS] = "1"
        port, secret = 0, ""
        if self.rank == 0:
            secret = new_secret()
            with sockets_closed_in_children():
                server = horovod_server(LOOPBACK, 0, secret)
            threading.Thread(target=server.serve_forever, daemon=True, name="tfrep-rendezvous").start()
            port = server.server_port
        port, secret = self.broadcast_object((port, secret))
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
        os.environ.update(where | {SECRET: secret})
        self._hvd.shutdown()
        self._start()

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        carried = [self._carried(t, op) for t in tensors]
        reduced: list[Any] = [None] * len(tensors)
        by_dtype: dict[Any, list[int]] = {}
        for i, tensor in enumerate(carried):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        # Horovod does not average integers. For every dtype, a mean is a sum that is divided afterwards.
        options = {
            "reduce_op": self._ops["sum" if op == "mean" else op],
            "prescale_factor": 1.0,
            "postscale_factor": 1.0,
        }
        for members in by_dtype.values():
            brought = [tensors[i] for i in members]
            if len(members) == 1:
                results = [self._call("allreduce", carried[members[0]], brought, **options)]
            else:
                results = self._call("grouped_allreduce", [carried[i] for i in members], brought, **options)
            for i, result in zip(members, results, strict=True):
                reduced[i] = tf.ensure_shape(self._uncarried(result, tensors[i].dtype, op), tensors[i].shape)
        return reduced

    def _carried(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        carried = carry(tensor, op)
        return carried if self._hvd.nccl_built() and not self._on_host else to_ordered(carried, op)

    def _uncarried(self, tensor: tf.Tensor, dtype: tf.DType, op: str) -> tf.Tensor:
        ordered = dtype.is_floating and not tensor.dtype.is_floating
        return uncarry(from_ordered(tensor, dtype, op) if ordered else tensor, dtype, op, self.size)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        gathered = uncarry_moved(self._call("allgather", _carry_bytes(tensor), [tensor]), tensor.dtype)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum") -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if op not in ("sum", "mean"):
            return super().reduce_scatter(tensor, op)
        options = {"reduce_op": self._ops["sum"], "prescale_factor": 1.0, "postscale_factor": 1.0}
        result = self._call("reducescatter", carry(tensor, op), [tensor], **options)
        return tf.ensure_shape(uncarry(result, tensor.dtype, op, self.size), [None, *tensor.shape[1:]])

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        root = self._process_set.ranks[root] if self._process_set.ranks else root
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        carried = [_carry_bytes(t) for t in tensors]
        if tf.executing_eagerly():
            # The monitor has compared the shapes. Horovod's ranks would negotiate each broadcast before it begins.
            packed = Packed(carried)
            received = packed.unpack([self._call("broadcast", flat, [flat], root_rank=root) for flat in packed.flats])
        else:
            received = [self._call("broadcast", c, [t], root_rank=root) for c, t in zip(carried, tensors, strict=True)]
        return [tf.ensure_shape(uncarry_moved(value, t.dtype), t.shape) for value, t in zip(received, tensors, strict=True)]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        rows, received = self._call("alltoall", _carry_bytes(tensor), [tensor], splits=tf.cast(splits, tf.int32))
        return tf.ensure_shape(uncarry_moved(rows, tensor.dtype), [None, *tensor.shape[1:]]), received

    def _call(self, kind: str, tensors: Any, brought: Sequence[tf.Tensor], **options: Any) -> Any:
        """Runs one of Horovod's collectives. `brought` are the tensors of the caller, and `tensors` carry them."""
        group = self._process_set.process_set_id
        name = structural_name(f"group{group}.{kind}" if group else kind)
        operation = getattr(self._mpi, f"horovod_{kind}")
        options |= {"name": name, "ignore_name_scope": True, "process_set_id": group}
        with tf.device("CPU:0") if self._on_host else contextlib.nullcontext():
            if tf.executing_eagerly():
                return operation(tensors, **options)
            return self._run_in_graph(operation, _KINDS.get(kind, kind), tensors, brought, options)

    def _run_in_graph(self, operation: Any, kind: str, tensors: Any, brought: Sequence[tf.Tensor], options: dict[str, Any]) -> Any:
        # Horovod's operations are not marked as stateful. TensorFlow's optimizer would evaluate one whose inputs are constant,
        # and remove one whose result is unused, perhaps on this rank only.
        with outside_xla():
            start = self._order.zero()
            entered = self.position.enter(kind, options["name"], brought, sizes_of(brought))
            with tf.control_dependencies([] if entered is None else entered[:1]):
                sent = tf.nest.map_structure(lambda tensor: _no_constant(tensor, start), tensors)
            result = tf.nest.map_structure(_opaque, operation(sent, **options))
            if entered is not None:
                self.position.leave(entered, tf.nest.flatten(result))
            # Horovod refuses two running collectives of one name. So a function is called again, and a loop continues, only after
            # all its collectives have ended. Within one call the names differ, and no collective waits for another.
            self._order.keep(result)
        return result

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if len(ranks) == self.size:
            return self
        if self._is_ours and _TAKES_GROUPS not in os.environ:
            self._start_again()
        members = tuple(self._process_set.ranks[r] for r in ranks)
        if members not in self._groups:
            try:
                process_set = self._hvd.add_process_set(list(members))
            except ValueError as error:
                raise ConfigurationError(
                    message(
                        "Horovod was started without support for groups of ranks.",
                        hint=f"set {_TAKES_GROUPS}=1 before `horovod.init()` is called.",
                        ranks=ranks,
                    )
                ) from error
            group = self._groups[members] = HorovodCommunicator(process_set) if self.rank in ranks else None
            if group is not None:
                group._on_host = self._on_host
        return self._groups[members]

    def abort(self, reason: str) -> None:
        aborted_before = not self._hvd.is_initialized()
        self._hvd.shutdown()
        if aborted_before and self._hvd.gloo_enabled():
            self._return_what_is_left()

    def _return_what_is_left(self) -> None:
        """Makes Horovod fail tensors that were submitted while it was emptying its queue.

        Horovod empties its queue again when a start fails. This process provokes that alone: it starts Horovod as a run of
        one process, with a process set of rank 1, which does not exist.
        """
        counts = {"RANK": "0", "SIZE": "1"}
        alone = {f"HOROVOD_{of}{name}": count for of in ("", "LOCAL_", "CROSS_") for name, count in counts.items()}
        before = {name: os.environ.get(name) for name in (*alone, "HOROVOD_GLOO_RENDEZVOUS_ADDR")}
        os.environ.update(alone)
        os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR", None)
        try:
            with contextlib.suppress(ValueError):
                self._hvd.init(process_sets=[self._hvd.ProcessSet([1])])
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def close(self) -> None:
        self._groups.clear()
        self._hvd.shutdown()

    @property
    def _mpi(self) -> Any:
        from horovod.tensorflow.mpi_ops import MPI_LIB

        return MPI_LIB


def _no_constant(tensor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Hides from TensorFlow's optimizer that the tensor is constant; shares its memory. `start` is 0, unknown to TensorFlow."""
    if tensor.shape.rank:
        return tensor[start:]
    flat = tf.reshape(tensor, [-1])  # Operations such as `tf.sparse.reduce_sum` do not report that they return a scalar.
    return flat[start] if tensor.shape.rank == 0 else tf.reshape(flat[start:], tf.shape(tensor))


def _opaque(tensor: tf.Tensor) -> tf.Tensor:
    """Passes the tensor through an operation that TensorFlow's optimizer neither evaluates nor removes."""
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def _carry_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Converts a tensor that is moved, not reduced: Horovod also moves the dtypes of one byte."""
    return tensor if tensor.dtype in (tf.bool, tf.uint8, tf.int8) else carry_moved(tensor)
