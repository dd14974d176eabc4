"""Gradients that a step of the user's own takes with a tape: those of the global batch, whatever the step does with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy._tensorflow import tape_is_recording
from tfrep_strategy.gradients import dense, dense_buckets
from tfrep_strategy.keras_integration.protocol import Step, current_step
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase, overwrites
from tfrep_strategy.keras_integration.synchronous.batch_sums import (
    addends,
    are_own_rows,
    are_rows,
    compares_rows,
    depends_on_other_rows,
)
from tfrep_strategy.keras_integration.synchronous.given_gradients import look_for_mixed_gradients, refuse_accumulators
from tfrep_strategy.keras_integration.synchronous.row_growth import (
    depends_on_rows,
    growth_of,
    has_rows,
    is_drawn,
    note_global,
    note_rows,
)
from tfrep_strategy.slices import joined


class Tapes(SynchronousBase):
    """What tapes do inside a step."""

    def take_gradient(
        self, original: Any, tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Makes the gradients of variables global, so that a norm, a clip or an update by hand is that of one device.

        So are those of tensors that are the same on all replicas, such as weights after a step of MAML. The gradient of rows
        belongs to those of this replica, of which the loss counts its share. In a branch replicas may not meet. What a user has
        made of a scaled loss stays a part, which `apply` sums.
        """
        step, flat = current_step(), tf.nest.flatten(sources)
        if step is None or not (step.is_own and self.has_several and self.in_replica) or step.is_in_branch:
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        was_scaled = step.was_scaled(target)
        if was_scaled and step.only_parts_are_own:  # Keras's own step hands these gradients to `apply`.
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        asks_for_all = output_gradients is None
        positions = [i for i, source in enumerate(flat) if _is_one_value(step, source, asks_for_all)]
        of_rows = [source for source in flat if step.has_computed(source) and _has_own_rows(step, source)]
        is_part = step.loss_is_scaled and not was_scaled
        is_own_loss = _comes_from_scaled(step, target) if is_part else not was_scaled
        takes_apart = (positions or of_rows) and asks_for_all and is_own_loss
        # What replicas compute together comes from what is before the mixing of rows, and an outer tape would not see through it.
        stays_whole = tape_is_recording() or all(_is_mixed(step, source) for source in flat)
        at_once = bool(of_rows) or any(map(overwrites, flat))
        weighed = _all_weighed(step, target, at_once, stays_whole) if takes_apart else []
        dense_ones, of_tables = _lookups_apart(weighed, flat)
        if dense_ones:
            target, output_gradients = map(list, zip(*dense_ones, strict=True))
        stay_parts = is_part or not positions
        if stay_parts and not weighed:
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        if positions:
            refuse_accumulators(step, target)
        with step.taking_global(target, is_weighed=bool(weighed)):
            gradients = [None] * len(flat)
            if dense_ones or not weighed:
                gradients = tf.nest.flatten(original(tape, target, sources, output_gradients, *args, **kwargs))
            for i, slices in of_tables:
                gradients[i] = _with_slices(gradients[i], slices)
            if weighed:
                gradients = [_noted_rows(step, *pair) for pair in zip(flat, gradients, strict=True)]
            if stay_parts:
                return tf.nest.pack_sequence_as(sources, gradients)
            own = [gradients[i] for i in positions]
            look_for_mixed_gradients(step, own)
            whole = self.what_overwrites(own, [flat[i] for i in positions])
            if was_scaled or weighed:
                own = step.share.silenced_gradients(own, dense_buckets(own, self.strategy.extended.bucket_bytes_for(own)))
            else:
                own = [step.share.weigh(gradient) for gradient in own]
            summed = [whole.get(i, total) for i, total in enumerate(self._summed(own))]
        step.note_global(summed)
        for part in tf.nest.flatten(summed, expand_composites=True):
            note_global(part)
        for i, gradient in zip(positions, summed, strict=True):
            gradients[i] = gradient
        return tf.nest.pack_sequence_as(sources, gradients)

    def _summed(self, own: Sequence[Any]) -> list[Any]:
        """Sums gradients as `apply` does; where a tape records, such as that of an outer loop, gradients flow through the sum."""
        if not tape_is_recording():
            return self.strategy.extended.aggregate_gradients(own)
        summed = list(own)
        given = [i for i, gradient in enumerate(own) if gradient is not None]
        context: Any = tf.distribute.get_replica_context()
        for i, total in zip(given, context.all_reduce("sum", [dense(own[i]) for i in given]), strict=True):
            summed[i] = total
        return summed


def _all_weighed(step: Step, target: Any, at_once: bool, stays_whole: bool) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Takes a loss apart, or several, whose gradients a tape adds up."""
    if not isinstance(target, (list, tuple)) or not all(map(tf.is_symbolic_tensor, target)):
        return _weighed(step, target, at_once, stays_whole)
    weighed = [_weighed(step, each, at_once, stays_whole) for each in target]
    if not any(weighed):
        return []
    return [pair for found, each in zip(weighed, target, strict=True) for pair in found or [_mean(step, each)]]


def _weighed(step: Step, target: Any, at_once: bool, stays_whole: bool) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Takes a loss apart into tensors, each with what its gradient counts: that of a sum over rows whole, that of a mean the share.

    A mean, as most losses are, is left whole, since its gradients can be weighed later; unless they are wanted at once, because
    backward itself notes how large they are.
    """
    if are_rows(step, target):
        if not compares_rows(step, target) or stays_whole:
            return [(target, tf.ones_like(target))]
        target = tf.reduce_sum(target)
    sums, means, joint = addends(step, target)
    if not sums and (not joint or stays_whole):
        is_scalar = at_once and isinstance(target, tf.Tensor)
        return [_mean(step, target)] if is_scalar else []
    weighed = [(value, tf.ones_like(value)) for value in sums]
    weighed += [(value, tf.cast(step.share.value, value.dtype)) for value in means]
    return weighed + [addend for value in joint for addend in value.addends()]


