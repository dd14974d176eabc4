"""A `fit` that is asked to end, and is called again by the same program, ends as one that nobody disturbed."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import others_in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous import run_backups

ROWS, BATCH, EPOCHS = 40, 8, 4
_rng = np.random.RandomState(0)
X = _rng.randn(ROWS, 4).astype("float32")
Y = X.sum(1, keepdims=True)


class Asks(keras.callbacks.Callback):
    """Asks this process to end in a batch of an epoch, counted over all `fit`s."""

    def __init__(self, place: tuple[int, int] | None) -> None:
        super().__init__()
        self._place, self._epochs = place, itertools.count()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = next(self._epochs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._place:
            signal.raise_signal(signal.SIGTERM)


class Stops(keras.callbacks.Callback):
    """Ends the second epoch early."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = (self._epoch, batch) == (1, 1)


def model(kind: type[keras.Model] = keras.Sequential) -> keras.Model:
    made = kind([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return made


def results(fitted: keras.Model, *histories: Any) -> list[Any]:
    return [*(values for history in histories for values in history.history.values()), *fitted.get_weights()]


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in itertools.cycle(range(0, ROWS - 5, 5)):
        yield X[start : start + 5], Y[start : start + 5]


class Two(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = model(), model()
        self.optimizers = {"one": keras.optimizers.Adam(0.05), "other": keras.optimizers.SGD(0.05, momentum=0.9)}
        self.build((None, 4))

    def call(self, x: Any) -> Any:
        return self.one(x) + self.other(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for name in ("one", "other"):
            net = getattr(self, name)
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(x) - y))
            self.optimizers[name].apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return {"loss": loss}


class OwnStep(keras.Sequential):
    """A step of keras.io's guides, which makes its metrics when it is traced."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


class Rows(keras.utils.PyDataset):
    """Batches that are shuffled after each epoch, with noise of NumPy's."""

    def __init__(self, noise: float = 0.0, own: np.random.Generator | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._noise, self._own, self._order = noise, own, np.arange(ROWS)

    def __len__(self) -> int:
        return 60 if self._noise else ROWS // BATCH  # More than is read ahead.

    def __getitem__(self, index: int) -> Any:
        start = index * BATCH % ROWS
        rows = self._order[start : start + BATCH]
        if not self._noise:
            return X[rows], Y[rows]
        noise = np.random.randn(BATCH, 4) if self._own is None else self._own.normal(size=(BATCH, 4))
        return X[rows] + self._noise * noise.astype("float32"), Y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self._order)


class UnseededNoise(keras.layers.Layer):
    """Draws from the generator of Keras that all code without a seed shares."""

    def call(self, x: Any) -> Any:
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))


