"""Layers that care about how a batch is cut."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import init, regression, scenario, trained

_L = keras.losses
_O = keras.optimizers


@scenario
def cnn_synchronized_batch_normalization() -> dict[str, Any]:
    rng = np.random.RandomState(0)
    x = rng.randn(37, 8, 8, 2).astype("float32")
    x[::3] += 2.0
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, kernel_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, kernel_initializer=init(2)),
        ]
    )
    loss = _L.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_O.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return trained(model, x, rng.randint(0, 3, 37))


@scenario
def masked_synchronized_batch_normalization() -> dict[str, Any]:
    """A mask that is longer on some replicas than on others."""
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (21, 6))
    for row, length in enumerate(np.sort(rng.randint(1, 7, 21))):
        x[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.Dense(1, kernel_initializer=init(4)),
        ]
    )
    model.compile(_O.SGD(0.1), "mse")
    return trained(model, x, rng.randn(21, 6, 1).astype("float32"), batch_size=8)


@scenario
def attention() -> dict[str, Any]:
    inputs = keras.Input((5, 4))
    h = layers.MultiHeadAttention(2, 3, kernel_initializer=init(1))(inputs, inputs)
    h = layers.LayerNormalization()(h + inputs)
    model = keras.Model(inputs, layers.Dense(1, kernel_initializer=init(2))(layers.Flatten()(h)))
    # Not Adam: the gradient of the key's bias is zero but for rounding, which Adam would blow up.
    model.compile(_O.SGD(0.05, momentum=0.9), "mse")
    rng = np.random.RandomState(0)
    return trained(model, rng.randn(21, 5, 4).astype("float32"), rng.randn(21, 1).astype("float32"), batch_size=8)


@scenario
def embedding_shared_by_two_towers() -> dict[str, Any]:
    a, b = keras.Input((3,), dtype="int32"), keras.Input((5,), dtype="int32")
    table = layers.Embedding(20, 4, embeddings_initializer=init(1))
    towers = [layers.GlobalAveragePooling1D()(table(i)) for i in (a, b)]
    model = keras.Model([a, b], layers.Dense(1, kernel_initializer=init(2))(layers.Concatenate()(towers)))
    model.compile(_O.Adam(0.05, clipnorm=0.1), "mse")
    rng = np.random.RandomState(0)
    x = [rng.randint(0, 12, (37, 3)), rng.randint(0, 20, (37, 5))]
    return trained(model, x, rng.randn(37, 1).astype("float32"))


@scenario
def embedding_of_positions() -> dict[str, Any]:
    """Rows that every example looks up, beside rows that examples name, for an optimizer that squares gradients."""

    class Positions(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.counted = layers.Embedding(5, 3, embeddings_initializer=init(2))
            self.listed = layers.Embedding(5, 3, embeddings_initializer=init(3))
            self.order = tf.constant([4, 3, 1, 1, 0])

        def call(self, x: Any) -> Any:
            positions = keras.ops.arange(keras.ops.shape(x)[1])
            return x + self.counted(positions) + self.listed(self.order)

    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Embedding(9, 3, embeddings_initializer=init(1)),
            Positions(),
            layers.Flatten(),
            layers.Dense(1, "tanh", kernel_initializer=init(4)),
        ]
    )
    model.compile(_O.Adam(0.05), "mse")
    rng = np.random.RandomState(0)
    return trained(model, rng.randint(0, 9, (37, 5)), rng.randn(37, 1).astype("float32"))


@scenario
def products_with_sparse_matrices() -> dict[str, Any]:
    """A lookup that asks for each row once per batch, and one of rows that examples name, of one table."""

    class Words(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.counts = layers.CategoryEncoding(7, "multi_hot", sparse=True, dtype="int32")
            self.table = self.add_weight((7, 2), init(1), name="table")
            self.head = layers.Dense(1, kernel_initializer=init(4))

        def call(self, words: Any) -> Any:
            both = keras.ops.matmul(self.counts(words), self.table) + keras.ops.matmul(self.counts(6 - words), self.table)
            return self.head(both + keras.ops.take(self.table, words[:, 0], axis=0))

    words = np.random.RandomState(0).randint(0, 7, (21, 3)).astype("int32")
    model = Words()
    model.compile(_O.Adagrad(0.1), "mse")
    return trained(model, words, words.sum(1, keepdims=True) / 9.0, batch_size=8)


@scenario
def state_that_no_row_decides() -> dict[str, Any]:
    """A last batch of one row: a replica without rows counts and anneals as the others do."""

    class Annealed(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.scale.assign(0.9 * self.scale)
            return x * self.scale

    spectral = layers.SpectralNormalization(layers.Dense(4, "tanh", kernel_initializer=init(1)))
    model = keras.Sequential([keras.Input((4,)), spectral, Annealed(), layers.Dense(1, kernel_initializer=init(2))])
    spectral.vector_u.assign(0.1 * np.arange(1.0, 5.0)[np.newaxis])
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression(17))


@scenario
def lazily_built_subclass() -> dict[str, Any]:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(6, "tanh", kernel_initializer=init(1))
            self.out = layers.Dense(1, kernel_initializer=init(2))

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    model = Net()
    model.compile(_O.Adam(0.05), "mse")
    return trained(model, *regression())


@scenario
def all_reduce_in_call() -> dict[str, Any]:
    """A layer that subtracts the mean of the global batch, as a cross-replica statistic."""

    class Centered(layers.Layer):
        def call(self, x: Any) -> Any:
            total, count = tf.reduce_sum(x, axis=0), tf.cast(tf.shape(x)[0], x.dtype)
            context = tf.distribute.get_replica_context()
            if context is not None:  # None while Keras builds the model, outside any replica.
                total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [total, count])
            return x - total / count

    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, kernel_initializer=init(1)),
            Centered(),
            layers.Dense(1, kernel_initializer=init(2)),
        ]
    )
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression())


@scenario
def stateful_recurrent_layers() -> dict[str, Any]:
    """State goes on from batch to batch, through evaluation and prediction too, row by row."""
    inner = layers.GRU(3, stateful=True, return_sequences=True, kernel_initializer=init(1), recurrent_initializer=init(2))
    outer = layers.LSTM(2, stateful=True, kernel_initializer=init(3), recurrent_initializer=init(4))
    body = [keras.Input(batch_shape=(7, 4, 2)), inner, outer, layers.Dense(1, kernel_initializer=init(5))]
    model = keras.Sequential(body)
    model.compile(_O.SGD(0.05), "mse")
    rng = np.random.RandomState(0)
    x, y = rng.randn(21, 4, 2).astype("float32"), rng.randn(21, 1).astype("float32")
    result = trained(model, x, y, epochs=2, batch_size=7)
    result["states"] = [keras.ops.convert_to_numpy(state) for layer in (inner, outer) for state in layer.states]
    inner.reset_state()
    result["after_reset"] = model.predict(x, batch_size=7, verbose=0)
    return result


@scenario
def sentences_of_any_length() -> dict[str, Any]:
    """A layer pads to the longest sentence of the batch, which one replica has. The last batch has one row."""
    cut = layers.TextVectorization(vocabulary=["red", "green", "blue"])
    body = [
        keras.Input((), dtype="string"),
        cut,
        layers.Embedding(5, 3, embeddings_initializer=init(1)),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, kernel_initializer=init(2)),
    ]
    model = keras.Sequential(body)
    model.compile(_O.SGD(0.05), "mse")
    rng = np.random.RandomState(0)
    words = np.array(["red", "green", "blue", "pink"])
    sentences = tf.constant([" ".join(words[rng.randint(0, 4, i % 7)]) for i in range(17)])
    result = trained(model, sentences, rng.randn(17, 1).astype("float32"), batch_size=8)
    numbers = keras.Sequential([keras.Input((), dtype="string"), cut])
    result["numbers"] = [numbers.predict(sentences[:6], verbose=0), numbers.predict_on_batch(sentences[:1])]
    numbers.compile(run_eagerly=True)
    result["eager_numbers"] = [numbers.predict(sentences[:6], verbose=0), numbers.predict_on_batch(sentences[:1])]
    return result


class _Positions(layers.Layer):
    """As keras.io embeds them: there are as many as tokens in the longest sentence of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = layers.Embedding(9, 4, embeddings_initializer=init(1))
        self.positions = layers.Embedding(8, 4, embeddings_initializer=init(2))

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(tf.range(tf.shape(x)[-1]))


