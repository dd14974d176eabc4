"""Ways to run, and data of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from scenarios.base import dense, init, regression, scenario, trained

_L = keras.losses
_O = keras.optimizers


@scenario
def steps_per_execution() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=2)
    return trained(model, *regression(), batch_size=8)


@scenario
def unrolled_steps_per_execution() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=3)
    model.unrolled_steps_per_execution = 3
    return trained(model, *regression(), batch_size=4)


@scenario
def steps_per_execution_of_a_generator() -> dict[str, Any]:
    x, y = regression()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from ((x[start : start + 5], y[start : start + 5]) for start in range(0, len(x), 5))

    specs = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=3)
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    return trained(model, data, batch_size=None)


@scenario
def repeated_orders_of_rows() -> dict[str, Any]:
    """Where its data ends, `repeat` draws one order more of `shuffle`, which the next epoch does not have."""
    model = dense()
    model.compile(_O.SGD(0.05), "mse")
    data = tf.data.Dataset.from_tensor_slices(regression()).shuffle(37, seed=1).batch(16).repeat(2)
    return trained(model, data, batch_size=None)


@scenario
def run_eagerly() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
    return trained(model, *regression(), epochs=1)


@scenario
def jit_compile() -> dict[str, Any]:
    model = dense()
    model.compile(_O.Adam(0.05), "mse", jit_compile=True)
    return trained(model, *regression(32))


@scenario
def on_batch() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    x, y = regression(5)
    return {
        "train": [model.train_on_batch(x[:n], y[:n]) for n in (5, 1, 3)],
        "weighted": model.train_on_batch(x, y, sample_weight=np.arange(5.0), return_dict=True),
        "test": model.test_on_batch(x, y),
        "predict": model.predict_on_batch(x),
        "weights": model.get_weights(),
    }


@scenario
def fewer_rows_than_replicas() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    return trained(model, *regression(33))


@scenario
def convolutions_of_no_rows() -> dict[str, Any]:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 2, kernel_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.DepthwiseConv2D(2, depth_multiplier=2, activation="tanh", depthwise_initializer=init(2)),
            layers.SeparableConv2D(3, 2, depthwise_initializer=init(3), pointwise_initializer=init(4)),
            layers.Conv2DTranspose(2, 2, kernel_initializer=init(5)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1, kernel_initializer=init(6)),
        ]
    )
    model.compile(_O.SGD(0.02), "mse", metrics=["mae"])
    rng = np.random.RandomState(0)
    return trained(model, rng.randn(9, 6, 6, 2).astype("float32"), rng.randn(9, 1).astype("float32"), batch_size=4)


@scenario
def parts_known_to_be_empty() -> dict[str, Any]:
    model = dense()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(_O.SGD(0.05), loss, metrics=["mae"])
    weight = np.linspace(0.5, 2.0, 7).astype("float32")
    return trained(model, *regression(7), batch_size=1, sample_weight=weight)


@scenario
def a_single_row() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    return trained(model, *regression(1))


@scenario
def validation() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    x, y = regression(50)
    history = model.fit(
        x, y, batch_size=16, epochs=4, initial_epoch=1, shuffle=False, validation_split=0.3, validation_freq=2, verbose=0
    )
    return {"weights": model.get_weights(), "history": history.history}


@scenario
def shuffled_arrays() -> dict[str, Any]:
    """One epoch over shuffled rows, each with a bit of its own: the sum of their gradients tells which were read."""
    model = keras.Sequential([keras.Input((37,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(_O.SGD(1.0), _L.MeanSquaredError(reduction="sum"))
    model.fit(np.eye(37, dtype="float32"), np.full((37, 1), 0.5, "float32"), batch_size=16, shuffle=True, verbose=0)
    return {"each_row_once": model.get_weights()}


@scenario
def data_pipelines() -> dict[str, Any]:
    """A shuffled and repeated `tf.data` pipeline, a `PyDataset` and a generator."""

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return x[16 * i : 16 * i + 16].copy(), y[16 * i : 16 * i + 16].copy()

    x, y = regression()
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(37, seed=3).batch(16).repeat()
    generator = ((x[i : i + 16], y[i : i + 16]) for i in range(0, 37, 16))
    results = {}
    for name, data, steps in (("dataset", shuffled, 3), ("pydataset", Rows(), None), ("generator", generator, None)):
        model = dense()
        model.compile(_O.SGD(0.05), "mse")
        history = model.fit(data, epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
        results[name] = [model.get_weights(), history.history]
    return results


@scenario
def endless_data_in_several_fits() -> dict[str, Any]:
    """Where one `fit` ends, something was read ahead, also behind a map that runs in parallel: none that a shuffle begins with."""
    x, y = regression(60)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60)
    results = {}
    for name, each in (("plain", data), ("mapped", data.map(lambda x, y: (2.0 * x, y), num_parallel_calls=tf.data.AUTOTUNE))):
        model = dense()
        model.compile(_O.SGD(0.05), "mse")
        endless = each.repeat().batch(8)
        results[name] = [model.fit(endless, epochs=2, steps_per_epoch=5, verbose=0).history["loss"] for _ in range(3)]
    return results


@scenario
def sparse_ragged_and_string_inputs() -> dict[str, Any]:
    rng = np.random.RandomState(0)
    dense_rows = (rng.rand(21, 6) * (rng.rand(21, 6) > 0.6)).astype("float32")
    y = dense_rows.sum(1, keepdims=True)
    sparse_model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(1, kernel_initializer=init(1))])
    sparse_model.compile(_O.SGD(0.1), "mse")
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense_rows), y)).batch(8)
    sparse_model.fit(rows, epochs=2, verbose=0)

    class Lengths(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1, kernel_initializer=init(1))

        def train_step(self, batch: Any) -> Any:
            (words, numbers), target = batch
            features = tf.stack([tf.cast(tf.strings.length(words), tf.float32), tf.reduce_sum(numbers, axis=1)], axis=1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.out(features) - target))
            variables = self.out.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    words = tf.constant([("word" * 9)[: 1 + i % 7] for i in range(21)])
    numbers = tf.ragged.constant([[0.1] * (i % 4) for i in range(21)], dtype=tf.float32)
    ragged_model = Lengths()
    ragged_model.compile(_O.SGD(0.01))
    pairs = tf.data.Dataset.from_tensor_slices(((words, numbers), y)).batch(8)
    history = ragged_model.fit(pairs, epochs=2, verbose=0)
    return {
        "sparse": sparse_model.get_weights(),
        "ragged": ragged_model.out.get_weights(),
        "history": history.history,
    }


@scenario
def predicted_strings() -> dict[str, Any]:
    """Texts of any length, words, and the letters of words; the last batch has one row."""

    class Words(keras.Model):
        def predict_step(self, batch: Any) -> Any:
            texts = tf.strings.join([batch[0], "\x00é"])
            pairs, words = tf.stack([texts, batch[0]], 1), tf.strings.split(batch[0])
            letters = tf.strings.unicode_split(words, "UTF-8")
            return {"texts": texts, "pairs": pairs, "sparse": tf.sparse.from_dense(pairs), "words": words, "letters": letters}

    def codes(value: Any) -> Any:
        """Numbers, which can be compared, for strings."""
        return [codes(each) for each in value] if isinstance(value, list) else list(value)

    def as_lists(outputs: dict[str, Any]) -> dict[str, Any]:
        sparse, words, letters = outputs.pop("sparse"), outputs.pop("words"), outputs.pop("letters")
        lists = {"values": sparse.values.numpy(), **outputs}
        found = {name: codes(value.tolist()) for name, value in lists.items()}
        return {**found, "indices": sparse.indices.numpy(), "words": codes(words.to_list()), "letters": codes(letters.to_list())}

    texts = [" ".join(["Ab", "c", "äöü"][: i % 4]) * (1 + i) for i in range(9)]
    rows = tf.data.Dataset.from_tensor_slices((tf.constant(texts),)).batch(4)
    model = Words()
    model.compile(jit_compile=False)  # On a GPU the default is XLA, which has no strings: one device ends with an error.
    result = {"function": as_lists(model.predict(rows, verbose=0))}
    model.compile(run_eagerly=True)
    return {**result, "eager": as_lists(model.predict(rows, verbose=0))}
