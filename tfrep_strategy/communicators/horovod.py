"""Horovod's TensorFlow operations as a communicator (Gloo, MPI or NCCL, whatever Horovod was built with).

Only `horovod.tensorflow` ops are used. Horovod's Keras front end does not reduce the gradients of Keras 3 optimizers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator
from tfrep_strategy.communicators.naming import structural_name
from tfrep_strategy.errors import ConfigurationError, message

# Horovod reduces no booleans and no unsigned numbers; these are carried by the next wider type that it does reduce.
_CARRIERS = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
             tf.uint32: tf.int64, tf.uint64: tf.int64, tf.bfloat16: tf.float32}  # fmt: skip


def is_installed() -> bool:
    """Whether Horovod can be imported. It may still lack TensorFlow support, which `HorovodCommunicator` reports."""
    return importlib.util.find_spec("horovod") is not None


class HorovodCommunicator(Communicator):
    """Collectives over Horovod. The processes must have been started for it (`tfrep run`, `horovodrun`, `mpirun`).

    Args:
        process_set: A `horovod.tensorflow.ProcessSet`, for a subgroup. Default: all processes.

    Raises:
        ConfigurationError: when Horovod is not installed, or was built for another TensorFlow.
    """

    name = "horovod"

    def __init__(self, process_set: Any = None) -> None:
        try:
            import horovod.tensorflow as hvd
        except Exception as error:  # Horovod raises its own kinds of errors for a library that does not load.
            raise ConfigurationError(
                "Horovod is not installed for this TensorFlow. Run: tfrep horovod install"
            ) from error
        self._hvd = hvd
        if process_set is None:
            hvd.init()
            process_set = hvd.global_process_set
        self._process_set = process_set
        self.rank, self.size = process_set.rank(), process_set.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._ops = {"sum": hvd.Sum, "mean": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        carried = [self._carry(t) for t in tensors]
        # Integers have no average in Horovod; a mean is a sum, divided, for every dtype alike.
        hvd_op = self._ops["sum" if op == "mean" else op]
        if len(carried) == 1:
            reduced = [self._mpi.horovod_allreduce(
                carried[0], name=structural_name("all_reduce"), reduce_op=hvd_op, prescale_factor=1.0, postscale_factor=1.0,
                ignore_name_scope=True, process_set_id=self._process_set.process_set_id)]  # fmt: skip
        elif carried:
            reduced = self._mpi.horovod_grouped_allreduce(
                carried, name=structural_name("all_reduce"), reduce_op=hvd_op, prescale_factor=1.0, postscale_factor=1.0,
                ignore_name_scope=True, process_set_id=self._process_set.process_set_id)  # fmt: skip
        else:
            reduced = []
        if op == "mean":
            reduced = [tf.cast(r / tf.cast(self.size, r.dtype), r.dtype) for r in reduced]
        return [tf.ensure_shape(tf.cast(r, t.dtype), t.shape) for r, t in zip(reduced, tensors, strict=True)]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        gathered = self._mpi.horovod_allgather(
            self._carry(tensor, bytes_too=False), name=structural_name("all_gather"), ignore_name_scope=True,
            process_set_id=self._process_set.process_set_id)  # fmt: skip
        return tf.cast(gathered, tensor.dtype)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        root = self._process_set.ranks[root]
        received = []
        for tensor in map(tf.convert_to_tensor, tensors):
            value = self._mpi.horovod_broadcast(
                self._carry(tensor, bytes_too=False), name=structural_name("broadcast"), root_rank=root,
                ignore_name_scope=True, process_set_id=self._process_set.process_set_id)  # fmt: skip
            received.append(tf.ensure_shape(tf.cast(value, tensor.dtype), tensor.shape))
        return received

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        rows, received = self._mpi.horovod_alltoall(
            self._carry(tensor, bytes_too=False), splits=tf.cast(splits, tf.int32), name=structural_name("all_to_all"),
            ignore_name_scope=True, process_set_id=self._process_set.process_set_id)  # fmt: skip
        return tf.cast(rows, tensor.dtype), received

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        try:
            process_set = self._hvd.add_process_set(ranks)
        except ValueError as error:
            raise ConfigurationError(
                message(
                    "Horovod refuses new groups of ranks.",
                    hint="set HOROVOD_DYNAMIC_PROCESS_SETS=1 before the processes start; `tfrep run` does.",
                    ranks=ranks,
                )
            ) from error
        return HorovodCommunicator(process_set) if self.rank in ranks else None

    def close(self) -> None:
        self._hvd.shutdown()

    @property
    def _mpi(self) -> Any:
        from horovod.tensorflow.mpi_ops import MPI_LIB

        return MPI_LIB

    @staticmethod
    def _carry(tensor: tf.Tensor, bytes_too: bool = True) -> tf.Tensor:
        if not bytes_too and tensor.dtype in (tf.bool, tf.uint8, tf.int8):
            return tensor
        return tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype))
