"""A batch of fewer rows than there are replicas: some replica gets none, in every layer, traced and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("rows")

_ROW, _SEQUENCE, _IMAGE, _VOLUME = (8,), (8, 4), (8, 8, 3), (4, 4, 4, 2)


def make_layers() -> dict[str, tuple[Any, tuple[tuple[int, ...], ...]]]:
    """Gives layers with the shapes of their inputs, one layer of each kind that treats a batch in a way of its own."""
    return {
        "add": (layers.Add(), (_ROW, _ROW)),
        "add_sequences": (layers.Add(), (_SEQUENCE, _SEQUENCE)),
        "add_columns": (layers.Add(), ((8, 8), (8, 1))),
        "average": (layers.Average(), (_ROW, _ROW)),
        "concatenate": (layers.Concatenate(), (_ROW, _ROW)),
        "dot": (layers.Dot((2, 2)), (_SEQUENCE, _SEQUENCE)),
        "attention": (layers.Attention(), (_SEQUENCE, _SEQUENCE)),
        "dense": (layers.Dense(3), (_SEQUENCE,)),
        "einsum_dense": (layers.EinsumDense("abc,cd->abd", (None, 2), bias_axes="d"), (_SEQUENCE,)),
        "lstm": (layers.LSTM(3), (_SEQUENCE,)),
        "lstm_unrolled": (layers.LSTM(3, unroll=True, return_sequences=True), (_SEQUENCE,)),
        "bidirectional_gru": (layers.Bidirectional(layers.GRU(2)), (_SEQUENCE,)),
        "conv_lstm": (layers.ConvLSTM1D(2, 3), (_IMAGE,)),
        "time_distributed": (layers.TimeDistributed(layers.Conv1D(2, 3)), (_IMAGE,)),
        "conv_1d_causal": (layers.Conv1D(2, 3, padding="causal"), (_SEQUENCE,)),
        "conv_2d": (layers.Conv2D(2, 3, strides=2, padding="same"), (_IMAGE,)),
        "conv_2d_transpose": (layers.Conv2DTranspose(2, 3), (_IMAGE,)),
        "conv_3d": (layers.Conv3D(2, 2), (_VOLUME,)),
        "separable": (layers.SeparableConv2D(2, 3), (_IMAGE,)),
        "max_pool_1d": (layers.MaxPooling1D(2), (_SEQUENCE,)),
        "max_pool_2d": (layers.MaxPooling2D(2), (_IMAGE,)),
        "max_pool_3d": (layers.MaxPooling3D(2), (_VOLUME,)),
        "average_pool": (layers.AveragePooling2D(2), (_IMAGE,)),
        "global_max": (layers.GlobalMaxPooling2D(), (_IMAGE,)),
        "global_average": (layers.GlobalAveragePooling1D(), (_SEQUENCE,)),
        "batch_normalization": (layers.BatchNormalization(), (_IMAGE,)),
        "layer_normalization": (layers.LayerNormalization(), (_SEQUENCE,)),
        "group_normalization": (layers.GroupNormalization(2), (_ROW,)),
        "flatten": (layers.Flatten(), (_IMAGE,)),
        "reshape": (layers.Reshape((-1, 2)), (_ROW,)),
        "up_sampling": (layers.UpSampling2D(2, interpolation="bilinear"), (_IMAGE,)),
        "equalization": (layers.Equalization((0.0, 1.0)), (_IMAGE,)),
        "auto_contrast": (layers.AutoContrast((0.0, 1.0)), (_IMAGE,)),
        "spectrogram": (layers.STFTSpectrogram(frame_length=4, frame_step=2, fft_length=4), ((16, 1),)),
        "map": (layers.Lambda(lambda x: keras.ops.map(lambda row: row * 2, x)), (_ROW,)),
        "extrema": (layers.Lambda(lambda x: keras.ops.max(x, -1) - keras.ops.min(x, -1)), (_ROW,)),
    }


# In eager replicas without rows, Keras asks these for an element.
_NOT_EAGER = {"extrema", "global_max"}

# Where a function is traced, TensorFlow's kernels and static sizes decide; tracing all would take long.
_TRACED = ("add", "add_columns", "average", "lstm", "conv_2d", "max_pool_1d", "max_pool_2d", "max_pool_3d", "average_pool",
           "global_max", "equalization", "auto_contrast", "spectrogram", "map")  # fmt: skip

Program = Callable[[dict[str, list[tf.Tensor]]], dict[str, Any]]


def program(layers_and_shapes: dict[str, Any]) -> Program:
    """Gives a function from the inputs of all layers to their outputs and all gradients."""

    def call_all(batch: dict[str, list[tf.Tensor]]) -> dict[str, Any]:
        results = {}
        for name, (layer, _) in layers_and_shapes.items():
            inputs, weights = list(batch[name]), [v.value for v in layer.trainable_variables]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                output = layer(inputs if len(inputs) > 1 else inputs[0])
                loss = tf.reduce_sum(output**2)
            gradients = tape.gradient(loss, inputs + weights, unconnected_gradients="zero")
            rows = [output, *gradients[: len(inputs)]]
            results[name] = {"rows": rows, "sums": [tf.convert_to_tensor(g) for g in gradients[len(inputs) :]]}
        return results

    return call_all


@pytest.mark.parametrize("traced", [True, False])
def test_layers(traced: bool) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        kinds = make_layers()
        made = {name: kinds[name] for name in (_TRACED if traced else kinds) if traced or name not in _NOT_EAGER}
        for layer, shapes in made.values():
            symbolic = [keras.Input(shape) for shape in shapes]
            layer(symbolic if len(shapes) > 1 else symbolic[0])
    rng = np.random.RandomState(0)
    batch = {
        name: [tf.constant(rng.uniform(0, 1, (1, *shape)), tf.float32) for shape in shapes] for name, (_, shapes) in made.items()
    }
    # The row twice: alone, Keras would add a column as a bias on one device as well.
    expected = program(made)({name: [tf.repeat(x, 2, 0) for x in xs] for name, xs in batch.items()})

    def step(shards: Any) -> Any:
        return strategy.run(program(made), (shards,))

    found = (tf.function(step, autograph=False) if traced else step)(strategy.extended.shard(batch))
    for name, twice in expected.items():
        once = {"rows": [rows[:1] for rows in twice["rows"]], "sums": [total / 2 for total in twice["sums"]]}
        for how, join in (("rows", np.concatenate), ("sums", sum)):
            for values, one_device in zip(found[name][how], once[how], strict=True):
                joined = join([np.asarray(part) for part in strategy.experimental_local_results(values)])
                np.testing.assert_allclose(joined, one_device, rtol=1e-5, atol=1e-5, err_msg=f"{name} {how}")


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_of_gradients(rows: int, traced: bool) -> None:
    """A penalty of gradients, as of a WGAN-GP, through layers that get a row where they have none."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        stack = [layers.Conv2D(2, 3, activation="tanh"), layers.MaxPooling2D(2), layers.Conv2DTranspose(2, 2, activation="tanh")]
        model = keras.Sequential([keras.Input(_IMAGE), *stack])

    def penalty(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(images)
                score = tf.reduce_sum(model(images) ** 2)
            total = tf.reduce_sum(inner.gradient(score, images) ** 2)
        return [total, *outer.gradient(total, model.trainable_variables)]

    def step(shards: Any) -> Any:
        return strategy.run(penalty, (shards,))

    images = tf.constant(np.random.RandomState(0).uniform(size=(rows, *_IMAGE)), tf.float32)
    found = (tf.function(step, autograph=False) if traced else step)(strategy.extended.shard(images))
    for values, one_device in zip(found, penalty(images), strict=True):
        parts = map(np.asarray, strategy.experimental_local_results(values))
        np.testing.assert_allclose(sum(parts), one_device, rtol=1e-5, atol=1e-5)


_WAYS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda call: tf.function(call, autograph=False),
    "a loop": lambda call: lambda images: tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, call(x)), (0, images))[1],
    "a branch": lambda call: lambda images: tf.cond(tf.reduce_all(images < 2), lambda: call(images), lambda: images),
    "recomputed": tf.recompute_grad,
}
"""Ways to call a layer whose gradients TensorFlow takes of a graph, or takes again: not all of them ask a tape."""


