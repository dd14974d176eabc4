"""Losses and metrics in replicas: in loops written for them, and in steps that weigh by examples.

In a loop of the user's own gradients are summed, as under TensorFlow's strategies, and a mean divides by the count of all replicas.
In a step whose replicas have batches of their own, a loss is the mean over the replica's examples, and its share (`shares.py`)
weighs the gradient later (`optimizer.py`). A step of one device needs none of this.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from tfrep_strategy.keras_integration.protocol import current_share
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.losses_of_replicas import LossesOfReplicas
from tfrep_strategy.keras_integration.synchronous.whole_batch import loss_of_whole_batch, mixes_rows, sees_whole_batch


class Losses(SynchronousBase):
    """What losses and their parts do."""

    def compute_loss(self, original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Computes one of Keras's losses that mix rows from the rows of all replicas; others from this replica's own."""
        if self._sees_part and mixes_rows(loss, y_pred):
            return loss_of_whole_batch(self.strategy, original, loss, y_true, y_pred, sample_weight)
        return original(loss, y_true, y_pred, sample_weight)

    def apply_mask(self, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
        """Makes the weight of an unmasked entry the one that it has in the global batch."""
        if not self._sees_part or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        total = ops.cast(ops.size(mask), dtype)
        valid = ops.sum(ops.cast(mask, dtype))
        all_total, all_valid = map(ops.stop_gradient, self.strategy.extended.sum_over_replicas([total, valid]))
        share = current_share()
        # A step weighs by rows, which have other lengths on each replica where each reads its own data.
        entries = all_total if share is None else share.unweigh(total)
        return original(sample_weight, mask, dtype, None) * ops.divide_no_nan(entries, all_valid)

    def reduce_loss(
        self, original: Any, values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        """Divides by what all replicas have together, wherever this replica's own part would not do."""
        share = current_share()
        if not self._sees_part or reduction in (None, "none") or not len(values.shape):
            return original(values, sample_weight, reduction)
        total = ops.sum(values)
        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        if reduction == "sum":
            return total if share is None else share.unweigh(total)
        if share is None or weighs:
            divisor = ops.sum(sample_weight) if weighs else ops.prod(ops.cast(ops.shape(values), "int32"))
            divisor = self.strategy.extended.sum_over_replicas([ops.cast(divisor, total.dtype)])[0]
            divisor = divisor if weighs else ops.stop_gradient(divisor)  # A count has none.
            mean = ops.divide_no_nan(total, divisor)
            return mean if share is None else share.unweigh(mean)
        if 0 in values.shape:  # A replica that is known to have no examples; Keras would not even reduce them.
            return total
        return original(values, sample_weight, reduction)

    def scale_for_replicas(self, original: Any, value: Any) -> Any:
        """A step that weighs gradients does not weigh losses; outside replicas a loss is that of the whole batch."""
        return original(value) if self._divides_by_replicas else value

    def unscale_for_replicas(self, original: Any, value: Any) -> Any:
        """Nothing to undo where nothing was scaled."""
        return original(value) if self._divides_by_replicas else value

    def update_mean(self, original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        """Weighs a scalar without a weight, such as a loss, by the replica's share of the batch."""
        share = current_share()
        if share is not None and not sees_whole_batch.value and not ops.shape(values):
            # The mean over no examples is no number, which a weight of zero would not remove.
            (values,) = share.silenced([ops.cast(values, metric.dtype)])
            if sample_weight is None:
                sample_weight = share.as_weight(metric.dtype)
        return original(metric, values, sample_weight=sample_weight)

    def add_loss(self, original: Any, layer: Any, loss: Any) -> None:
        """Gives each replica losses of its own."""
        several = self.in_replica and self.strategy.extended.num_local_replicas > 1
        if several and not isinstance(layer._losses, LossesOfReplicas):
            vars(layer)["_losses"] = LossesOfReplicas(layer._losses)  # Keras would make an ordinary list of it.
        original(layer, loss)

    @property
    def _sees_part(self) -> bool:
        """Whether this is one of several replicas, and the loss that is computed now is that of its part of the batch."""
        return self.has_several and self.in_replica and not sees_whole_batch.value

    @property
    def _divides_by_replicas(self) -> bool:
        """Whether losses are divided by the number of replicas: in a custom loop, whose gradients are summed."""
        return current_share() is None and not sees_whole_batch.value and self.in_replica
