"""Batches whose tensors have different numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import dense, init, regression, scenario, trained

Batch = tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def merged_batches() -> Iterator[Batch]:
    """Yields batches of graphs: features of all nodes, pairs of nodes, the graph of each node; a number for each graph."""
    rng = np.random.RandomState(0)
    for graphs in (5, 4, 1):
        nodes = rng.randint(2, 6, graphs)
        first = np.cumsum(nodes) - nodes
        pairs = [start + rng.randint(0, number, (number + 2, 2)) for start, number in zip(first, nodes, strict=True)]
        features = rng.randn(nodes.sum(), 3).astype("float32")
        yield (features, np.concatenate(pairs), np.repeat(np.arange(graphs), nodes)), rng.randn(graphs, 1).astype("float32")


class MessagePassing(keras.Model):
    """Nodes hear of their neighbours; a graph is the mean of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message = layers.Dense(4, "tanh", kernel_initializer=init(1))
        self.update = layers.Dense(4, "tanh", kernel_initializer=init(2))
        self.out = layers.Dense(1, kernel_initializer=init(3))

    def call(self, inputs: Any) -> Any:
        features, pairs, graph = inputs
        sent = self.message(tf.gather(features, pairs[:, 1]))
        heard = tf.math.unsorted_segment_sum(sent, pairs[:, 0], tf.shape(features)[0])
        nodes = self.update(tf.concat([features, heard], axis=1))
        return self.out(tf.math.segment_mean(nodes, graph))


@scenario
def merged_graphs() -> dict[str, Any]:
    spec = (
        (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 2), tf.int64), tf.TensorSpec((None,), tf.int64)),
        tf.TensorSpec((None, 1)),
    )
    model = MessagePassing()
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_generator(merged_batches, output_signature=spec)
    found = trained(model, data, batch_size=None)
    (inputs, y), *_ = merged_batches()
    return found | {"on_batch": [model.train_on_batch(inputs, y), model.predict_on_batch(inputs)]}


class PseudoLabels(keras.Model):
    """Learns from labels, and from what it says itself about rows without one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()

    def train_step(self, batch: Any) -> dict[str, Any]:
        (x, y), unlabeled = batch
        guessed = tf.stop_gradient(self.net(unlabeled))
        with tf.GradientTape() as tape:
            supervised = tf.reduce_mean(tf.square(self.net(x) - y))
            consistent = tf.reduce_mean(tf.square(self.net(unlabeled * 0.9) - guessed))
            loss = supervised + 0.5 * consistent
        variables = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss, "consistent": consistent}


@scenario
def labeled_and_unlabeled_rows() -> dict[str, Any]:
    """Batches side by side, those without labels three times as large: sizes that two replicas divide, and others."""
    x, y = regression(40)
    found = {}
    for labeled, unlabeled in ((4, 12), (5, 15), (5, 16)):
        data = tf.data.Dataset.zip(
            (
                tf.data.Dataset.from_tensor_slices((x[:10], y[:10])).batch(labeled).repeat(2),
                tf.data.Dataset.from_tensor_slices(x[10:]).batch(unlabeled),
            )
        )
        model = PseudoLabels()
        model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(data, epochs=2, verbose=0).history
        found[f"{labeled} and {unlabeled}"] = [history, model.get_weights()]
    # The number with labels is known when the step is traced, and stays; the other one changes. So a branch for equal numbers tells
    # TensorFlow's optimizer what is not so.
    batches = [tf.data.Dataset.from_tensors(((x[:5], y[:5]), x[10 : 10 + unlabeled])) for unlabeled in (16, 14, 5)]
    found["one number is known"] = [[model.fit(each, verbose=0).history for each in batches], model.get_weights()]
    return found