@pytest.mark.parametrize("way", _WAYS)
def test_gradients_of_graphs(way: str) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        layer = layers.Conv2D(3, 3, padding="same", activation="tanh")
        layer(keras.Input(_IMAGE))
    call = _WAYS[way](layer)

    def gradients(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(call(images) ** 2)
        return tape.gradient(total, layer.trainable_variables)

    step = tf.function(lambda shards: strategy.run(gradients, (shards,)), autograph=False)
    for rows in (1, 4):
        images = tf.constant(np.random.RandomState(0).uniform(size=(rows, *_IMAGE)), tf.float32)
        found = step(strategy.extended.shard(images))
        for values, one_device in zip(found, gradients(images), strict=True):
            parts = map(np.asarray, strategy.experimental_local_results(values))
            np.testing.assert_allclose(sum(parts), one_device, rtol=1e-5, atol=1e-5)


@tf.custom_gradient
def _of_unknown_rank(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda gradient: tf.numpy_function(lambda array: 2 * array, [gradient], gradient.dtype)


@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_without_static_shapes(rows: int) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        layer = layers.Conv2D(2, 3)
        layer(keras.Input(_IMAGE))

    def gradients(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(_of_unknown_rank(layer(_of_unknown_rank(images))) ** 2)
        return tape.gradient(total, layer.trainable_variables)

    images = tf.constant(np.random.RandomState(0).uniform(size=(rows, *_IMAGE)), tf.float32)
    found = tf.function(lambda shards: strategy.run(gradients, (shards,)), autograph=False)(strategy.extended.shard(images))
    for values, one_device in zip(found, gradients(images), strict=True):
        parts = map(np.asarray, strategy.experimental_local_results(values))
        np.testing.assert_allclose(sum(parts), one_device, rtol=1e-5, atol=1e-5)


def one_row(strategy: Any, run_eagerly: bool) -> list[Any]:
    """Does with one row what people do with one row."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input((8,))
        hidden = layers.Add()([inputs, layers.Dense(8)(inputs)])
        hidden = layers.LSTM(2)(layers.Reshape((2, 4))(hidden))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    x = np.random.RandomState(0).randn(3, 8).astype("float32")
    y = x[:, :1]
    one_at_a_time = tf.data.Dataset.from_tensor_slices((x, y)).batch(1, drop_remainder=True)
    results = [
        model.predict(x[:1], verbose=0),
        model.predict_on_batch(x[:1]),
        model.train_on_batch(x[:1], y[:1]),
        model.fit(one_at_a_time, verbose=0).history["loss"],
        model.evaluate(x[:1], y[:1], verbose=0),
    ]
    return [np.asarray(result).tolist() for result in results + model.get_weights()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for result, one_device in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, one_device, rtol=1e-5, atol=1e-6)


def test_one_row(worker_pool: Any) -> None:
    expected = one_row(tf.distribute.get_strategy(), run_eagerly=False)
    assert_same(one_row(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), run_eagerly=False), expected)
    for found in worker_pool("tf", 2).run(one_row, False):
        assert_same(found, expected)


@pytest.mark.lane("quick")
def test_one_row_eagerly() -> None:
    expected = one_row(tf.distribute.get_strategy(), run_eagerly=True)
    assert_same(one_row(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), run_eagerly=True), expected)
