"""The rule by which the values of the replicas make up the value of one device.

One device computes the mean over the `n` examples of a batch. Replica r has `n_r` of them, and computes the mean over these. Its
*share* is `share_r = n_r / n`, and

    value of one device = sum over replicas of share_r * value of replica r

This holds however the batch is cut. A replica without examples has a share of 0 and adds nothing, even if its own mean is 0/0.
The rule holds for all that is linear in means over examples: losses, gradients and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


class Share:
    """The part of a batch's examples that a replica has, with the forms that the rule takes.

    Make it with `of_batch` or `equal`.

    Attributes:
        value: float32 scalar between 0 and 1.

    Example:
        >>> uneven = [Share.of_batch(tf.constant(n, tf.int64), tf.constant(4, tf.int64)) for n in (3, 1, 0)]
        >>> means = [tf.constant(2.0), tf.constant(6.0), tf.constant(float("nan"))]
        >>> sum(float(share.weigh(mean)) for share, mean in zip(uneven, means))
        3.0
    """

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value

    @classmethod
    def of_batch(cls, num_examples: tf.Tensor, total: tf.Tensor) -> Share:
        """Makes the share of a replica. What is known while a step is traced costs no operations in it.

        Args:
            num_examples: int64 scalar, the examples of this replica.
            total: int64 scalar, the examples of all replicas.
        """
        rows, all_rows = tf.get_static_value(num_examples), tf.get_static_value(total)
        if rows is not None and all_rows:
            return cls(tf.constant(np.float32(rows) / np.float32(all_rows)))
        return cls(tf.math.divide_no_nan(tf.cast(num_examples, tf.float32), tf.cast(total, tf.float32)))

    @classmethod
    def equal(cls, num_replicas: int) -> Share:
        """Makes the share of replicas that have as many examples each, such as the whole batch."""
        return cls(tf.constant(1 / num_replicas))

    # The rule.

    def weigh(self, value: Gradient) -> Gradient:
        """Multiplies a mean over the replica's examples, or a gradient of one, by the share. The sum over replicas is global.

        Args:
            value: A floating or complex `tf.Tensor`, `tf.IndexedSlices` or None.

        Returns:
            A value of the same type, dtype and shape. With a share of 0 it is 0, even if the given one is not finite.
        """
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weigh(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.multiply_no_nan, value, self.value)

    def as_weight(self, dtype: Any) -> tf.Tensor:
        """Returns the share as the weight of a value in a weighted mean, as metrics compute it."""
        return tf.cast(self.value, dtype)

    # What follows from it where a value is weighed later.

    def unweigh(self, value: Gradient) -> Gradient:
        """Divides a part of a global sum by the share, so that weighing it leaves the part. The quotient by 0 is 0."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.unweigh(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.divide_no_nan, value, self.value)

    def through(self, send: Callable[[list[tf.Tensor]], list[tf.Tensor]], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends gradients back through a collective, in a step that weighs its gradients after backward.

        A gradient that flows back through a collective comes from the loss of another replica. It has the share of the replica
        that it comes from, and will be multiplied by that of the replica where it arrives.

        Args:
            send: The collective's gradient, which brings the tensors of this replica to others, and theirs here.
            gradients: The gradients of this replica's results of the collective.

        Returns:
            The gradients of what this replica gave to the collective.
        """
        arrived = send([self.weigh(gradient) for gradient in gradients])
        return [self.unweigh(gradient) for gradient in arrived]

    # Where there are no examples.

    def silenced(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns values, or zeros for a replica without examples, whose means over nothing are NaN."""
        if not values:
            return []
        has_examples = self.value > 0
        return [tf.where(has_examples, value, tf.zeros_like(value)) for value in values]


def _rounded_once(operation: Callable[..., tf.Tensor], tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Computes 16-bit floats in float32, since a share of 1/3 has an error of 0.2 percent in bfloat16.

    Moreover, TensorFlow has no `multiply_no_nan` of bfloat16 on GPUs, and would copy the tensor to the CPU.
    """
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(operation(tf.cast(tensor, tf.float32), weight), tensor.dtype)
    return operation(tensor, tf.cast(weight, tensor.dtype))
