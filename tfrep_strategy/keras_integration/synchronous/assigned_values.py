"""What a step assigns to a variable, computed from the rows of the batch: a moving average, a count, a codebook of a VQ-VAE.

Each replica has its own rows. If the graph tells where they were put together, as a sum, a mean, a maximum or a minimum, the
replicas do that together, and compute again what comes after it. So all of them assign what one device does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step, current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.batch_sums import depends_on_rows, note_global, reduced_rows

assigns_as_is = Setting(False)
"""Whether what assigns to variables now, such as an optimizer, does it as each replica is to do it."""


def of_all_replicas(value: Any) -> tf.Tensor | None:
    """Returns what one device would assign where a replica assigns a value.

    Args:
        value: What is assigned, or added to a variable. Any type.

    Returns:
        A tensor that is the same on all replicas. None if the value is to be assigned as it is: it comes from no rows, or has
        rows, or nobody can tell (in eager steps, branches and functions, and where the step asks for rows of other replicas).
    """
    step = current_step()
    if step is None or assigns_as_is.value or step.gathers or step.strategy.num_replicas_in_sync == 1:
        return None
    if not step.has_computed(value) or not depends_on_rows(step, value):
        return None
    reduced = reduced_rows(step, value)
    if reduced is None:
        return None
    together = {tensor.name: tensor for tensor in reduced.pop("alike", ())}
    for kind, own in reduced.items():
        together.update(zip([tensor.name for tensor in own], _reduced_by_all(step, kind, own), strict=True))
    return note_global(_computed_again(value, together))


def _reduced_by_all(step: Step, kind: str, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    communicator = step.strategy.extended.own_communicator()
    if kind in ("max", "min"):
        return communicator.all_reduce(own, kind)
    return communicator.all_reduce([step.share.weigh(mean) for mean in own] if kind == "mean" else own)


def _computed_again(value: tf.Tensor, together: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Repeats the operations that lead from some tensors to a value, with others in place of these."""
    made = dict(together)

    def again(tensor: tf.Tensor) -> tf.Tensor:
        if tensor.name not in made:
            operation = tensor.op
            inputs, types = [again(each) for each in operation.inputs], [each.dtype for each in operation.outputs]
            attributes = {each.name: operation.node_def.attr[each.name] for each in operation.op_def.attr}
            copy = tensor.graph.create_op(operation.type, inputs, types, attrs=attributes)
            made.update(zip([each.name for each in operation.outputs], copy.outputs, strict=True))
        return made[tensor.name]

    return again(value)