class ClippedStep(keras.Model):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.05)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


@scenario
def embeddings_in_a_clipped_step() -> dict[str, Any]:
    """Adam squares each slice of a gradient, also of one that was clipped, and of sentences of open length."""
    rng = np.random.RandomState(0)
    sentences = tf.ragged.constant([rng.randint(1, 9, rng.randint(2, 7)).tolist() for _ in range(37)])
    y = rng.randn(37, 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((sentences.to_tensor(), y)).padded_batch(16, ([None], [1]))
    found = {}
    for kind in (keras.Model, ClippedStep):
        inputs = keras.Input((None,), dtype="int32")
        pooled = layers.GlobalAveragePooling1D()(layers.Activation("tanh")(_Positions()(inputs)))
        model = kind(inputs, layers.Dense(1, kernel_initializer=init(3))(pooled))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        found[kind.__name__] = [model.fit(data, epochs=2, verbose=0).history, model.get_weights()]
    return found


@scenario
def reflecting_pads() -> dict[str, Any]:
    """The last batch has one row, so that a replica has none."""

    class Reflected(layers.Layer):
        def call(self, x: Any) -> Any:
            x = keras.ops.pad(x, [[0, 0], [1, 1], [2, 2], [0, 0]], mode="reflect")
            return tf.pad(x, [[0, 0], [1, 0], [0, 1], [0, 0]], "SYMMETRIC")

    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(3, 3, activation="tanh", kernel_initializer=init(1)),
            Reflected(),
            layers.Conv2D(2, 3, kernel_initializer=init(2)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1, kernel_initializer=init(3)),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    rng = np.random.RandomState(0)
    return trained(model, rng.randn(9, 6, 6, 2).astype("float32"), rng.randn(9, 1).astype("float32"), batch_size=4)
