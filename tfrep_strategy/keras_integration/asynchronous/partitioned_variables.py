"""Variables that are partitioned over several servers, behind `keras.Variable`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.core.tf import CompositeTensorGradient, ShardedVariable
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import Variable


class PartitionedVariable(ShardedVariable):
    """The parts of a variable, cut along the first axis."""

    @property
    def device(self) -> str:
        """The device of the first part."""
        return self.variables[0].device

    @property
    def handle(self) -> Any:
        """The source of a gradient tape: the parts, through `__composite_gradient__`."""
        return self

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def read_value(self) -> tf.Tensor:
        """Returns the whole value."""
        return tf.convert_to_tensor(self)

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return super().assign(tf.convert_to_tensor(value, self.dtype))

    def assign_add(self, delta: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        return super().assign_add(tf.convert_to_tensor(delta, self.dtype))

    def assign_sub(self, delta: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        return super().assign_sub(tf.convert_to_tensor(delta, self.dtype))

    def cut(self, value: Any) -> list[Any]:
        """Cuts a variable or a gradient of the whole, dense or sparse, into those of the parts."""
        if isinstance(value, PartitionedVariable):
            return list(value.variables)
        if isinstance(value, tf.IndexedSlices):
            return [
                tf.IndexedSlices(cut.values, cut.indices, tf.constant(part.shape.as_list(), cut.indices.dtype))
                for cut, part in zip(self._decompose_indexed_slices(value), self.variables, strict=True)
            ]
        return tf.split(value, [part.shape[0] for part in self.variables])

    @property
    def __composite_gradient__(self) -> Any:
        return _PartGradients()


class _PartGradients(CompositeTensorGradient):
    """Takes gradients of the parts, and concatenates them."""

    def get_gradient_components(self, value: Any) -> Any:
        return [part.handle for part in value.variables]

    def replace_gradient_components(self, value: Any, component_grads: Sequence[Any]) -> Any:
        parts = value.variables
        if all(grad is None for grad in component_grads):
            return None
        if any(isinstance(grad, tf.IndexedSlices) for grad in component_grads):
            return _joined_slices(value.shape, parts, component_grads)
        return tf.concat([tf.zeros(p.shape, p.dtype) if g is None else g for p, g in zip(parts, component_grads, strict=True)], 0)


def _joined_slices(shape: Any, parts: Sequence[Any], grads: Sequence[Any]) -> tf.IndexedSlices:
    values, indices, start = [], [], 0
    for part, grad in zip(parts, grads, strict=True):
        if grad is not None:
            if not isinstance(grad, tf.IndexedSlices):
                grad = tf.IndexedSlices(grad, tf.range(part.shape[0]))
            values.append(grad.values)
            indices.append(tf.cast(grad.indices, tf.int64) + start)
        start += part.shape[0]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), tf.constant(shape.as_list(), tf.int64))


# Initializers that draw all numbers of a variable alike, so that each server can make its own part.
_PART_BY_PART = tuple(
    getattr(keras.initializers, name) for name in ("Zeros", "Ones", "Constant", "RandomNormal", "RandomUniform", "TruncatedNormal")
)


_GOLDEN = 0x9E3779B9


class PartInitializer:
    """The initial value of a variable, or of a part of it, in the form that TensorFlow asks for.

    Zeros, ones, a constant and independent random numbers are made part by part, on the server that holds the part, so no
    process needs memory for the whole. Each part then draws with its own seed, so its numbers differ from those of a whole
    variable. For other initializers, such as `GlorotUniform`, which uses the whole shape, each server makes the whole and
    keeps its part.

    Args:
        initializer: The Keras initializer.
        shape: The shape of the whole.
        dtype: The dtype.
    """

    def __init__(self, initializer: Any, shape: Sequence[int], dtype: str) -> None:
        self._initializer, self._shape, self._dtype = initializer, shape, dtype

    def __call__(self, partition_shape: Sequence[int] | None = None, partition_offset: Sequence[int] | None = None) -> tf.Tensor:
        if partition_shape is None or partition_offset is None:
            return self._initializer(self._shape, dtype=self._dtype)
        initializer, start = self._initializer, partition_offset[0]
        if type(initializer) not in _PART_BY_PART or np.ndim(getattr(initializer, "value", 0)):
            return self()[start : start + partition_shape[0]]
        seed = getattr(initializer, "seed", None)
        if isinstance(seed, int):  # The initializer draws the same numbers each time.
            initializer = initializer.from_config(initializer.get_config() | {"seed": (seed + start * _GOLDEN) % 2**31})
        return initializer(partition_shape, dtype=self._dtype)


# Optimizers that update each number of a variable independently of the others.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
)


class Parts(KerasDriver):
    """Operations on partitioned variables."""

    def draw_variable(self, original: Any, variable: Any, initializer: Any) -> None:
        """Tells a partitioner the shape and the dtype, and initializes each part on its server."""
        if self.strategy.extended._variable_partitioner is None:
            return original(variable, initializer)
        variable._value = tf.Variable(
            PartInitializer(initializer, variable._shape, variable._dtype),
            shape=tf.TensorShape(variable._shape),
            dtype=variable._dtype,
            trainable=variable.trainable,
            name=variable.name,
            aggregation=variable._map_aggregation(variable.aggregation),
            synchronization=variable._map_synchronization(variable.synchronization),
        )
        return None

    def variable_key(self, original: Any, optimizer: Any, variable: Any) -> Any:
        """Returns the key of the whole for a part."""
        container = getattr(variable, "_sharded_container", None)
        whole = None if container is None else container()
        if whole is not None:
            return whole._unique_id
        if isinstance(getattr(variable, "_value", variable), PartitionedVariable):
            return getattr(variable, "_value", variable)._unique_id
        return original(optimizer, variable)

    def update_where_it_is(self, original: Any, optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        """Updates each part on its server, from its part of the gradient and of the optimizer's state."""
        pairs = []
        for grad, variable in grads_and_vars:
            if not isinstance(variable, PartitionedVariable):
                pairs.append((grad, variable))
            elif type(optimizer) not in _ELEMENTWISE:
                optimizer.update_step(grad, variable, learning_rate)
            else:
                for index, part_grad in enumerate(variable.cut(grad)):
                    with _only_part(optimizer, variable, index):
                        original(optimizer, distribution, [(part_grad, variable.variables[index])], learning_rate)
        if pairs:
            original(optimizer, distribution, pairs, learning_rate)

    def embed(self, original: Any, layer: Any, inputs: Any) -> Any:
        """Fetches only the rows that are looked up from the servers, not the whole table."""
        variable = getattr(layer, "_embeddings", None)
        remote = isinstance(variable, Variable) and (
            isinstance(variable._value, PartitionedVariable) or hasattr(variable._value, "cached_read_value")
        )
        whole = layer.lora_enabled or isinstance(inputs, (keras.KerasTensor, tf.SparseTensor, tf.RaggedTensor))
        if not remote or whole or layer.quantization_mode is not None:
            return original(layer, inputs)
        ids = tf.cast(inputs, tf.int64) if inputs.dtype not in (tf.int32, tf.int64) else inputs
        ids = tf.where(ids < 0, ids + tf.cast(layer.input_dim, ids.dtype), ids)
        value: Any = variable._value  # type: ignore[union-attr]
        parts = value.variables if isinstance(value, PartitionedVariable) else [value]
        rows = tf.compat.v1.nn.embedding_lookup(parts, ids, partition_strategy="div")
        return tf.cast(rows, layer.compute_dtype)


@contextlib.contextmanager
def _only_part(optimizer: Any, variable: PartitionedVariable, index: int) -> Iterator[None]:
    """Replaces the optimizer's partitioned slots of one shape by their part `index`, while one part is updated."""
    slots = [
        slot for slot in optimizer.variables if isinstance(slot._value, PartitionedVariable) and slot._value.shape == variable.shape
    ]
    wholes = [(slot, slot._value, slot._shape) for slot in slots]
    try:
        for slot, whole, _ in wholes:
            slot._value = whole.variables[index]
            slot._shape = tuple(slot._value.shape)
        yield
    finally:
        for slot, whole, shape in wholes:
            slot._value, slot._shape = whole, shape
