"""The replica contexts of our strategies: gradients through `all_reduce` are exact for uneven batches too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import MirroredReplicaContext, ReplicaContext
from tfrep_strategy.gradients import divide_no_nan, multiply_no_nan
from tfrep_strategy.keras_integration.protocol import current_step


class _WeighedGradient:
    """Overrides `all_reduce` inside steps that Keras drives.

    Such a step minimizes `sum_r share_r * loss_r`, and a replica multiplies its gradients by its share only after backward.
    A gradient that flows back through an all-reduce comes from the losses of all replicas. It is therefore multiplied by
    the share of the replica that it comes from, and divided by the share of the replica that it arrives at.
    """

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        step = current_step()
        flat = tf.nest.flatten(value)
        if step is None or any(isinstance(v, tf.IndexedSlices) for v in flat):
            return super().all_reduce(reduce_op, value, options)  # type: ignore[misc]
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        extended = self.strategy.extended  # type: ignore[attr-defined]

        @tf.custom_gradient
        def reduce(*xs: tf.Tensor) -> Any:
            def gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
                if step.loss_is_scaled:
                    return list(extended._replica_ctx_all_reduce(reduce_op, list(dys), options))
                weighed = [multiply_no_nan(dy, step.share) for dy in dys]
                arrived = extended._replica_ctx_all_reduce(reduce_op, weighed, options)
                return [divide_no_nan(x, step.share) for x in arrived]

            return list(extended._replica_ctx_all_reduce(reduce_op, list(xs), options)), gradient

        return tf.nest.pack_sequence_as(value, tf.nest.flatten(reduce(*map(tf.convert_to_tensor, flat))))


class ProcessReplicaContext(_WeighedGradient, ReplicaContext):
    """The context of the one replica of a process."""


class DeviceReplicaContext(_WeighedGradient, MirroredReplicaContext):
    """The context of one of several replicas of a process."""
