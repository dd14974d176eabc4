"""`fit`, `evaluate`, `predict` and custom loops on a real cluster: two workers, two servers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.asynchronous.worker_data import WorkerData

ROWS, BATCH = 200, 10


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    with tfrep.local_cluster(workers=2, servers=2) as cluster:
        yield tfrep.ParameterServerStrategy(cluster)


def make_data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    x = rng.randn(rows, 4).astype("float32")
    return x, (x @ rng.randn(4, 1)).astype("float32")


def make_model(strategy: Any, optimizer: Any = None, layers: tuple[Any, ...] = (), **compile_options: Any) -> Any:
    compile_options.setdefault("metrics", ["mae"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", **compile_options)
    return model


def single_device(model: Any) -> Any:
    """The same model, with the same weights, on one device."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile("sgd", "mse", metrics=["mae"])
    return copy


class RowCount(keras.metrics.Metric):
    """Counts examples, as a user would write it: it reads, then writes."""

    def __init__(self, name: str = "rows") -> None:
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(y_true)[0], self.dtype))

    def result(self) -> Any:
        return self.rows


class _Error(keras.metrics.Metric):
    """Says how its state changes with the mean error of a batch."""

    def __init__(self, change: Any) -> None:
        super().__init__(name="error")
        self.state = self.add_variable((), "zeros", name="state")
        self.change = change

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.change(self.state, keras.ops.mean(keras.ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return self.state + 0.0


@pytest.mark.parametrize("kind", ["arrays", "data frames", "dataset", "unknown length", "generator"])
def test_every_example_is_seen_once_per_epoch(strategy: Any, kind: str) -> None:
    x, y = make_data(205)
    model = make_model(strategy, metrics=[RowCount()])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    source = {
        "arrays": x,
        "data frames": pd.DataFrame(x),
        "dataset": dataset,
        "unknown length": dataset.filter(lambda *_: True),
        "generator": ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 205, BATCH)),
    }[kind]
    epochs = 1 if kind == "generator" else 3
    arrays = {"y": y, "batch_size": BATCH} if kind in ("arrays", "data frames") else {}
    history = model.fit(source, epochs=epochs, verbose=0, **arrays).history
    assert history["rows"] == [205.0] * epochs
    assert int(model.optimizer.iterations) == 21 * epochs
    assert np.all(np.isfinite(history["loss"]))


def test_a_creator_runs_on_the_workers_and_goes_on_from_epoch_to_epoch(strategy: Any) -> None:
    seen = []

    def dataset_fn(context: Any) -> tf.data.Dataset:
        seen.append(context)
        return tf.data.Dataset.from_tensor_slices(make_data()).repeat().shuffle(ROWS).batch(BATCH)

    model = make_model(strategy, metrics=[RowCount()])
    history = model.fit(tfrep.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=15, verbose=0).history
    assert history["rows"] == [150.0] * 3
    assert int(model.optimizer.iterations) == 45
    assert isinstance(seen[0], tf.distribute.InputContext)


def _numbers(count: int = 40) -> tfrep.DatasetCreator:
    """Batches whose rows are all 0, all 1, all 2, and so on."""
    row = lambda i: tf.fill([BATCH, 4], tf.cast(i, tf.float32))  # noqa: E731
    return tfrep.DatasetCreator(lambda context: tf.data.Dataset.range(count).map(lambda i: (row(i), row(i)[:, :1])))


def test_a_creator_is_read_once_and_from_its_start_where_nothing_is_trained(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[RowCount()])
    expected = np.mean((3.0 * np.arange(20)) ** 2)
    for _ in range(2):
        assert model.evaluate(_numbers(), steps=20, verbose=0) == pytest.approx([expected, 20.0 * BATCH])
        predictions = model.predict(_numbers(), steps=3, verbose=0)
        np.testing.assert_allclose(predictions[:, 0], np.repeat([0.0, 4.0, 8.0], BATCH))
    x, y = make_data()
    validation = {"validation_data": _numbers(), "validation_steps": 20}
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, **validation).history
    assert history["val_loss"] == pytest.approx([expected] * 2)


