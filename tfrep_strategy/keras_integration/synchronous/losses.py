"""Losses whose value and gradient are those of the global batch.

In a step that Keras drives, a replica's loss is the mean over its own examples. Its share (`shares.py`) weighs the gradient later
(`optimizer.py`), so a hand-written `ops.mean` is right too. In a custom loop gradients are summed, as under TensorFlow's own
strategies, and a mean divides by the count of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import get_keras_mask, in_stateless_scope
from tfrep_strategy.keras_integration.protocol import Step, current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.batch_sums import (
    are_rows,
    as_mean,
    can_follow,
    depends_on_other_rows,
    of_all_rows,
    part_of_global,
    puts_rows_together,
)
from tfrep_strategy.keras_integration.synchronous.losses_of_replicas import LossesOfReplicas
from tfrep_strategy.keras_integration.synchronous.mixing_layers import look_for_mixed_rows
from tfrep_strategy.keras_integration.synchronous.own_functions import (
    Sees,
    is_of_keras,
    loss_needs_all_rows,
    what_metric_sees,
)
from tfrep_strategy.keras_integration.synchronous.row_growth import depends_on_rows
from tfrep_strategy.keras_integration.synchronous.whole_batch import (
    loss_of_whole_batch,
    mixes_rows,
    sees_whole_batch,
    update_everywhere,
    update_on_first_replica,
    update_with_whole_batch,
)

_updates_metric = Setting(False)
"""Whether a metric is updated, whose state is summed over the replicas."""


class Losses(SynchronousBase):
    """What losses and their parts do."""

    def compute_loss(self, original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Computes a loss that mixes rows from the rows of all replicas; others from this replica's own."""
        if self._sees_part:
            look_for_mixed_rows(y_pred)
        if not self._sees_part or _were_compared(y_true, y_pred):
            return original(loss, y_true, y_pred, sample_weight)
        if not (mixes_rows(loss, y_pred) or _is_own_and_mixes_rows(loss, original, y_true, y_pred)):
            return original(loss, y_true, y_pred, sample_weight)
        return loss_of_whole_batch(self.strategy, original, loss, y_true, y_pred, sample_weight)

    def apply_mask(self, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
        """Makes the weight of an unmasked entry the one that it has in the global batch."""
        if not self._sees_part or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        total = ops.cast(ops.size(mask), dtype)
        valid = ops.sum(ops.cast(mask, dtype))
        all_total, all_valid = map(ops.stop_gradient, self.strategy.extended.sum_over_replicas([total, valid]))
        step = current_step()
        # A step weighs by rows, which have other lengths on each replica where each reads its own data.
        entries = all_total if step is None else step.share.unweigh(total)
        return original(sample_weight, mask, dtype, None) * ops.divide_no_nan(entries, all_valid)

    def reduce_loss(
        self, original: Any, values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        """Divides by what all replicas have together, wherever this replica's own part would not do."""
        step = current_step()
        if not self._sees_part or reduction in (None, "none") or not len(values.shape):
            return original(values, sample_weight, reduction)
        total = ops.sum(values)
        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        if reduction == "sum":
            if step is None or _updates_metric.value or can_follow(step, total):
                if step is not None and not _updates_metric.value:
                    step.gives_means = False
                return total
            return step.share.unweigh(total)
        if step is None or weighs:
            divisor = ops.sum(sample_weight) if weighs else ops.prod(ops.cast(ops.shape(values), "int32"))
            divisor = self.strategy.extended.sum_over_replicas([ops.cast(divisor, total.dtype)])[0]
            divisor = divisor if weighs else ops.stop_gradient(divisor)  # A count has none.
            mean = ops.divide_no_nan(total, divisor)
            return mean if step is None else step.share.unweigh(mean)
        if 0 in values.shape:  # A replica that is known to have no examples; Keras would not even reduce them.
            return total
        return original(values, sample_weight, reduction)

    def scale_for_replicas(self, original: Any, value: Any) -> Any:
        """A step that Keras drives weighs gradients, not losses; outside replicas a loss is that of the whole batch."""
        return original(value) if self._divides_by_replicas else value

    def unscale_for_replicas(self, original: Any, value: Any) -> Any:
        """Nothing to undo where nothing was scaled. Keras's own steps give their losses, which are means."""
        step = current_step()
        if step is not None and (step.rows_are_fixed or step.gives_means):
            step.note_mean(value)
        return original(value) if self._divides_by_replicas else value

    def update_mean(self, original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        """Weighs a scalar without a weight, such as the loss of a custom step, by the replica's share of the batch."""
        step = current_step()
        if step is not None and isinstance(values, (list, tuple)):
            values = ops.convert_to_tensor(values)  # As Keras does, later.
        if step is not None and self._sees_part and (whole := self._of_compared_rows((values, sample_weight))) is not None:
            return update_on_first_replica(original, metric, whole, {})
        if step is not None and _have_one_weight(values, sample_weight):
            values = ops.mean(ops.cast(values, metric.dtype))  # This, too.
        if step is not None and not sees_whole_batch.value and not keras.ops.shape(values):
            # The mean over no examples is no number, which a weight of zero would not remove.
            (values,) = step.share.silenced([as_mean(step, ops.cast(values, metric.dtype))])
            if sample_weight is None:
                sample_weight = step.share.as_weight(metric.dtype)
            elif _is_the_same_everywhere(step, sample_weight):
                sample_weight = ops.cast(sample_weight, metric.dtype) * step.share.as_weight(metric.dtype)
        return original(metric, values, sample_weight=sample_weight)

    def add_loss(self, original: Any, layer: Any, loss: Any) -> None:
        """Lets a loss that a layer sums over rows be weighed as others are, which are means. Each replica has losses of its own."""
        step = current_step()
        if step is not None and self._sees_part:
            loss = keras.tree.map_structure(lambda value: _added(step, value), loss)
        several = self.in_replica and self.strategy.extended.num_local_replicas > 1
        if several and not isinstance(layer._losses, LossesOfReplicas):
            vars(layer)["_losses"] = LossesOfReplicas(layer._losses)  # Keras would make an ordinary list of it.
        original(layer, loss)

    def make_metric(self, original: Any, metric: Any, *args: Any, **kwargs: Any) -> None:
        """Finds the metrics of users, whose updates may need the whole batch, and those that a model makes when it is built."""
        KerasDriver.update_metric.install_in(type(metric))
        KerasDriver.metric_result.install_in(type(metric))
        original(metric, *args, **kwargs)

    def make_loss(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Finds the losses of users that do all of it themselves."""
        if not is_of_keras(type(loss)):
            KerasDriver.compute_loss.install_in(type(loss))
        original(loss, *args, **kwargs)

    def update_metric(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Updates a metric that is no sum over the rows, such as a maximum, on one replica with the rows of all."""
        if current_step() is None or not self._sees_part or in_stateless_scope():
            return original(metric, *args, **kwargs)
        if _are_scalars(original, args, kwargs):
            return self._update_with_scalars(original, metric, args, kwargs)
        if (whole := self._of_compared_rows((args, kwargs))) is not None:
            args, kwargs = whole
            return update_on_first_replica(original, metric, args, kwargs)
        if isinstance(metric, keras.metrics.Sum) and is_of_keras(original):
            return _update_sum(original, metric, *args, **kwargs)
        together = _is_of_rows_together(metric, args, kwargs)
        sees = Sees.ALL_ROWS if together else what_metric_sees(metric, original, args, kwargs)
        if sees is Sees.WHAT_IT_GATHERS:
            return update_everywhere(original, metric, args, kwargs)
        if sees is Sees.OWN_ROWS:
            with _updates_metric.to(True):
                return original(metric, *args, **kwargs)
        args, kwargs = keras.tree.map_structure(_of_whole_batch_if_scalar, (args, kwargs))
        return update_with_whole_batch(self.strategy, original, metric, args, kwargs)

    def _update_with_scalars(self, original: Any, metric: Any, args: Any, kwargs: Any) -> Any:
        """Updates a metric of the user's own with scalars of the global batch, on the first replica alone."""
        args, kwargs = keras.tree.map_structure(_of_whole_batch_if_scalar, (args, kwargs))
        update_on_first_replica(original, metric, args, kwargs)

    def _of_compared_rows(self, given: Any) -> Any | None:
        """Returns what all replicas give together, if a step of the user's own has compared rows for it, and None otherwise.

        So it does if no tensor has rows any more, as a matrix of correlations between features.
        """
        step: Any = current_step()
        flat = keras.tree.flatten(given)
        tensors = [each for each in flat if tf.is_symbolic_tensor(each) and each.shape.rank]
        if not step.is_own or not (any(depends_on_other_rows(step, each) for each in tensors) or _put_rows_together(step, tensors)):
            return None
        flat = [None if value is None else ops.convert_to_tensor(value) for value in flat]
        whole = [value if value is None else of_all_rows(step, value) for value in flat]
        if any(value is not None and new is None for value, new in zip(flat, whole, strict=True)):
            return None
        return keras.tree.pack_sequence_as(given, whole)

    @property
    def _sees_part(self) -> bool:
        """Whether this is one of several replicas, and the loss that is computed now is that of its part of the batch."""
        return self.has_several and self.in_replica and not sees_whole_batch.value

    @property
    def _divides_by_replicas(self) -> bool:
        """Whether losses are divided by the number of replicas: in a custom loop, whose gradients are summed."""
        return current_step() is None and not sees_whole_batch.value and self.in_replica


def _put_rows_together(step: Step, tensors: Sequence[tf.Tensor]) -> bool:
    """Whether some of these tensors were computed from rows, and none of them has any."""
    from_rows = [each for each in tensors if not step.has_computed(each) or depends_on_rows(step, each)]
    return bool(from_rows) and all(puts_rows_together(step, each) for each in from_rows)


def _added(step: Step, value: Any) -> tf.Tensor:
    """Returns a loss that a layer adds as one that the share can weigh. Keras's own steps add up what is no scalar."""
    value = ops.convert_to_tensor(value)
    # The graph of a step, or part, of the user's own tells what becomes of it.
    if not value.shape.rank or (step.is_own and not (step.only_parts_are_own and tf.executing_eagerly())):
        return as_mean(step, value)
    total = ops.sum(value)
    return step.share.unweigh(total) if are_rows(step, value) else as_mean(step, total)


def _update_sum(original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Adds a replica's part of a scalar, such as the loss of a custom step. A sum over its rows, and rows, count whole."""
    step: Any = current_step()
    if not ops.shape(values) and (sample_weight is None or not ops.shape(sample_weight)):
        values = ops.cast(values, metric.dtype)
        if sample_weight is not None:
            values, sample_weight = values * ops.cast(sample_weight, metric.dtype), None
        values = part_of_global(step, values)
    return original(metric, values, sample_weight=sample_weight)


def _have_one_weight(values: Any, sample_weight: Any) -> bool:
    """Whether these are the values of rows, none of which is masked, with one weight for all: a loss without a reduction."""
    if sample_weight is None or get_keras_mask(values) is not None:
        return False
    return not ops.shape(sample_weight) and bool(ops.shape(values))


def _is_the_same_everywhere(step: Step, weight: Any) -> bool:
    """Whether the weight of a mean comes from no rows, as the size of the global batch does; a replica's own count of rows does."""
    if not step.is_own or tf.executing_eagerly() or step.rows_are_fixed or ops.shape(weight):
        return False
    return not depends_on_rows(step, weight) if step.has_computed(weight) else not tf.is_tensor(weight)


def _of_whole_batch_if_scalar(value: Any) -> Any:
    """Returns what one device has in place of a number, such as the loss of a step, and other things as they are."""
    step: Any = current_step()
    is_number = tf.is_symbolic_tensor(value) and value.dtype.is_numeric and value.shape.rank == 0
    if not is_number or step.is_in_branch or not step.has_computed(value) or not depends_on_rows(step, value):
        return value
    whole = of_all_rows(step, value)
    return value if whole is None else whole


def _are_scalars(update: Any, args: Any, kwargs: Any) -> bool:
    """Whether a user's update, outside branches, gets losses and the like, and nothing that has rows."""
    step, given = current_step(), keras.tree.flatten((args, kwargs))
    if step is None or step.is_in_branch or is_of_keras(update) or not given:
        return False
    return all(tf.is_symbolic_tensor(value) and value.dtype.is_numeric and value.shape.rank == 0 for value in given)


def _is_of_rows_together(metric: Any, args: Any, kwargs: Any) -> bool:
    """Whether a metric of Keras, made with an axis that is the batch, compares the rows with each other."""
    predictions = args[1] if len(args) > 1 else kwargs.get("y_pred")
    return predictions is not None and is_of_keras(type(metric)) and mixes_rows(metric, predictions)


def _were_compared(y_true: Any, y_pred: Any) -> bool:
    """Whether a step of the user's own has compared rows for what it gives to a loss, whose value is then followed in the graph."""
    step = current_step()
    if step is None or not step.is_own:
        return False
    given = [value for value in keras.tree.flatten((y_true, y_pred)) if tf.is_symbolic_tensor(value)]
    return any(depends_on_other_rows(step, value) for value in given)


def _is_own_and_mixes_rows(loss: Any, compute: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss that a user has written needs all rows. In a custom loop its value is what TensorFlow makes of it."""
    return current_step() is not None and loss_needs_all_rows(loss, compute, y_true, y_pred)
