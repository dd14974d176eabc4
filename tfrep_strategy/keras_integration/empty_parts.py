"""Operations on no rows: the part of a replica whose batch has fewer rows than there are replicas.

TensorFlow's oneDNN kernels (2.21, on the CPU) give such a part the shape of their input, or no gradient, or end the process.
Keras asks some operations for at least one element, and decides by a static size of 0 or 1 what is a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import replica_strategy

_nn = keras_internal("backend.tensorflow.nn")
_ImageLayer = keras_internal(
    "layers.preprocessing.image_preprocessing.base_image_preprocessing_layer", "BaseImagePreprocessingLayer"
)
_numpy = keras_internal("backend.tensorflow.numpy")


def _may_be_empty(inputs: Any) -> bool:
    """Whether this is a tensor in one of several replicas that is not known to have rows."""
    strategy = replica_strategy()
    if strategy is None or strategy.num_replicas_in_sync == 1 or inputs.shape.rank is None:
        return False
    return not inputs.shape[:1].num_elements()


def _with_a_row(fn: Callable[[Any], Any], inputs: Any) -> Any:
    """Calls a function of rows on a row of zeros where there is none, and takes its result away.

    Where there are rows, padding by nothing and slicing off nothing copy nothing, forward and backward.

    Args:
        fn: What is to be called with `inputs`; each row of its results depends on one row only.
        inputs: A nest of tensors whose first dimension is the batch.
    """
    inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    first = tf.nest.flatten(inputs)[0]
    if not _may_be_empty(first):
        return fn(inputs)
    rows = tf.shape(first)[0]
    missing = 1 - tf.minimum(rows, 1)

    def padded(x: tf.Tensor) -> tf.Tensor:
        x_padded = tf.pad(x, tf.concat([[[0, missing]], tf.zeros([x.shape.rank - 1, 2], tf.int32)], 0))
        return tf.ensure_shape(x_padded, [None, *x.shape[1:]])

    def sliced(y: tf.Tensor) -> tf.Tensor:
        sizes = tf.concat([[rows], tf.shape(y)[1:]], 0)
        return tf.ensure_shape(tf.slice(y, tf.zeros_like(sizes), sizes), [first.shape[0], *y.shape[1:]])

    return tf.nest.map_structure(sliced, fn(tf.nest.map_structure(padded, inputs)))


def _of_rows(original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Convolves or pools; the kernels of GPUs take no rows as they are."""
    if "GPU" in getattr(inputs, "device", ""):
        return original(inputs, *args, **kwargs)
    return _with_a_row(lambda x: original(x, *args, **kwargs), inputs)


for _name in ("conv", "conv_transpose", "depthwise_conv", "separable_conv", "max_pool", "average_pool"):
    replaces(_nn, _name)(_of_rows)


@replaces(keras_internal("backend.tensorflow.core"), "map")
def map_rows(original: Any, f: Any, xs: Any) -> Any:
    """Maps over no rows, of which Keras would take the first."""
    return _with_a_row(lambda rows: original(f, rows), xs)


@replaces(keras_internal("backend.tensorflow.math"), "stft")
def stft(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Transforms no signals, which TensorFlow cannot pad."""
    return _with_a_row(lambda rows: original(rows, *args, **kwargs), x)


@replaces(_ImageLayer, "call")
def transform_images(original: Any, self: Any, data: Any, training: bool = True) -> Any:
    """Transforms no images: some of these layers look at the first."""
    if len(keras.ops.shape(data["images"] if isinstance(data, dict) else data)) != 4:  # One image.
        return original(self, data, training=training)
    return _with_a_row(lambda rows: original(self, rows, training=training), data)


@replaces(_numpy, "add")
def add(original: Any, x1: Any, x2: Any) -> Any:
    """Adds two parts of no rows, or of one, as batches: Keras would add the second one as a bias."""

    def is_small(x: Any) -> bool:
        return isinstance(x, tf.Tensor) and bool(x.shape.rank) and x.shape[0] in (0, 1)

    if replica_strategy() is None or not (is_small(x1) and is_small(x2)):
        return original(x1, x2)
    dtype = keras.backend.result_type(x1.dtype, x2.dtype)
    return tf.add(tf.cast(x1, dtype), tf.cast(x2, dtype))


def _reduces_no_rows(name: str, of_numbers: Any, of_booleans: Any) -> None:
    @replaces(_numpy, name)
    def extremum(original: Any, x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        """Lets an eager replica without rows go on, where Keras asks for an element."""
        x = keras.ops.convert_to_tensor(x)
        if initial is not None or not tf.executing_eagerly() or tf.size(x) or not _may_be_empty(x):
            return original(x, axis=axis, keepdims=keepdims, initial=initial)
        return (of_booleans if x.dtype == tf.bool else of_numbers)(x, axis=axis, keepdims=keepdims)


_reduces_no_rows("max", tf.reduce_max, tf.reduce_any)
_reduces_no_rows("min", tf.reduce_min, tf.reduce_all)