def test_a_creator_with_class_weights_and_with_what_it_should_yield_itself(strategy: Any) -> None:
    labels = tfrep.DatasetCreator(
        lambda context: tf.data.Dataset.from_tensors((tf.ones([BATCH, 4]), tf.repeat([0, 1], BATCH // 2))).repeat()
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
    history = model.fit(labels, steps_per_epoch=4, class_weight={0: 1.0, 1: 3.0}, verbose=0).history
    assert history["loss"][0] == pytest.approx(2.0 * np.log(2.0), rel=1e-5)
    for unused in ({"y": np.ones(3)}, {"sample_weight": np.ones(3)}):
        with pytest.raises(ValueError, match="should not be passed"):
            model.fit(labels, steps_per_epoch=4, verbose=0, **unused)


def test_new_data_of_the_same_kind_needs_no_new_program(strategy: Any) -> None:
    model = make_model(strategy)
    for _ in range(3):
        model.fit(_numbers(), steps_per_epoch=4, verbose=0)
        model.evaluate(_numbers(), steps=4, verbose=0)
    assert len(model.train_function._traced) == len(model.test_function._traced) == 1


def test_sentences_of_any_length_need_two_programs(strategy: Any) -> None:
    with strategy.scope():
        layers = [keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
        model.compile("sgd", "mse")
    sentences = tf.data.Dataset.range(1, 9).map(lambda n: (tf.ones([n], tf.int32), tf.zeros([1])))
    batches = sentences.padded_batch(1, padded_shapes=([None], [1]))
    model.fit(batches, verbose=0)
    model.evaluate(batches, verbose=0)
    assert model.predict(batches, verbose=0).shape == (8, 1)
    assert len(model.train_function._traced) == len(model.test_function._traced) == len(model.predict_function._traced) == 2


def test_a_step_may_need_to_know_how_long_sentences_are(strategy: Any) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.inner(x + tf.zeros([x.shape[1], 1]))

    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse")
    for length in (3, 5, 3, 7):
        x = np.ones((4, length, 2), "float32")
        model.fit(x, np.ones((4, length, 1), "float32"), verbose=0)
    assert int(model.optimizer.iterations) == 4


class Tells(keras.Sequential):
    """A step of its own, before which Keras makes no metrics, and which tells more than they do."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data) | {"stage": 2.0, "parts": {"ones": keras.ops.mean(keras.ops.ones_like(data[1]))}}


@pytest.mark.parametrize("steps", [1, 2])
def test_metrics_of_a_step_of_ones_own(strategy: Any, steps: int) -> None:
    x, y = make_data(5 * BATCH)
    with strategy.scope():
        model = Tells([keras.Input(x.shape[1:]), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae", RowCount()], steps_per_execution=steps)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    alone = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1, kernel_initializer="ones")])
    alone.compile("sgd", "mse", metrics=["mae"])
    expected = alone.evaluate(x, y, verbose=0, return_dict=True)
    for name in ("loss", "mae"):
        assert history[name] == pytest.approx([expected[name]] * 2, rel=1e-5)
    assert history["rows"] == [5.0 * BATCH] * 2
    assert history["stage"] == [2.0] * 2
    assert history["ones"] == [1.0] * 2


def test_no_step_is_done_and_not_counted_where_data_ends(strategy: Any) -> None:
    model = make_model(strategy, metrics=[RowCount()], steps_per_execution=4)
    with pytest.warns(UserWarning, match="ran out of data"):
        rows = model.fit(_numbers(6), steps_per_epoch=100, verbose=0).history["rows"]
    assert int(model.optimizer.iterations) == rows[0] / BATCH
    assert rows[0] in (4 * BATCH, 8 * BATCH)


def test_training_reaches_what_one_device_reaches(strategy: Any) -> None:
    x, y = make_data(640)
    model = make_model(strategy, keras.optimizers.Adam(0.05))
    model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0)
    assert model.evaluate(x, y, verbose=0)[0] < 0.01


def test_evaluate_is_spread_and_exact_also_with_metrics_that_are_not_means(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = make_data(205)
    y = (y > 0).astype("float32")
    metrics = lambda: [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]  # noqa: E731
    model = make_model(strategy, layers=(keras.layers.Dense(3, "tanh"),), metrics=metrics())
    single = single_device(model)
    single.compile("sgd", "mse", metrics=metrics())
    expected = single.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    workers, schedule = [], strategy.extended.step_runner.schedule
    monkeypatch.setattr(strategy.extended.step_runner, "schedule", lambda *step: workers.append(schedule(*step)) or workers[-1])
    for _ in range(50):  # On a busy machine one worker may do all steps before the other has begun.
        result = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        assert result == pytest.approx(expected, rel=1e-5)
        if {step.worker for step in workers} == {0, 1}:
            break
    else:
        pytest.fail("One worker has done all steps.")
    # What a step reads of the model is its weights: the metrics cost the servers nothing.
    ((function, *_),) = model.test_function._traced.values()
    assert len([1 for tensor in function.captured_inputs if tensor.dtype == tf.resource]) == len(model.weights)


def test_predict_keeps_the_order(strategy: Any) -> None:
    x, _ = make_data(37)
    model = make_model(strategy)
    single = single_device(model)
    np.testing.assert_allclose(model.predict(x, batch_size=8, verbose=0), single.predict(x, batch_size=8, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x), single.predict_on_batch(x), rtol=1e-5)


def test_a_batch_at_a_time(strategy: Any) -> None:
    x, y = make_data(16)
    model = make_model(strategy)
    single = single_device(model)
    single.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    for _ in range(3):
        assert model.train_on_batch(x, y) == pytest.approx(single.train_on_batch(x, y), rel=1e-4)
    assert model.test_on_batch(x, y) == pytest.approx(single.test_on_batch(x, y), rel=1e-4)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_an_optimizer_of_several_that_was_made_outside(strategy: Any) -> None:
    x, y = make_data(16)
    inner = keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: inner[variable.path.endswith("bias")])
    model = make_model(strategy, optimizer=optimizer)
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert [int(each.iterations) for each in (optimizer, *optimizer.optimizers)] == [12, 12, 12]


class BareLoss(keras.Sequential):
    """Its log has the name of a metric, and is none."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_bare_loss_of_a_step_is_its_log(strategy: Any) -> None:
    x, y = make_data(16)

    def logs(scope: Any) -> list[Any]:
        with scope:
            model = BareLoss([keras.Input(x.shape[1:]), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.05))
        return [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(3)]

    assert logs(strategy.scope()) == pytest.approx(logs(contextlib.nullcontext()), rel=1e-5)


def test_several_steps_in_one_execution(strategy: Any) -> None:
    x, y = make_data(205)
    model = make_model(strategy, metrics=[RowCount()], steps_per_execution=4)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    assert history["rows"] == [205.0] * 2
    assert int(model.optimizer.iterations) == 42


_NO_SUMS = {
    "maximum": lambda state, error: state.assign(keras.ops.maximum(state, error)),
    "last value": lambda state, error: state.assign(error),
    "moving average": lambda state, error: state.assign(0.99 * state + 0.01 * error),
}
_SUMS = {
    "atomic": lambda state, error: state.assign_add(error),
    "read and written": lambda state, error: state.assign(error + state),
    "in a branch": lambda state, error: state.assign(tf.cond(error > 0, lambda: state + error, lambda: state * 1.0)),
    "in two steps": lambda state, error: (state.assign_add(2.0 * error), state.assign_sub(error)),
}


@pytest.mark.parametrize("kind", _NO_SUMS)
def test_a_metric_whose_state_is_no_sum_is_refused(strategy: Any, kind: str) -> None:
    x, y = make_data()
    made_outside = _Error(_NO_SUMS[kind])
    with strategy.scope():
        made_inside = _Error(_NO_SUMS[kind])
    for metric in (made_inside, made_outside):
        model = make_model(strategy, metrics=[metric])
        for use in (model.fit, model.fit, model.evaluate):
            with refuses(told=["_Error", "`state`"], metric=...):
                use(x, y, batch_size=BATCH, verbose=0)
        assert int(model.optimizer.iterations) == 0
    step = tf.function(lambda: strategy.run(lambda: made_inside.update_state(tf.ones([3]), tf.zeros([3]))))
    with refuses(told=["_Error"], metric=...):
        strategy.coordinator.schedule(step)


@pytest.mark.parametrize("kind", _SUMS)
def test_a_metric_whose_state_is_a_sum_is_taken(strategy: Any, kind: str) -> None:
    x, y = make_data()
    with strategy.scope():
        metric = _Error(_SUMS[kind])
    model = make_model(strategy, metrics=[metric])
    error = model.evaluate(x, y, batch_size=BATCH, verbose=0)[1]
    assert error == pytest.approx(np.mean(np.abs(model.predict(x, verbose=0) - y)) * ROWS / BATCH, rel=1e-4)


def test_validation_and_early_stopping(strategy: Any) -> None:
    x, y = make_data()
    model = make_model(strategy, keras.optimizers.SGD(0.0))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
    history = model.fit(x, y, validation_data=(x, y), batch_size=BATCH, epochs=9, verbose=0, callbacks=[stop]).history
    assert len(history["val_loss"]) == 2
    assert history["val_loss"][0] == pytest.approx(history["loss"][0], rel=1e-5)


def test_dropout_differs_between_steps(strategy: Any) -> None:
    class Kept(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="distinct")
            self.bits = self.add_variable((64,), "zeros", name="bits")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            # Each step has one row of 6 inputs of 1: its mask is a number below 64.
            number = keras.ops.sum(keras.ops.cast(y_pred > 0, "int32") * [[1, 2, 4, 8, 16, 32]])
            self.bits.assign_add(keras.ops.one_hot(number, 64))

        def result(self) -> Any:
            return keras.ops.sum(keras.ops.cast(self.bits > 0, "float32"))

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5, seed=3)])
        model.compile(loss="mse", metrics=[Kept()], optimizer=None)
    ones = np.ones((64, 6), "float32")
    history = model.fit(ones, ones, batch_size=1, verbose=0).history
    # 64 draws of 64 masks show about 41 different ones; equal seeds on two workers would show at most 32.
    assert history["distinct"][0] > 33


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9), clipnorm=1.0),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2),
        lambda: keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=5),
        lambda: keras.optimizers.Ftrl(0.1),
    ],
    ids=["schedule and clipping", "accumulation", "moving average", "Ftrl"],
)
def test_optimizers(strategy: Any, make_optimizer: Any) -> None:
    x, y = make_data()
    with strategy.scope():
        own = make_optimizer()
    model = make_model(strategy, own, layers=(keras.layers.BatchNormalization(),))
    first = model.evaluate(x, y, verbose=0)[0]
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert int(own._iterations) == 60
    assert model.evaluate(x, y, verbose=0)[0] < first


