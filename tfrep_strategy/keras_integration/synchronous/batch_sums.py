"""Scalars of a step or a layer of the user's own that are computed from the rows of a batch, such as `ops.sum(errors)`.

A replica's value of a mean over rows counts with its share; its value of a sum counts whole. What is neither, such as a quotient of
sums, is computed from the sums of all replicas (`joint_values.py`). The graph of the step tells which of these a scalar is
(`row_growth.py`). What it does not tell is taken for a mean, and so is all of an eager step, and of one that cannot be traced for
any number of rows. There, a tensor has a number for each row if it is as long as the replica's part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.joint_values import JointValue
from tfrep_strategy.keras_integration.synchronous.row_growth import growth_of, has_rows
from tfrep_strategy.keras_integration.synchronous.row_reductions import all_rows, reductions


class Addends(NamedTuple):
    """What a scalar is the sum of: sums over rows, means, and values of the global batch."""

    sums: list[tf.Tensor]
    means: list[tf.Tensor]
    joint: list[JointValue]


def addends(step: Step, value: Any) -> Addends:
    """Takes a scalar apart."""
    is_mean = step.gathers or step.is_noted_mean(value)
    if is_mean or not tf.is_symbolic_tensor(value) or value.shape.rank or not value.dtype.is_floating:
        return Addends([], [value], [])
    grows = growth_of(step, value)
    found, left = Addends([], [], []), [value]
    while left:
        tensor = left.pop()
        power = grows[tensor]
        if power is None and tensor.op.type in ("Add", "AddV2", "AddN"):
            left += tensor.op.inputs
            continue
        follows = step.has_computed(tensor) and not step.is_in_branch and grows.depends_on_rows(tensor)
        parts = reductions(step, tensor) if follows else None
        if parts is not None and (parts.degree > 1 or power not in (0, 1) or tensor in grows.compared):
            found.joint.append(JointValue.of(step, tensor, parts))
        else:
            (found.sums if power == 1 else found.means).append(tensor)
    return found


def part_of_global(step: Step, value: tf.Tensor) -> tf.Tensor:
    """Returns what this replica adds to a scalar of the global batch: a sum as it is, a mean times the share."""
    sums, means, joint = addends(step, value)
    means = [*means, *(each.as_mean() for each in joint)]
    parts = [*step.share.silenced(sums), *map(step.share.weigh, means)]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)


def as_mean(step: Step, value: tf.Tensor) -> tf.Tensor:
    """Returns a scalar that the share can weigh, whatever the given one is."""
    sums, _, joint = addends(step, value)
    return step.share.unweigh(part_of_global(step, value)) if sums or joint else value


def can_follow(step: Step, value: tf.Tensor) -> bool:
    """Returns whether the graph tells what becomes of a scalar, so that a sum over rows may stay the replica's own.

    A step that is traced for one number of rows does not: its losses are Keras's, of which nobody makes anything else.
    """
    return step.has_computed(value) and not step.gathers and not step.rows_are_fixed


def compares_rows(step: Step, value: Any) -> bool:
    """Returns whether a tensor was computed from comparisons of rows of the batch, or from their places in it."""
    if step.gathers or step.is_in_branch or not step.has_computed(value):
        return False
    return value in growth_of(step, value).compared


def depends_on_other_rows(step: Step, value: Any) -> bool:
    """Returns whether the rows of a tensor are known to depend on other rows of the batch, or on what all have in common."""
    if step.gathers or step.is_in_branch or step.rows_are_fixed or not step.has_computed(value):
        return False
    grows = growth_of(step, value)
    return value in grows.compared or grows.is_normalized(value) and value.name not in grows.of_layers


def follows_numbers(step: Step, value: tf.Tensor) -> bool:
    """Returns whether rows were put together by numbers that the batch brings, as in merged graphs: one replica has these."""
    return growth_of(step, value).compared.follows_numbers(value)


def puts_rows_together(step: Step, value: Any) -> bool:
    """Returns whether a tensor, such as a matrix of correlations, was computed from the rows of the batch and has none."""
    if step.gathers or step.is_in_branch or not step.has_computed(value):
        return False
    return growth_of(step, value).depends_on_rows(value) and not has_rows(step, value)


def of_all_rows(step: Step, value: tf.Tensor) -> tf.Tensor | None:
    """Returns what one device has in place of a tensor: that of all rows. None if nobody can tell.

    The replicas talk; all have to call it.
    """
    if not value.shape.rank and value.dtype.is_floating:
        return step.strategy.extended.sum_over_replicas([part_of_global(step, value)])[0]
    if not step.has_computed(value):
        return value
    parts = None
    if not compares_rows(step, value):
        if is_count(step, value):
            return step.strategy.extended.sum_over_replicas([value])[0]
        if puts_rows_together(step, value):
            parts = reductions(step, value)
        if not value.shape.rank:
            return value if parts is None else JointValue.of(step, value, parts).value
    found = all_rows(step, value) if parts is None else parts
    return None if found is None else JointValue.of(step, value, found).value


def is_count(step: Step, value: tf.Tensor) -> bool:
    """Returns whether an integer scalar is a count of rows, or a sum over them."""
    if step.gathers or not tf.is_symbolic_tensor(value) or value.shape.rank != 0:
        return False
    return bool(growth_of(step, value)[value] == 1)


def are_own_rows(step: Step, value: tf.Tensor) -> bool:
    """Returns whether a tensor has in its first dimension something for each row of the replica, as the graph of the step tells.

    An eager tensor does not: a number for each of 8 classes looks like one for each of 8 rows.
    """
    if step.gathers or step.is_in_branch or not value.shape.rank or not step.has_computed(value):
        return False
    return growth_of(step, value).axis(value) == 0


def are_rows(step: Step, target: Any) -> bool:
    """Returns whether a tensor has a number for each row, such as a loss without a reduction. A tape adds them up."""
    if step.gathers or not isinstance(target, tf.Tensor) or not target.shape.rank:
        return False
    if not tf.is_symbolic_tensor(target):
        return bool(target.shape[0] == step.rows)
    total = tf.reduce_sum(target)
    grows = growth_of(step, total)
    return bool(grows[total] == 1) or grows.is_of_rows(target)
