"""Gradients that no tape has made global, and those that mix rows on the way back.

A function with a gradient of the user's own may clip it by a norm over all rows. A step may compute what it applies without a tape:
with a `tf.autodiff.ForwardAccumulator`, or by a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import pack_tangents
from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.batch_sums import of_all_rows
from tfrep_strategy.keras_integration.synchronous.open_rows import NobodyRepeatsError
from tfrep_strategy.keras_integration.synchronous.origins import is_of_own_gradient, is_of_this_package
from tfrep_strategy.keras_integration.synchronous.row_growth import depends_on_rows, growth_of, has_rows, is_drawn

_OWN_GRADIENT = "IdentityN"
"""The operation by which TensorFlow attaches a gradient of the user's own."""


def look_for_mixed_gradients(step: Step, gradients: Sequence[Any]) -> None:
    """Looks whether functions with gradients of the user's own have mixed rows on the way back.

    Args:
        step: The current step.
        gradients: What a tape has found.

    Raises:
        NobodyRepeatsError: They have, and the step may take the global batch instead.
    """
    found = [each for each in map(_values, gradients) if step.has_computed(each)]
    may_mix = (step.is_own or step.has_own_layers) and not step.is_in_branch
    if not step.may_take_whole_batch or not may_mix or not found:
        return
    operations = found[0].graph.get_operations()
    if not any(each.type == _OWN_GRADIENT and not is_of_this_package(each) for each in operations):
        return  # Which spares a look at all operations.
    grows, reduced = growth_of(step, found[0]), set[str]()
    for operation in filter(is_of_own_gradient, operations):
        comes_from_reduced = any(each.name in reduced for each in operation.inputs)
        for output in operation.outputs:
            if grows.axis(output) is not None and (comes_from_reduced or grows.mixes(operation)):
                raise NobodyRepeatsError(f"{operation.type} {operation.name}")
            if grows.axis(output) is None and (comes_from_reduced or grows.powers.together(output) is not None):
                reduced.add(output.name)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def refuse_accumulators(step: Step, target: Any) -> None:
    """Looks whether a `ForwardAccumulator` follows what a tape differentiates: it would not see through sums over replicas.

    Raises:
        NobodyRepeatsError: One does, and the step may take the global batch instead.
    """
    tensors = [each for each in tf.nest.flatten(target) if step.has_computed(each)]
    if step.may_take_whole_batch and pack_tangents(tensors).tangents:
        raise NobodyRepeatsError("ForwardAccumulator")


def computed_by_hand(step: Step | None, gradients: Sequence[Any]) -> dict[int, tf.Tensor]:
    """Returns the values of one device, by their positions, of gradients that a step of the user's own has computed without a tape.

    The replicas talk; all have to call it.

    Args:
        step: The current step.
        gradients: What is applied.
    """
    if step is None or not step.is_own or step.only_parts_are_own or step.loss_is_scaled or step.is_in_branch:
        return {}
    found = {i: of_all_rows(step, each) for i, each in enumerate(gradients) if _is_by_hand(step, each)}
    return {i: whole for i, whole in found.items() if whole is not None}


def _is_by_hand(step: Step, gradient: Any) -> bool:
    if not step.has_computed(gradient) or not gradient.dtype.is_floating or not depends_on_rows(step, gradient):
        return False
    return not has_rows(step, gradient) and not is_drawn(step, gradient, besides_rows=True)
