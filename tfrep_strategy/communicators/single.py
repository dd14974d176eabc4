"""The communicator of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator


class SingleCommunicator(Communicator):
    """Rank 0 of 1: every collective returns its argument."""

    name = "single"
    rank, size = 0, 1

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        return [tf.convert_to_tensor(t) for t in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(tensor)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        return [tf.convert_to_tensor(t) for t in tensors]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.identity(tensor), tf.identity(tf.cast(splits, tf.int32))

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self.check_group(ranks)
        return self
