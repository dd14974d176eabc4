"""Losses whose value and gradient are those of the global batch.

In a step that Keras drives, a replica's loss is the mean over its own examples and its gradient is weighed by its share
of the global batch later (`optimizer.py`), so that a hand-written `ops.mean` is right too. In a custom loop gradients are
summed, as stock strategies have it, and a mean divides by the count of all replicas.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from tfrep_strategy.gradients import divide_no_nan
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import current_step, current_strategy, replica_strategy
from tfrep_strategy.keras_integration.whole_batch import sees_whole_batch, weighing_strategy

_loss = keras_internal("losses.loss")


def _scales() -> bool:
    """Whether losses are divided by the number of replicas: in the replicas of a custom loop, whose gradients are summed."""
    outside = current_strategy() is not None and replica_strategy() is None
    return current_step() is None and not sees_whole_batch() and not outside


@replaces(_loss, "scale_loss_for_distribution")
def scale_loss_for_distribution(original: Any, value: Any) -> Any:
    """A step that Keras drives weighs gradients, not losses; outside replicas a loss is that of the whole batch."""
    return original(value) if _scales() else value


@replaces(_loss, "unscale_loss_for_distribution")
def unscale_loss_for_distribution(original: Any, value: Any) -> Any:
    """Nothing to undo where nothing was scaled."""
    return original(value) if _scales() else value


@replaces(_loss, "reduce_values")
def reduce_values(
    original: Any, values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
) -> Any:
    """Divides by what all replicas have together, wherever this replica's own part would not do."""
    strategy, step = weighing_strategy(), current_step()
    if strategy is None or strategy.num_replicas_in_sync == 1 or reduction in (None, "none") or not len(values.shape):
        return original(values, sample_weight, reduction)
    total = ops.sum(values)
    weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
    if reduction == "sum":
        # The gradient will be multiplied by the share, which a sum is free of.
        return total if step is None else divide_no_nan(total, step.share)
    if step is None or weighs:
        divisor = ops.sum(sample_weight) if weighs else ops.prod(ops.cast(ops.shape(values), "int32"))
        divisor = strategy.sum_over_replicas([ops.cast(divisor, total.dtype)])[0]
        divisor = divisor if weighs else ops.stop_gradient(divisor)  # A count has none.
        mean = ops.divide_no_nan(total, divisor)
        return mean if step is None else divide_no_nan(mean, step.share)
    if 0 in values.shape:  # A replica that is known to have no examples; Keras would not even reduce them.
        return total
    return original(values, sample_weight, reduction)


@replaces(_loss, "apply_mask")
def apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
    """Makes the weight of an unmasked entry the one that it has in the global batch."""
    weight = original(sample_weight, mask, dtype, reduction)
    strategy = weighing_strategy()
    if strategy is None or strategy.num_replicas_in_sync == 1 or mask is None:
        return weight
    if reduction not in ("mean", "sum_over_batch_size"):
        return weight
    total = ops.cast(ops.size(mask), dtype)
    valid = ops.sum(ops.cast(mask, dtype))
    all_total, all_valid = map(ops.stop_gradient, strategy.sum_over_replicas([total, valid]))
    local, wanted = ops.divide_no_nan(total, valid), ops.divide_no_nan(all_total, all_valid)
    return weight * ops.divide_no_nan(wanted, local)