def test_accumulated_gradients_are_all_there(strategy: Any) -> None:
    """The updates that they would make never come: what is there at the end is their sum."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=1000)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(optimizer, "mse")
    x, y = np.ones((400, 4), "float32"), -np.ones((400, 1), "float32")
    model.fit(x, y, batch_size=1, verbose=0)
    (accumulated,) = optimizer._accumulated_gradients
    np.testing.assert_allclose(accumulated.numpy(), 800.0)


def test_no_square_of_a_gradient_is_lost_by_ftrl(strategy: Any) -> None:
    """The gradient is 1 in every step, of which two workers make 400."""
    with strategy.scope():
        optimizer = keras.optimizers.Ftrl(0.1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer, lambda y_true, y_pred: keras.ops.mean(y_pred))
    model.fit(np.ones((400, 4), "float32"), np.ones((400, 1), "float32"), batch_size=1, verbose=0)
    (accumulator,), (linear,) = optimizer._accumulators, optimizer._linears
    np.testing.assert_allclose(accumulator.numpy(), 400.1, rtol=1e-5)
    assert np.isfinite(linear.numpy()).all()


def test_mixed_precision_counts_its_steps(strategy: Any) -> None:
    x, y = make_data()
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, dtype="mixed_float16"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=16.0)
        model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    assert int(optimizer.inner_optimizer.iterations) == 40


def test_moving_statistics_move(strategy: Any) -> None:
    x, y = make_data()
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = make_model(strategy, layers=(norm,))
    model.fit(x + 3.0, y, batch_size=BATCH, epochs=2, verbose=0)
    np.testing.assert_allclose(norm.moving_mean.numpy(), 3.0, atol=0.8)


def test_a_custom_loop_loses_nothing(strategy: Any) -> None:
    x, y = make_data(64)
    model = make_model(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
        total, precision = keras.metrics.Sum(), keras.metrics.TruePositives()

    def step(batch: Any) -> None:
        model.train_step(batch)
        total.update_state(tf.ones([16]))
        precision.update_state(tf.ones([16]), tf.ones([16]))

    @tf.function
    def worker_step(iterator: Any) -> None:
        strategy.run(step, args=(next(iterator),))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    assert coordinator is strategy.coordinator
    dataset = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()
        )
    )
    iterator = iter(dataset)
    for _ in range(100):
        coordinator.schedule(worker_step, args=(iterator,))
    coordinator.join()
    assert coordinator.done()
    assert int(model.optimizer.iterations) == 100
    assert float(total.result()) == 1600.0
    assert float(precision.result()) == 1600.0


def test_saving_and_checkpoints(strategy: Any, tmp_path: Any) -> None:
    x, y = make_data()
    model = make_model(strategy, keras.optimizers.Adam(0.01))
    path = str(tmp_path / "best-{epoch}.keras")
    rows = tmp_path / "rows.csv"
    rows.write_text("epoch,loss\n0,1.0\n1,0.")  # Was killed while it wrote the second row.
    logs = keras.callbacks.TensorBoard(str(tmp_path / "logs")), keras.callbacks.CSVLogger(rows, append=True)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path), *logs])
    assert [row.split(",")[0] for row in rows.read_text().splitlines()] == ["epoch", "0", "0", "1"]
    assert not list(tmp_path.glob(".tfrep-*"))
    loaded = keras.models.load_model(tmp_path / "best-2.keras")
    assert int(loaded.optimizer.iterations) == 40
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
    assert any("tfevents" in file.name for file in (tmp_path / "logs").rglob("*"))


def test_checkpoints_by_the_clock(strategy: Any, tmp_path: Any) -> None:
    x, y = make_data()
    model = make_model(strategy)
    seen: list[int] = []
    save = tfrep.TimedCheckpoint(tmp_path / "ckpt-{epoch}.weights.h5", seconds=1e-4)
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(len(os.listdir(tmp_path))))
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[save, look])
    assert seen == [1, 2]
    single_device(model).load_weights(tmp_path / "ckpt-2.weights.h5")


class _AtBatch(keras.callbacks.Callback):
    calls = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1


def test_batch_callbacks_are_refused_unless_they_say_otherwise(strategy: Any) -> None:
    x, y = make_data()
    model = make_model(strategy)
    with refuses(told=["_AtBatch"], callback=...):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[_AtBatch()])
    assert int(model.optimizer.iterations) == 0
    callback = _AtBatch()
    callback.supports_remote_logs = True
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    assert callback.calls == 20


def test_epoch_callbacks_get_numbers(strategy: Any) -> None:
    x, y = make_data()
    seen: list[Any] = []
    record = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    make_model(strategy).fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[record])
    assert len(seen) == 2
    assert all(isinstance(value, float) for logs in seen for value in logs.values())


def test_training_ends_at_once_when_the_loss_is_nan(strategy: Any) -> None:
    x, y = make_data()
    stop = keras.callbacks.TerminateOnNaN()
    history = make_model(strategy).fit(x * np.nan, y, batch_size=2, epochs=9, verbose=0, callbacks=[stop])
    assert history.epoch == [0]


def test_one_bar_moves_while_the_epoch_runs(strategy: Any, capsys: Any) -> None:
    x, y = make_data()
    make_model(strategy).fit(x, y, batch_size=BATCH, verbose=1)
    out = capsys.readouterr().out
    assert out.count("20/20") == 1 or out.rstrip().count("\n") == 0
    assert "1/20" in out
    assert "loss" in out


def test_data_that_ends_early_warns_and_counts_what_there_was(strategy: Any) -> None:
    x, y = make_data(50)
    creator = tfrep.DatasetCreator(lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    model = make_model(strategy, metrics=[RowCount()])
    with pytest.warns(UserWarning, match="ran out of data"):
        rows = model.fit(creator, steps_per_epoch=100, epochs=2, verbose=0).history["rows"]
    # Over when the first worker has no more; the next epoch begins at the beginning.
    assert all(50 <= count <= 100 for count in rows)
    assert int(model.optimizer.iterations) == sum(rows) / BATCH
    before = int(model.optimizer.iterations)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), steps_per_epoch=100, verbose=0)
    assert int(model.optimizer.iterations) == before + 5


@pytest.mark.parametrize("kind", ["arrays", "creator"])
def test_throughput_and_warmup(strategy: Any, kind: str) -> None:
    x, y = make_data()
    model = make_model(strategy)
    throughput = tfrep.callbacks.Throughput()
    warmup = tfrep.callbacks.LearningRateWarmup(0.05, epochs=1, steps_per_epoch=20)
    callbacks = [throughput, warmup]
    if kind == "arrays":
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks).history
    else:
        data = tfrep.DatasetCreator(lambda context: tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH))
        history = model.fit(data, steps_per_epoch=20, epochs=2, verbose=0, callbacks=callbacks).history
    waits = {"data_wait", "collective_wait"}
    assert not waits & set(history)
    np.testing.assert_allclose(np.divide(history["examples_per_second"], history["steps_per_second"]), BATCH)
    np.testing.assert_allclose(history["learning_rate"], 0.05, rtol=1e-6)
    assert warmup._start == pytest.approx(0.05 / 2)
    with_momentum = make_model(strategy, keras.optimizers.SGD(0.05, momentum=0.9))
    with refuses(hint="momentum_correction=False", momentum=...):
        with_momentum.fit(x, y, verbose=0, callbacks=[tfrep.callbacks.LearningRateWarmup(0.05)])


def _shuffled(context: Any) -> tf.data.Dataset:
    return tf.data.Dataset.range(10_000).shuffle(10_000).repeat().batch(8)


def test_workers_read_in_other_orders_though_there_is_a_global_seed(strategy: Any) -> None:
    """TensorFlow traces the pipeline of all workers once, and cannot tell them apart in it."""
    keras.utils.set_random_seed(1)
    read = WorkerData(strategy, tfrep.DatasetCreator(_shuffled))
    take = tf.function(lambda iterator: next(iterator))
    iterator = iter(read)
    taken = [strategy.coordinator.schedule(take, args=(iterator,)) for _ in range(12)]
    strategy.coordinator.join()
    assert len({tuple(each.fetch()) for each in taken}) == 12
    repl = tfrep.ParameterServerReplicator(strategy)
    assert len({tuple(each) for each in repl.run(lambda batch: batch, _shuffled, steps=12)}) == 12
    with refuses(op="avg"):
        repl.reduce([tf.ones([2])], "avg")
