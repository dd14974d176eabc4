"""Collectives under TensorFlow's own strategies, such as `tf.distribute.TPUStrategy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator, carry, uncarry
from tfrep_strategy.errors import ConfigurationError, message

_REDUCTIONS = {"min": tf.reduce_min, "max": tf.reduce_max, "product": tf.reduce_prod}


class ContextCommunicator(Communicator):
    """Builds every collective from the two that each strategy of TensorFlow has: a sum, and a gather of equal shapes.

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
        if op in _REDUCTIONS:
            return uncarry(_REDUCTIONS[op](self.all_gather(carried[tf.newaxis]), axis=0), tensor.dtype, op)
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
