"""Steps that Keras drives are traced once, as one device's: whatever they do with rows, the answer is that of one device."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous import functions

_X = np.random.default_rng(0).normal(size=(39, 6)).astype("float32")
_Y = _X[:, :2] * 0.5
_BATCH = 16  # The last batch has seven rows.


class Smooths(layers.Layer):
    """Each row gets something of the rows beside it."""

    def call(self, x: Any) -> Any:
        kernel = tf.constant([[[0.25]], [[0.5]], [[0.25]]])
        return tf.transpose(tf.nn.conv1d(tf.transpose(x)[..., None], kernel, 1, "SAME")[..., 0])


class Spectral(keras.Sequential):
    """Its loss has the spectrum of the errors along the batch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            errors = tf.transpose(self(x, training=True) - y)
            loss = tf.reduce_mean(tf.math.log1p(tf.square(tf.abs(tf.signal.fft(tf.cast(errors, tf.complex64))))))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


class Noisy(keras.Sequential):
    """Draws in its step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step((x + tf.random.stateless_normal(tf.shape(x), [1, 2]), y))


class Looping(keras.Sequential):
    """Its step has loops and branches in which all rows are asked, and variables are written."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounds = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(2,), initializer="zeros", trainable=False)
        self.drop = layers.Dropout(0.3)
        self.error = keras.metrics.Mean("error")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.objective(x, y)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss, "rounds": self.rounds + 0.0, "error": self.error.result()}

    def objective(self, x: Any, y: Any) -> Any:
        def halve(outputs: Any) -> Any:
            self.rounds.assign_add(1.0)
            return [tf.tanh(0.7 * outputs)]

        def note() -> Any:
            self.error.update_state(tf.reduce_sum(tf.abs(outputs - y), 1))
            return 0.01 * tf.reduce_sum(self.mean.value * outputs)

        def add(i: Any, loss: Any) -> Any:
            self.mean.assign(0.9 * self.mean + tf.reduce_mean(outputs, 0))
            dropped = self.drop(outputs, training=True)
            loss += tf.reduce_mean(tf.square(dropped - y)) * tf.cast(i, tf.float32)
            return i + 1, loss + tf.cond(tf.reduce_mean(dropped) > 0.0, note, lambda: 0.0)

        (outputs,) = tf.while_loop(lambda each: tf.reduce_mean(tf.abs(each)) > 0.2, halve, [self(x, training=True)])
        return tf.while_loop(lambda i, _: i < 3, add, (0, 0.0))[1]


class Late(keras.Sequential):
    """Its loss has a layer that `call` does not use, and that is built when the step is traced."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = layers.Dense(2)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *others: Any, **named: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - self.head(y_pred)))


def _late() -> keras.Model:
    return Late([keras.Input((6,)), layers.Dense(3)])


class Maps(layers.Layer):
    """Its output is computed a row after the other."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x: Any) -> Any:
        return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(self.kernel, row, transpose_a=True)), x)


def _mapping() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), Maps(), layers.Dense(2)])


def _recurrent() -> keras.Model:
    rows = [layers.Reshape((3, 2)), layers.Masking(), layers.Bidirectional(layers.LSTM(4, dropout=0.2, return_sequences=True))]
    return keras.Sequential([keras.Input((6,)), *rows, layers.GRU(3), layers.Dense(2)])


def _looping() -> keras.Model:
    return Looping([keras.Input((6,)), layers.Dense(2)])


def _smoothing() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(5), Smooths(), layers.Dense(2)])


def _spectral() -> keras.Model:
    return Spectral([keras.Input((6,)), layers.Dense(2)])


def _drawing() -> keras.Model:
    between = [layers.Dropout(0.5), layers.BatchNormalization(), layers.GaussianNoise(0.1)]
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), *between, layers.Dense(2)])


def _noisy() -> keras.Model:
    return Noisy([keras.Input((6,)), layers.Dense(2)])


def _transcribed(labels: Any, steps: Any) -> Any:
    """The loss of Keras 2 that aligns sequences. Each row of `_Y` becomes two labels."""
    rows = tf.shape(steps)[0]
    named = tf.cast(labels > 0, tf.int32) + tf.constant([0, 1])
    return tf.keras.backend.ctc_batch_cost(named, steps, tf.fill([rows, 1], 6), tf.fill([rows, 1], 2))


