"""Operations on parts without rows, which occur if a batch has fewer rows than there are replicas.

TensorFlow's oneDNN kernels (2.21, on the CPU) give such a part the shape of their input, or no gradient, or end the process.
Some Keras operations need at least one element, and treat a static size of 0 or 1 as a broadcast dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.core.tf import record_operation, stop_recording
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase


class EmptyParts(SynchronousBase):
    """Backend operations that fail without rows."""

    def conv(self, original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Convolves or pools. Kernels of GPUs accept no rows, but Keras (before 3.14) may refuse them."""
        if "GPU" in getattr(inputs, "device", "") and inputs.shape[:1] != [0]:
            return original(inputs, *args, **kwargs)
        return self.on_rows(lambda x: original(x, *args, **kwargs), inputs)

    conv_transpose = depthwise_conv = separable_conv = max_pool = conv

    def ctc_loss(self, original: Any, target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0) -> Any:
        """Returns no losses for no sequences, where TensorFlow fails."""
        given = (target, output, target_length, output_length)
        return self.on_rows(lambda rows: original(*rows, mask_index=mask_index), given)

    def ctc_decode(self, original: Any, inputs: Any, sequence_lengths: Any, *args: Any, **kwargs: Any) -> Any:
        """Decodes no sequences, which TensorFlow refuses."""

        def decode(given: Any) -> Any:
            decoded, scores = original(*given, *args, **kwargs)
            return tf.transpose(decoded, [1, 0, 2]), scores  # In the results, the axis of paths comes before the batch.

        decoded, scores = self.on_rows(decode, (inputs, sequence_lengths))
        return tf.transpose(decoded, [1, 0, 2]), scores

    def map_rows(self, original: Any, f: Any, xs: Any) -> Any:
        """Maps over no rows, where Keras would use the first row."""
        return self.on_rows(lambda rows: original(f, rows), xs)

    def transform_images(self, original: Any, layer: Any, data: Any, training: bool = True) -> Any:
        """Transforms no images, where some layers use the first image."""
        if len(keras.ops.shape(data["images"] if isinstance(data, dict) else data)) != 4:  # One image.
            return original(layer, data, training=training)
        return self.on_rows(lambda rows: original(layer, rows, training=training), data)

    def add(self, original: Any, x1: Any, x2: Any) -> Any:
        """Adds two parts of no rows, or of one, as batches, where Keras would add the second one as a bias."""

        def is_small(x: Any) -> bool:
            return isinstance(x, tf.Tensor) and bool(x.shape.rank) and x.shape[0] in (0, 1)

        if not self.in_replica or not (is_small(x1) and is_small(x2)):
            return original(x1, x2)
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))

    def on_rows(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        """Calls a function whose rows depend on one row each. If there may be no rows, it gets one row of zeros."""
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        return _with_a_row(fn, inputs) if self._may_be_empty(tf.nest.flatten(inputs)[0]) else fn(inputs)

    def _may_be_empty(self, inputs: Any) -> bool:
        """Returns whether this is a tensor on one of several replicas that may have no rows."""
        if not self.in_replica or not self.has_several or inputs.shape.rank is None:
            return False
        return not inputs.shape[:1].num_elements()


def _with_a_row(fn: Callable[[Any], Any], inputs: Any) -> Any:
    """Calls a function on a row of zeros if there are no rows, and removes the result.

    If there are rows, padding and slicing copy nothing, forward and backward. Each is the gradient of the other, with far fewer
    operations than TensorFlow's gradients, which matters for many layers and replicas. Where no tape records, as in the gradient
    of a traced function, TensorFlow's own gradients give the same.

    Args:
        fn: The function; each row of its results depends on one row only.
        inputs: A nest of tensors whose first dimension is the batch.
    """
    first = tf.nest.flatten(inputs)[0]
    zero, one = tf.constant([0]), tf.constant([1])

    def first_rows(x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.StridedSlice(input=x, begin=zero, end=number, strides=one)

    rows = first_rows(tf.raw_ops.Shape(input=first), one)

    @functools.cache
    def paddings(rank: int) -> tf.Tensor:
        of_no_rows = tf.constant([[0, 1], *[[0, 0]] * (rank - 1)])
        return tf.raw_ops.Maximum(x=tf.raw_ops.Sub(x=of_no_rows, y=rows), y=zero)

    def pad(x: tf.Tensor, by: tf.Tensor, others: tf.TensorShape) -> tf.Tensor:
        # Not `tf.pad`: oneDNN fuses a `Pad` with the convolution after it, and the fused kernel ignores padded rows.
        padded = tf.raw_ops.PadV2(input=x, paddings=by, constant_values=tf.zeros([], x.dtype))
        padded.set_shape([None, *others])
        return padded

    def cut(y: tf.Tensor, others: tf.TensorShape) -> tf.Tensor:
        part = first_rows(y, rows)
        part.set_shape([first.shape[0], *others])
        return part

    # Gradients get the static shapes of their tensors, because gradients from users' code may have none.
    def with_a_row(x: tf.Tensor) -> tf.Tensor:
        by, others = paddings(x.shape.rank), x.shape[1:]
        with stop_recording():
            padded = pad(x, by, others)
        record_operation("WithARow", [padded], [x], lambda gradient: [cut(gradient, others)])
        return padded

    def without_it(y: tf.Tensor) -> tf.Tensor:
        by, others = paddings(y.shape.rank), y.shape[1:]
        with stop_recording():
            part = cut(y, others)
        record_operation("WithoutARow", [part], [y], lambda gradient: [pad(gradient, by, others)])
        return part

    return tf.nest.map_structure(without_it, fn(tf.nest.map_structure(with_a_row, inputs)))
