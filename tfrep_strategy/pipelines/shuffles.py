"""Shuffles other elements as a data set of the user's shuffles its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import dataset_kinds as kinds
from tfrep_strategy._tensorflow import parts_of_dataset

_MOST_BYTES = 64 * 2**20
_IGNORE_STATE = 1  # tensorflow::data::ExternalStatePolicy::POLICY_IGNORE


class ShuffledAlike(kinds.Shuffle):
    """A data set in the order that another shuffle gives to its elements, in this epoch and in all that follow.

    A shuffle has a generator, which gives each epoch another order. It belongs to the data set, and may have been used before.
    Both data sets draw from it, so that an epoch of either counts.

    Args:
        shuffle: The data set that shuffles.
        below: As many elements as it reads.
        generator: What `seed_generator` returns for `shuffle`.
    """

    def __init__(self, shuffle: Any, below: tf.data.Dataset, generator: tf.Tensor) -> None:
        self._original = shuffle  # It owns the generator.
        self._input_dataset = below
        self._buffer_size = shuffle._buffer_size
        self._seed, self._seed2 = shuffle._seed, shuffle._seed2
        self._reshuffle_each_iteration = shuffle._reshuffle_each_iteration
        self._name = shuffle._name
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(below),
            buffer_size=self._buffer_size,
            seed=self._seed,
            seed2=self._seed2,
            seed_generator=generator,
            reshuffle_each_iteration=self._reshuffle_each_iteration,
            **self._common_args,
        )
        super(kinds.Shuffle, self).__init__(below, variant)


def seed_generator(shuffle: Any) -> tf.Tensor | None:
    """Returns the generator from which a shuffle draws the order of each epoch.

    If all epochs have one order, it follows from the seeds. Else TensorFlow names the generator nowhere but in the description of
    the data set, which contains all arrays that the data set reads.

    Args:
        shuffle: A data set that shuffles.

    Returns:
        A scalar of dtype `tf.resource`; None if the description would be too large, or TensorFlow makes none.
    """
    if shuffle._reshuffle_each_iteration is False:  # None means True.
        return tf.raw_ops.DummySeedGenerator()
    if _bytes_described(shuffle) > _MOST_BYTES:
        return None
    source = tf.data.experimental.to_variant(shuffle)
    try:
        described = tf.raw_ops.DatasetToGraphV2(input_dataset=source, external_state_policy=_IGNORE_STATE)
    except tf.errors.OpError:  # An operation below has no description, such as a copy to a device.
        return None
    nodes = {node.name: node for node in tf.compat.v1.GraphDef.FromString(described.numpy()).node}
    result = next(node for node in nodes.values() if node.op == "_Retval")
    generator = nodes[_node_of(nodes[_node_of(result.input[0])].input[4])]
    return tf.io.parse_tensor(generator.attr["value"].tensor.SerializeToString(), tf.resource)


def _node_of(tensor: str) -> str:
    return tensor.split(":")[0]


def _bytes_described(dataset: tf.data.Dataset) -> int:
    tensors: list[tf.Tensor] = []
    for part in parts_of_dataset(dataset):
        tensors += getattr(part, "_tensors", ())
        tensors += [captured for each in part._functions() for captured in each.function.captured_inputs]
    return sum(_bytes_of(tensor) for tensor in tensors if tensor.dtype != tf.resource)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)