def _transcribing() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Reshape((6, 1)), layers.LSTM(5, return_sequences=True), layers.Softmax()])


_LOSSES = {"late": None, "transcribing": _transcribed}

_MODELS: dict[str, Callable[[], keras.Model]] = {
    "smoothing": _smoothing,
    "spectral": _spectral,
    "drawing": _drawing,
    "noisy": _noisy,
    "recurrent": _recurrent,
    "looping": _looping,
    "late": _late,
    "mapping": _mapping,
    "transcribing": _transcribing,
}


def _trained(scope: Any, name: str, **settings: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with scope:
        model = _MODELS[name]()
        model.compile(keras.optimizers.SGD(0.1, 0.9), _LOSSES.get(name, "mse"), **settings)
    fitted = model.fit(_X, _Y, batch_size=_BATCH, epochs=2, shuffle=False, validation_data=(_X[:9], _Y[:9]), verbose=0)
    one = model.train_on_batch(_X[:5], _Y[:5])
    return {"history": fitted.history, "one": one, "weights": model.get_weights(), "predict": model.predict(_X, 16, verbose=0)}


def _trained_in_scope(strategy: Any, name: str) -> dict[str, Any]:
    return _trained(strategy.scope(), name)


def _assert_same(found: Any, expected: Any) -> None:
    keras.tree.map_structure(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5, atol=2e-6), found, expected)


def _mirrored(number: int) -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy([f"CPU:{i}" for i in range(number)])


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether steps were partitioned."""
    note, seen = functions.note_one_device, set[bool]()

    def noted(model: Any, phase: str, is_one_device: bool) -> None:
        seen.add(is_one_device)
        note(model, phase, is_one_device)

    monkeypatch.setattr(functions, "note_one_device", noted)
    return seen


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", _MODELS)
def test_mirrored_replicas(name: str, number: int, ways: set[bool]) -> None:
    expected = _trained(contextlib.nullcontext(), name)
    _assert_same(_trained_in_scope(_mirrored(number), name), expected)
    assert ways == {True}


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_processes(communicator: str, worker_pool: Any) -> None:
    for name in _MODELS:
        expected = _trained(contextlib.nullcontext(), name)
        for found in worker_pool(communicator, 2).run(_trained_in_scope, name):
            _assert_same(found, expected)


def _trained_on_batches(scope: Any, hides_rows: bool) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    batches = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH)
    if hides_rows:  # Nothing tells that inputs and targets have one number of rows.
        batches = batches.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(np.copy, [x], x.dtype), [None, 6]), y))
    fitted = model.fit(batches, epochs=2, validation_data=batches, verbose=0)
    return {"history": fitted.history, "weights": model.get_weights(), "predict": model.predict(batches, verbose=0)}


def _trained_on_batches_of_a_rank(strategy: Any) -> dict[str, Any]:
    return _trained_on_batches(strategy.scope(), hides_rows=strategy.rank == 1)


def test_ranks_whose_pipelines_differ(worker_pool: Any) -> None:
    expected = _trained_on_batches(contextlib.nullcontext(), hides_rows=False)
    for found in worker_pool("tf", 2).run(_trained_on_batches_of_a_rank):
        _assert_same(found, expected)


@pytest.mark.parametrize("name", ["drawing", "recurrent"])
@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"steps_per_execution": 2}], ids=["XLA", "several"])
def test_settings(settings: dict[str, Any], name: str) -> None:
    expected = _trained(contextlib.nullcontext(), name, **settings)
    _assert_same(_trained(_mirrored(2).scope(), name, **settings), expected)


class Told(keras.Sequential):
    """Tells what a step sees of its replicas and its rows."""

    def train_step(self, data: Any) -> dict[str, Any]:
        context: Any = tf.distribute.get_replica_context()
        self.seen = (
            self.distribute_strategy.num_replicas_in_sync,
            context.num_replicas_in_sync,
            tf.distribute.has_strategy(),
        )
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        total = tf.reduce_sum(x)
        return super().train_step(data) | {
            "rows": tf.shape(x)[0],
            "sum": total,
            "reduced": context.all_reduce("sum", total),
            "average": tf.nn.compute_average_loss(tf.square(x[:, 0])),
        }


def test_there_is_one_replica_in_a_step() -> None:
    strategy = _mirrored(2)
    with strategy.scope():
        model = Told([keras.Input((6,)), layers.Dense(2)])
        model.compile("sgd", "mse")
    logs = model.train_on_batch(_X[:7], _Y[:7], return_dict=True)
    assert model.seen == (1, 1, False)
    assert logs["rows"] == 7
    np.testing.assert_allclose([logs["sum"], logs["reduced"]], [_X[:7].sum()] * 2, rtol=1e-5)
    np.testing.assert_allclose(logs["average"], np.mean(_X[:7, 0] ** 2), rtol=1e-5)
    assert strategy.num_replicas_in_sync == 2


def test_layers_and_slots_that_a_step_makes_are_the_strategys() -> None:
    class Late(keras.Model):
        def build(self, shape: Any) -> None:
            self.dense = layers.Dense(2, kernel_initializer="ones")
            self.dense.build(shape)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    def trained(scope: Any) -> Any:
        with scope:
            model = Late()
            model.compile(keras.optimizers.Adam(0.1), "mse")
        model.train_on_batch(_X[:7], _Y[:7])
        return model

    found, expected = trained(_mirrored(2).scope()), trained(contextlib.nullcontext())
    _assert_same(found.get_weights(), expected.get_weights())
    for variable in [*found.variables, *found.optimizer.variables]:
        copies = variable.value.values
        assert [copy.device[-5:] for copy in copies] == ["CPU:0", "CPU:1"]
        np.testing.assert_array_equal(copies[0], copies[1])


def test_what_is_written_while_a_step_is_traced_reaches_all_copies() -> None:
    class Counts(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.init_scope():
                self.traces.assign_add(1.0)
            return super().train_step(data) | {"traces": self.traces + 0.0}

    with _mirrored(2).scope():
        model = Counts([keras.Input((6,)), layers.Dense(2)])
        model.traces = tf.Variable(0.0)
        model.compile("sgd", "mse")
    logs = model.train_on_batch(_X[:7], _Y[:7], return_dict=True)
    assert [float(copy) for copy in model.traces.values] == [logs["traces"]] * 2 != [0.0] * 2


class ScansFive(keras.Model):
    """A loop takes the rows of batches with five columns; replicas run such a step."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        if x.shape[1] == 5:
            x = tf.scan(lambda before, row: 0.5 * before + row, x)
        self.total.assign_add(tf.reduce_sum(x))
        return {"total": self.total + 0.0}


