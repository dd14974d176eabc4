"""The replica contexts of our strategies: gradients through `all_reduce` are exact for uneven batches too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import MirroredReplicaContext, ReplicaContext, stop_recording
from tfrep_strategy.keras_integration.protocol import current_share


class _WeighedGradient:
    """Overrides `all_reduce` in steps that weigh by examples: its gradients have the shares of others (`Share.through`)."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        share = current_share()
        flat = tf.nest.flatten(value)
        if share is None or any(isinstance(v, tf.IndexedSlices) for v in flat):
            return super().all_reduce(reduce_op, value, options)  # type: ignore[misc]
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        extended = self.strategy.extended  # type: ignore[attr-defined]

        def reduced(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return tf.nest.flatten(reduce(*tensors))

        @tf.custom_gradient
        def reduce(*xs: tf.Tensor) -> Any:
            with stop_recording():  # A tape would ask TensorFlow's collective for a gradient.
                totals = list(extended._replica_ctx_all_reduce(reduce_op, list(xs), options))
            return totals, lambda *dys: share.through(reduced, dys)  # That of the gradient is such a sum, too.

        own = list(map(tf.convert_to_tensor, flat))
        return tf.nest.pack_sequence_as(value, reduced(own))


class ProcessReplicaContext(_WeighedGradient, ReplicaContext):
    """The context of the one replica of a process."""


class DeviceReplicaContext(_WeighedGradient, MirroredReplicaContext):
    """The context of one of several replicas of a process."""