def _lookups_apart(
    weighed: Sequence[tuple[tf.Tensor, Any]], sources: Sequence[Any]
) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], list[tuple[int, tf.IndexedSlices]]]:
    """Takes the gradients of lookups apart, which a tape would make dense: by the positions of their tables among the sources."""
    dense_ones, of_tables = [], []
    for tensor, weight in weighed:
        i = _position_of_variable(tensor, sources) if isinstance(weight, tf.IndexedSlices) else None
        if i is None:
            dense_ones.append((tensor, tf.convert_to_tensor(weight)))
        else:
            values = tf.cast(weight.values, sources[i].dtype)
            of_tables.append((i, tf.IndexedSlices(values, weight.indices, weight.dense_shape)))
    return dense_ones, of_tables


def _position_of_variable(value: tf.Tensor, sources: Sequence[Any]) -> int | None:
    """Returns which of the sources is the variable that was read, and perhaps cast; None if it is none of them."""
    while value.op.type in ("Cast", "Identity"):
        value = value.op.inputs[0]
    if value.op.type != "ReadVariableOp":
        return None
    inner = value.op.inputs[0]
    outer = next((outer for outer, captured in value.graph.captures if captured is inner), inner)
    return next((i for i, source in enumerate(sources) if getattr(source, "handle", None) is outer), None)


def _with_slices(gradient: Any, slices: tf.IndexedSlices) -> Any:
    if gradient is None:
        return slices
    return joined([gradient, slices]) if isinstance(gradient, tf.IndexedSlices) else gradient + tf.convert_to_tensor(slices)


def _mean(step: Step, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return value, tf.ones_like(value) * tf.cast(step.share.value, value.dtype)


def _is_one_value(step: Step, source: Any, tensors: bool) -> bool:
    """Whether a source has the same value on all replicas: a variable, or a tensor that was computed from such alone."""
    if isinstance(source, (tf.Variable, keras.Variable)):
        return True
    if not tensors or not step.has_computed(source) or _is_shaped_as_rows(step, source):
        return False
    return not depends_on_rows(step, source) and not is_drawn(step, source)


def _has_own_rows(step: Step, source: tf.Tensor) -> bool:
    """Whether a tensor has something for each row of the replica."""
    return has_rows(step, source) or _is_shaped_as_rows(step, source)


def _noted_rows(step: Step, source: Any, gradient: Any) -> Any:
    """Notes that the gradient by rows is rows: on the way back through a collective, the graph does not tell."""
    is_rows = isinstance(gradient, tf.Tensor) and step.has_computed(gradient) and step.has_computed(source)
    return note_rows(gradient) if is_rows and are_own_rows(step, source) and not _is_mixed(step, source) else gradient


def _is_mixed(step: Step, source: Any) -> bool:
    """Whether a tensor has rows that depend on others. What comes after it is computed from those of all replicas."""
    return step.has_computed(source) and depends_on_other_rows(step, source)


def _is_shaped_as_rows(step: Step, source: tf.Tensor) -> bool:
    """Whether a tensor is a constant for each row, as zeros in the shape of the batch are where all batches have one size."""
    rows = tf.get_static_value(step.rows)
    return rows is not None and bool(source.shape.rank) and source.shape[0] == rows and tf.get_static_value(source) is not None


def of_all_jacobians(step: Step, target: Any, sources: Any, found: Any) -> Any:
    """Makes the Jacobian of means over rows global, and notes that that of rows is rows.

    Args:
        step: One that Keras drives, in a replica.
        target: What was differentiated.
        sources: By what. Only those are looked at that are the same on all replicas, such as variables.
        found: What the tape has found, in the structure of the sources.

    Returns:
        The same structure.
    """
    if not step.is_own or step.is_in_branch or not step.has_computed(target) or step.gathers or compares_rows(step, target):
        return found
    flat, ones = tf.nest.flatten(found), [_is_one_value(step, source, True) for source in tf.nest.flatten(sources)]
    chosen = [i for i, is_one in enumerate(ones) if is_one and flat[i] is not None]
    if are_rows(step, target):
        made = [note_rows(flat[i]) for i in chosen]
    elif growth_of(step, target)[target] == 0 and depends_on_rows(step, target) and not tape_is_recording():
        summed = step.strategy.extended.sum_over_replicas([step.share.weigh(flat[i]) for i in chosen])
        made = [note_global(each) for each in summed]
    else:
        return found
    for i, each in zip(chosen, made, strict=True):
        flat[i] = each
    return tf.nest.pack_sequence_as(found, flat)


def _comes_from_scaled(step: Step, target: Any) -> bool:
    """Whether a target was computed from a loss that has the share. Both are numbers, and so is what is between them."""
    left, seen = list(filter(step.has_computed, tf.nest.flatten(target))), set()
    while left:
        tensor = left.pop()
        if step.was_scaled(tensor):
            return True
        if tensor.shape.rank == 0 and tensor.name not in seen:
            seen.add(tensor.name)
            left += tensor.op.inputs
    return False