def test_a_loop_from_row_to_row_in_batches_of_other_sizes() -> None:
    def totals(scope: Any) -> list[float]:
        with scope:
            model = ScansFive()
            model.compile()
        return [model.train_on_batch(x, return_dict=True)["total"] for x in (_X[:7], _X[:7, :5], _X[:9])]

    np.testing.assert_allclose(totals(_mirrored(2).scope()), totals(contextlib.nullcontext()), rtol=1e-5)


def test_what_has_no_rule_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _trained(_mirrored(2).scope(), "spectral")
    told = [str(each.message) for each in seen if "cannot be split among replicas" in str(each.message)]
    assert len(told) == 1
    assert "FFT" in told[0]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _trained(_mirrored(2).scope(), "drawing")
    assert not [each for each in seen if "cannot be split among replicas" in str(each.message)]


class Tells(keras.Sequential):
    """Its step writes a summary, prints, and checks."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        tf.summary.scalar("mean", tf.reduce_mean(x), step=self.optimizer.iterations.value)
        tf.print("the sum is", tf.round(tf.reduce_sum(x)))
        tf.debugging.assert_less(tf.reduce_sum(x), 100.0)
        return super().train_step(data)


def _told(scope: Any, x: Any, folder: Path) -> list[tuple[int, float]]:
    with scope:
        model = Tells([keras.Input((6,)), layers.Dense(2)])
        model.compile("sgd", "mse")
    with tf.summary.create_file_writer(str(folder)).as_default():
        model.fit(x, _Y, batch_size=_BATCH, shuffle=False, verbose=0)
        tf.summary.flush()
    (file,) = folder.iterdir()
    written = EventAccumulator(str(file), {"tensors": 0})
    written.Reload()
    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in written.Tensors("mean")]


def test_what_a_step_tells_is_told_once_and_of_all_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed = []
    for name, scope in {"one": contextlib.nullcontext(), "two": _mirrored(2).scope()}.items():
        (tmp_path / name).mkdir()
        found = _told(scope, _X, tmp_path / name)
        np.testing.assert_allclose(found, [(i, _X[16 * i : 16 * i + 16].mean()) for i in range(3)], atol=1e-6)
        printed.append([line for line in capfd.readouterr().err.splitlines() if line.startswith("the sum is")])
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3


def test_an_error_of_a_step_names_the_users_line(tmp_path: Path) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        _told(_mirrored(2).scope(), np.ones_like(_X) * 9.0, tmp_path)
    line = inspect.getsourcelines(Tells)[1] + 7
    assert any(f"{__file__}:{line}" in note for note in error.value.__notes__)


def test_what_a_step_sends_is_explained() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, use_bias=False), layers.Lambda(lambda x: tf.reverse(x, [0]))])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert strategy.explain(model) == "The model has run no step on several replicas."
    model.fit(_X, _X[:, :3], batch_size=_BATCH, verbose=0)
    told = strategy.explain(model)
    assert "1 gradient of 72 bytes" in told, told  # Of 6 x 3 numbers.
    assert "1 gather of 12 bytes a row" in told, told
    assert "for want of a rule: ReverseV2 (" in told, told
    assert Path(__file__).name in told


_POSITIVE, _FEATURES = np.abs(_X[:, :2]), np.eye(2)[(_X[:, 0] > 0).astype(int)]
_IN_ONE_ROUND: dict[str, tuple[Any, str | None]] = {
    **dict.fromkeys(("mse", "mae", "huber", "log_cosh", "mape", "cosine_similarity"), (_Y, None)),
    **dict.fromkeys(("msle", "poisson"), (_POSITIVE, "softplus")),
    **dict.fromkeys(("binary_crossentropy", "binary_focal_crossentropy"), (_FEATURES, "sigmoid")),
    **dict.fromkeys(("categorical_crossentropy", "categorical_focal_crossentropy", "kl_divergence"), (_FEATURES, "softmax")),
    "sparse_categorical_crossentropy": (_FEATURES[:, 0], "softmax"),
}


def test_losses_and_metrics_travel_with_the_gradients() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    for loss, (targets, activation) in _IN_ONE_ROUND.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(2, activation)])
            model.compile("sgd", loss, metrics=["accuracy", "auc"] if targets is _FEATURES else ["accuracy"])
        model.fit(_X, targets, batch_size=_BATCH, sample_weight=np.abs(_X[:, 0]), verbose=0)
        told = strategy.explain(model)
        assert "Round 1: " in told, (loss, told)
        assert "Round 2: " not in told, (loss, told)


_SENTENCES = [[1, 2, 3], [4, 5], [2], [6, 1, 1, 3]], [[4, 5, 6, 7, 8], [1, 1, 2], [3, 3], [9]]


def _of_sentences() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Embedding(10, 4, mask_zero=True), layers.LSTM(3), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def _of_own_sentences(strategy: Any) -> list[Any]:
    """Each rank has sentences of other lengths. A masked model does not see how far they are padded."""
    own = tf.ragged.constant(_SENTENCES[strategy.rank], dtype=tf.int64)
    data = tf.data.Dataset.from_tensor_slices(own).map(lambda x: (x, tf.cast(x[:1], tf.float32))).padded_batch(4)
    strategy.rank_data = "own"
    try:
        with strategy.scope():
            model = _of_sentences()
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()
    finally:
        strategy.rank_data = "same"


def test_sentences_of_other_lengths_on_each_rank(worker_pool: Any) -> None:
    alone = _of_sentences()
    for _ in range(2):
        for half in (slice(0, 2), slice(2, 4)):  # A batch of a rank is cut for two replicas.
            rows = tf.ragged.constant([row for own in _SENTENCES for row in own[half]], dtype=tf.int64).to_tensor().numpy()
            alone.train_on_batch(rows, rows[:, :1].astype("float32"))
    for weights in worker_pool("tf", 2).run(_of_own_sentences):
        for found, wanted in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
