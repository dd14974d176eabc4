"""What a step sees of the number of its rows, and what happens when it needs more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.synchronous.open_rows import traced_for_any_rows

BATCH = {"x": tf.ones([4, 2]), "weight": tf.constant(2.0), "rows": tf.RaggedTensor.from_row_lengths([1, 2], [1, 1])}


class Builds:
    """Builds functions as Keras does, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[Any], Any]) -> Any:
        self.count += 1
        return tf.function(lambda batches: [step(batch) for batch in batches])


def test_only_the_number_of_rows_is_hidden() -> None:
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        seen.append((batch["x"].shape.as_list(), batch["weight"].shape.as_list(), type(batch["rows"])))
        return tf.reduce_sum(batch["x"]), tf.shape(batch["x"])[0]

    builds = Builds()
    function = traced_for_any_rows(builds, step)
    for _ in range(2):
        ((total, rows),) = function([BATCH])
        assert (float(total), int(rows)) == (8.0, 4)
    assert seen == [([None, 2], [], tf.RaggedTensor)]
    assert builds.count == 1


def test_what_runs_knows_the_number() -> None:
    seen: list[Any] = []

    def step(rows: Any) -> Any:
        flat = tf.reshape(rows * 2.0, [tf.shape(rows)[0] * 3])
        seen.extend([rows.shape.as_list(), {operation.type for operation in rows.graph.get_operations()}])
        return flat

    options, ran = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        flat = traced_for_any_rows(lambda step: step, step)(tf.compat.v1.placeholder(tf.float32, [4, 3], "rows"))
        result = session.run(flat, {"rows:0": np.ones([4, 3])}, options, ran)
    assert result.tolist() == [2.0] * 12
    shape, traced = seen
    assert shape == [None, 3]
    runs = {node.op for graph in ran.partition_graphs for node in graph.node}
    assert "Mul" in runs
    assert "Shape" in traced - runs


def test_a_step_that_needs_the_number_is_traced_for_it() -> None:
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        seen.append(batch["x"].shape[0])
        return tf.reduce_sum(batch["x"] + tf.zeros([batch["x"].shape[0], 1]))

    builds = Builds()
    function = traced_for_any_rows(builds, step)
    assert [float(function([BATCH])[0]) for _ in range(2)] == [8.0, 8.0]
    assert seen == [None, 4]
    assert builds.count == 2


@pytest.mark.parametrize("error", [ConfigurationError, StopIteration, tf.errors.OutOfRangeError])
def test_what_has_another_reason_is_raised_at_once(error: type[Exception]) -> None:
    calls: list[Any] = []

    def run(batches: Any) -> Any:
        calls.append(batches)
        raise error("no") if error is not tf.errors.OutOfRangeError else error(None, None, "no")

    function = traced_for_any_rows(lambda step: run, lambda batch: batch)
    with pytest.raises(error):
        function([BATCH])
    assert len(calls) == 1


def test_an_error_of_the_step_is_its_own() -> None:
    def step(batch: Any) -> Any:
        raise KeyError("y")

    with pytest.raises(KeyError, match="y"):
        traced_for_any_rows(Builds(), step)([BATCH])


_WIDTH = 3


def _looking() -> tuple[keras.Layer, list[Any]]:
    """Returns a layer of Keras's that notes of how many rows steps are traced, and its notes."""
    seen: list[Any] = []

    def note(x: Any) -> Any:
        if current_step() is not None:
            seen.append(x.shape[0])
        return x

    note.__module__ = keras.activations.relu.__module__  # Else it would be one of the user's own, which may mix rows.
    return layers.Activation(note), seen


class AddsSum(layers.Layer):
    """Adds a sum over rows to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class TellsSum(layers.Layer):
    """Keeps a metric of a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.told = keras.metrics.Mean("told")

    def call(self, x: Any) -> Any:
        self.told.update_state(ops.sum(x))
        return x


class OwnLoss(keras.Model):
    """Makes a sum over rows its loss."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return ops.sum(ops.square(y - y_pred)) / 10.0


def _plain_loss(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p), axis=-1)


_PROGRAMS: dict[str, tuple[list[Any], Callable[[], list[Any]], dict[str, Any]]] = {
    "of Keras": ([4], lambda: [layers.BatchNormalization(synchronized=True), layers.Dense(1)], {"loss": "mse", "metrics": ["mae"]}),
    "scaled": ([4], lambda: [layers.Dense(1)], {"loss": keras.losses.Huber(), "optimizer": "scaled"}),
    "summed": ([4], lambda: [layers.Dense(1)], {"loss": keras.losses.MeanSquaredError(reduction="sum")}),
    "a loss that a layer adds": ([None], lambda: [AddsSum(), layers.Dense(1)], {"loss": "mse"}),
    "a regularizer": ([4, None], lambda: [layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.01))], {"loss": "mse"}),
    "a metric of a layer": ([None], lambda: [TellsSum(), layers.Dense(1)], {"loss": "mse"}),
    "a loss without a reduction": ([4, None], lambda: [layers.Dense(1)], {"loss": keras.losses.MeanSquaredError(reduction=None)}),
    "a function as loss": ([None], lambda: [layers.Dense(1)], {"loss": _plain_loss}),
    "a loss of the model": ([None], lambda: [layers.Dense(1)], {"model": OwnLoss}),
}


def _train(made: Callable[[], list[Any]], strategy: Any, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Trains on batches of one size. Returns which rows were seen, and what one device would tell too."""
    random, options = np.random.RandomState(0), dict(options)
    x, y = random.randn(16, _WIDTH).astype("float32"), random.randn(16, 1).astype("float32")
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        (looks, seen), inputs = _looking(), keras.Input((_WIDTH,))
        hidden = looks(inputs)
        for layer in made():
            hidden = layer(hidden)
        model = options.pop("model", keras.Model)(inputs, hidden)
        optimizer: Any = keras.optimizers.SGD(0.05)
        if options.pop("optimizer", None):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, **options)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0).history
    return seen, [*map(np.array, history.values()), *model.get_weights()]


@pytest.mark.parametrize("name", _PROGRAMS)
def test_steps_that_do_not_ask_are_traced_for_the_rows_they_have(name: str) -> None:
    seen, made, options = _PROGRAMS[name]
    _, wanted = _train(made, None, options)
    replicas = tfrep.MirroredStrategy(["CPU:0", "CPU:1"], densify_sparse_gradients=True)  # So that replicas trace it.
    found, result = _train(made, replicas, options)
    for one, other in zip(result, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert list(dict.fromkeys(found)) == seen


def test_batches_of_other_sizes_later() -> None:
    def results(strategy: Any) -> tuple[list[Any], list[float]]:
        keras.utils.set_random_seed(1)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            looks, seen = _looking()
            model = keras.Sequential([keras.Input((_WIDTH,)), looks, layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        x = np.random.RandomState(0).randn(8, _WIDTH).astype("float32")
        return seen, [float(model.train_on_batch(x[:rows], x[:rows, :1])) for rows in (8, 5, 2, 1, 8)]

    _, wanted = results(None)
    seen, told = results(tfrep.MirroredStrategy(["CPU:0", "CPU:1"], densify_sparse_gradients=True))
    np.testing.assert_allclose(told, wanted, rtol=1e-5)
    assert seen == [4, 4, None, None], "Keras has a second size traced for all others"