class ResetsStates(keras.callbacks.Callback):
    """What Keras's guides do with stateful layers."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if hasattr(layer, "reset_states"):
                layer.reset_states()


def several_optimizers(asks: Asks) -> list[Any]:
    both = Two()
    both.compile()
    history = both.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[asks])
    slots = [variable.numpy() for optimizer in both.optimizers.values() for variable in optimizer.variables]
    return [*slots, *results(both, history)]


def metrics_of_a_step_of_ones_own(asks: Asks) -> list[Any]:
    own = model(OwnStep)
    return results(own, own.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[asks]))


def validation_that_is_shuffled(asks: Asks) -> list[Any]:
    fitted, validation = model(), tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH).take(2)
    given = {"validation_data": validation, "validation_freq": 2}
    history = fitted.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[asks], **given)
    return [*results(fitted, history), fitted.evaluate(validation, verbose=0)]


def validation_by_a_generator(asks: Asks) -> list[Any]:
    fitted, validation = model(), batches()
    given = {"steps_per_epoch": 4, "validation_data": validation, "validation_steps": 3}
    history = fitted.fit(batches(), epochs=EPOCHS, verbose=0, callbacks=[asks], **given)
    return [*results(fitted, history), fitted.evaluate(validation, steps=2, verbose=0)]


def a_random_layer_in_a_map(asks: Asks) -> list[Any]:
    fitted, noise = model(), keras.layers.GaussianNoise(0.5, seed=7)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).map(lambda x, y: (noise(x, training=True), y))
    return results(fitted, fitted.fit(data, epochs=EPOCHS, verbose=0, callbacks=[asks]))


def a_cache_of_shuffled_rows(asks: Asks) -> list[Any]:
    fitted = model()
    rows = tf.data.Dataset.from_tensor_slices((np.tile(X, [20, 1]), np.tile(Y, [20, 1])))
    return results(fitted, fitted.fit(rows.shuffle(50).cache().batch(160), epochs=EPOCHS, verbose=0, callbacks=[asks]))


def a_fit_after_one_that_was_stopped(asks: Asks) -> list[Any]:
    fitted, data = model(), tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH)
    histories = [
        fitted.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
        for epochs, callbacks in ((EPOCHS, [Stops(), asks]), (2, [asks]))
    ]
    return results(fitted, *histories)


def _recurrent(*callbacks: Any) -> list[Any]:
    made = keras.Sequential([keras.Input((2, 2), batch_size=BATCH)])
    made.add(keras.layers.Bidirectional(keras.layers.LSTM(3, stateful=True, return_sequences=True)))
    made.add(keras.layers.GRU(2, stateful=True))
    made.add(keras.layers.Dense(1))
    made.compile(keras.optimizers.Adam(0.05), "mse")
    data = X.reshape(ROWS, 2, 2)
    history = made.fit(data, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks))
    return [*results(made, history), made.predict(data, batch_size=BATCH, verbose=0)]


def stateful_layers(asks: Asks) -> list[Any]:
    return _recurrent(asks)


def stateful_layers_that_are_reset(asks: Asks) -> list[Any]:
    return _recurrent(ResetsStates(), asks)


def unseeded_noise(asks: Asks) -> list[Any]:
    noisy = keras.Sequential([keras.Input((4,)), UnseededNoise(), keras.layers.Dense(1)])
    noisy.compile(keras.optimizers.Adam(0.05), "mse")
    return results(noisy, noisy.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[asks]))


def shuffled_validation_of_a_finished_fit(asks: Asks) -> list[Any]:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH).take(2)
    return _validated_twice(asks, validation_data=data)


def generated_validation_of_a_finished_fit(asks: Asks) -> list[Any]:
    return _validated_twice(asks, validation_data=batches(), validation_steps=2, validation_freq=[1])


def _validated_twice(asks: Asks, **given: Any) -> list[Any]:
    fitted = model()
    histories = [fitted.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[asks], **given) for _ in range(2)]
    return results(fitted, *histories)


def a_sequence(asks: Asks) -> list[Any]:
    fitted = model()
    histories = [fitted.fit(Rows(), epochs=EPOCHS, verbose=0, callbacks=[asks]) for _ in range(2)]
    return results(fitted, *histories)


def a_sequence_with_workers(asks: Asks) -> list[Any]:
    fitted = model()
    return results(fitted, fitted.fit(Rows(workers=2, max_queue_size=3), epochs=EPOCHS, verbose=0, callbacks=[asks]))


def a_sequence_with_noise(asks: Asks) -> list[Any]:
    fitted = model()
    return results(fitted, fitted.fit(Rows(0.1), epochs=EPOCHS, verbose=0, callbacks=[asks]), _after(fitted))


def a_sequence_with_noise_of_its_own(asks: Asks) -> list[Any]:
    fitted, data = model(), Rows(0.1, np.random.default_rng(1))
    return results(fitted, fitted.fit(data, epochs=EPOCHS, verbose=0, callbacks=[asks]))


def noise_in_a_map(asks: Asks) -> list[Any]:
    def noisy(x: np.ndarray) -> np.ndarray:
        return x + 0.1 * np.random.randn(*x.shape).astype("float32")

    fitted, data = model(), tf.data.Dataset.from_tensor_slices((X, Y)).repeat(12).batch(BATCH)
    data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(noisy, [x], tf.float32), [None, 4]), y))
    return results(fitted, fitted.fit(data, epochs=EPOCHS, verbose=0, callbacks=[asks]), _after(fitted))


def _after(fitted: keras.Model) -> Any:
    """Trains on rows that NumPy picks after another `fit`."""
    rows = np.random.permutation(ROWS)[:BATCH]
    return fitted.fit(X[rows], Y[rows], verbose=0)


PROGRAMS: dict[Callable[[Asks], list[Any]], tuple[int, int]] = {
    several_optimizers: (1, 2),
    metrics_of_a_step_of_ones_own: (1, 2),
    validation_that_is_shuffled: (2, 2),
    validation_by_a_generator: (2, 2),
    a_random_layer_in_a_map: (2, 2),
    a_cache_of_shuffled_rows: (2, 2),
    a_fit_after_one_that_was_stopped: (3, 2),
    stateful_layers: (2, 2),
    stateful_layers_that_are_reset: (2, 2),
    unseeded_noise: (2, 2),
    shuffled_validation_of_a_finished_fit: (2, 2),
    generated_validation_of_a_finished_fit: (2, 2),
    a_sequence: (5, 2),
    a_sequence_with_workers: (2, 2),
    a_sequence_with_noise: (2, 2),
    a_sequence_with_noise_of_its_own: (2, 2),
    noise_in_a_map: (2, 2),
}
"""Programs, and the epoch and the batch, counted over all `fit`s, in which each is asked to end."""

BEGIN_WITH_A_FINISHED_FIT = (
    a_fit_after_one_that_was_stopped,
    shuffled_validation_of_a_finished_fit,
    generated_validation_of_a_finished_fit,
    a_sequence,
)


@pytest.mark.parametrize("program", others_in_lane("resumed", PROGRAMS, several_optimizers))
def test_a_resumed_fit(
    program: Callable[[Asks], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")

    def run(place: tuple[int, int] | None) -> list[Any]:
        monkeypatch.setattr(run_backups, "_fits", itertools.count())
        monkeypatch.setattr(run_backups, "_places_taken", set())
        keras.utils.set_random_seed(1)
        with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            return program(Asks(place))

    undisturbed = run(None)
    monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path))
    with pytest.raises(SystemExit):
        run(PROGRAMS[program])
    capfd.readouterr()
    resumed = run(None)
    told = capfd.readouterr().err
    assert told.count("fit resumes from its backup") == 1, told
    assert f", batch {PROGRAMS[program][1] + 1}." in told
    assert told.count("It is not repeated.") == (program in BEGIN_WITH_A_FINISHED_FIT), told
    for found, expected in zip(resumed, undisturbed, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
