"""What is computed from sums and means over the rows of a batch, and is neither: a quotient of sums, the root of a mean, a product.

The replicas sum these up together, and compute again what comes after them: that is the value of one device. Its gradient follows
from the chain rule, since each of these sums is linear in what the replicas bring. Where rows are compared with each other, the
replicas gather them in place of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.gathered_rows import GatheredRows
from tfrep_strategy.keras_integration.synchronous.row_growth import VALUES_OF, note_global
from tfrep_strategy.keras_integration.synchronous.row_powers import REDUCED
from tfrep_strategy.keras_integration.synchronous.row_reductions import Reductions
from tfrep_strategy.shares import Gradient

_WITH_GRADIENTS = ("rows", "all_rows", "alike", *REDUCED)
"""The kinds of tensors through which gradients flow, in an order that all replicas have."""


class JointValue:
    """A value that the replicas compute together. Make it with `of`.

    Attributes:
        value: That of one device, the same on all replicas. Its gradient is that of `as_mean`, or what `addends` tell.
    """

    def __init__(self, step: Step, tensor: tf.Tensor, found: Reductions) -> None:
        self._step, self._own = step, found.kinds
        self._gathered = GatheredRows(step, found)
        self._global = _of_all(step, found.kinds) | self._gathered.of_all
        known = {own.name: whole for kind in self._own for own, whole in zip(self._own[kind], self._global[kind], strict=True)}
        self.value = note_global(self._computed_again(tensor, found, known))

    @classmethod
    def of(cls, step: Step, tensor: tf.Tensor, found: Reductions) -> JointValue:
        """Returns what a tensor is together. The replicas talk once for each tensor."""
        known = step.joint_values
        if tensor.name not in known:
            known[tensor.name] = cls(step, tensor, found)
        return known[tensor.name]

    def addends(self) -> list[tuple[tf.Tensor, Gradient]]:
        """Returns tensors of this replica, and what each of their gradients counts in that of the value.

        What counts of a table that the rows of all replicas look up is sparse, as on one device.

        Raises:
            LookupError: An operation has no gradient, so that one device has none either.
        """
        pairs = {kind: zip(self._own[kind], self._global[kind], strict=True) for kind in _WITH_GRADIENTS}
        sources = [(kind, *pair) for kind in pairs for pair in pairs[kind]]
        wholes = [whole for _, _, whole in sources]
        # What is alike may have been computed from something else that is, such as a normalized weight.
        derivatives = tf.gradients(self.value, wholes, stop_gradients=wholes)
        return [
            (own, self._weight(kind, own, whole, derivative))
            for (kind, own, whole), derivative in zip(sources, derivatives, strict=True)
            if derivative is not None and own.dtype.is_floating
        ]

    def _computed_again(self, value: tf.Tensor, found: Reductions, known: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Repeats the operations between what was reduced and a value, with others in place of what was reduced."""
        made = dict(known)
        without_rows = {each.name for kind in REDUCED for each in found.kinds[kind]}
        without_rows |= {each.name for each in found.between} - found.of_rows
        for tensor in found.between:
            operation = tensor.op
            if tensor.name in made:
                continue  # Another output of an operation that was repeated.
            if tensor.name in found.brought:
                made[tensor.name] = tf.identity(made[found.brought[tensor.name].name])
                continue
            inputs = [made[each.name] for each in operation.inputs]
            if tensor.name in found.of_rows:
                sizes = slice(len(inputs[VALUES_OF.get(operation.type, slice(None))]), None)  # They are of this replica's rows.
                old_and_new = zip(operation.inputs, inputs, strict=True)
                inputs = [_spread(self._step, new) if old.name in without_rows else new for old, new in old_and_new]
                inputs[sizes] = operation.inputs[sizes]
            attributes = {each.name: operation.node_def.attr[each.name] for each in operation.op_def.attr}
            copy = tensor.graph.create_op(operation.type, inputs, [each.dtype for each in operation.outputs], attrs=attributes)
            outputs = list(copy.outputs)
            if tensor.name in found.together:
                outputs = [_together(self._step, found.together[tensor.name], each) for each in outputs]
            made.update(zip([each.name for each in operation.outputs], outputs, strict=True))
        return made[value.name]

    def _weight(self, kind: str, own: tf.Tensor, whole: tf.Tensor, derivative: Gradient) -> Gradient:
        if kind == "alike":  # A learned weight of a loss, for example.
            return self._step.share.weigh(derivative)
        derivative = tf.convert_to_tensor(derivative)
        if kind in ("rows", "sum"):
            return derivative
        if kind == "all_rows":
            return self._gathered.own_part(own, derivative)
        if kind == "mean":
            return self._step.share.weigh(derivative)
        return derivative * _part_of_extreme(self._step, own, whole)

    def as_mean(self) -> tf.Tensor:
        """Returns the value with a gradient that the share can weigh, as that of a mean. It is computed if a tape asks for it."""

        @tf.custom_gradient
        def mean(*tensors: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> list[tf.Tensor | None]:
                weights = {own.name: self._step.share.unweigh(weight) for own, weight in self.addends()}
                return [_times(weights.get(own.name), upstream) for own in sources]

            return tf.identity(self.value), gradient

        sources = [own for kind in _WITH_GRADIENTS for own in self._own[kind] if own.dtype.is_floating]
        return note_global(mean(*sources))


def _times(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return None if gradient is None else tf.cast(factor, gradient.dtype) * gradient


def _of_all(step: Step, kinds: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, Sequence[tf.Tensor]]:
    """Puts together what the replicas have of each kind. All sums are one collective."""
    extended = step.strategy.extended
    own = {kind: list(map(tf.stop_gradient, tensors)) for kind, tensors in kinds.items()}
    parts = [*own["count"], *step.share.silenced(own["sum"]), *map(step.share.weigh, own["mean"])]
    summed = iter(extended.sum_over_replicas(parts))
    result: dict[str, Sequence[tf.Tensor]] = {kind: [next(summed) for _ in own[kind]] for kind in ("count", "sum", "mean")}
    for kind in ("max", "min"):
        result[kind] = [_extreme(step, kind, each) for each in own[kind]]
    return result | {"rows": own["rows"], "alike": kinds["alike"], "share": list(map(tf.ones_like, kinds["share"]))}


def _spread(step: Step, value: tf.Tensor) -> tf.Tensor:
    """Returns a value for use with the replica's own rows. The rows of all replicas add to its gradient."""

    @tf.custom_gradient
    def spread(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: step.strategy.extended.sum_over_replicas([upstream])[0]

    return spread(value)


def _together(step: Step, kind: str, value: tf.Tensor) -> tf.Tensor:
    """Puts together what replicas have of rows. The gradient of the result is that of what each brings."""
    extended = step.strategy.extended

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> Any:
        return extended.sum_over_replicas([x])[0], lambda upstream: upstream

    @tf.custom_gradient
    def extreme(x: tf.Tensor) -> Any:
        whole = _extreme(step, kind, x)
        return whole, lambda upstream: upstream * _part_of_extreme(step, x, whole)

    if kind in ("max", "min"):
        return extreme(value)
    return summed(step.share.weigh(value) if kind == "mean" else value)


def _extreme(step: Step, kind: str, own: tf.Tensor) -> tf.Tensor:
    """Returns the maximum or minimum over the replicas. That of no rows, which TensorFlow may make NaN, does not count."""
    bound = kind == "min" if own.dtype.is_bool else own.dtype.min if kind == "max" else own.dtype.max
    least = tf.constant(bound, own.dtype)
    own = tf.where(step.share.value > 0, own, least)
    return note_global(step.strategy.extended.own_communicator().all_reduce([own], kind)[0])


def _part_of_extreme(step: Step, own: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Returns how much of the gradient of a maximum or minimum a replica's own one has: the same for all that are equal to it."""
    is_whole = tf.cast(own == whole, own.dtype)
    return is_whole / step.strategy.extended.sum_over_replicas([is_whole])[0]
