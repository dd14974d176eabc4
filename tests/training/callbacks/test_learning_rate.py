"""Scaled learning rates and their warm-up, compared with the formulas; resumed runs, compared with whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.lane("quick")

_BATCH, _STEPS = 8, 5
_X = np.random.RandomState(0).rand(_BATCH * _STEPS, 3).astype("float32")
_Y = (_X @ np.array([[1.0], [-2.0], [3.0]], "float32")).astype("float32")


def _model(optimizer: Any = None, **compile_options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer or keras.optimizers.SGD(0.4, momentum=0.9), "mse", **compile_options)
    return model


class _Noting(keras.callbacks.Callback):
    """Notes the learning rate of each step, and fails at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.rates: list[float] = []
        self._fails_at = fails_at

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))
        if len(self.rates) == self._fails_at:
            raise InterruptedError


def _fit(model: Any, *callbacks: Any, epochs: int = 4, **options: Any) -> Any:
    return model.fit(_X, _Y, batch_size=_BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def _warmup(**settings: Any) -> Any:
    return tfrep.callbacks.LearningRateWarmup(0.4, **{"epochs": 2, "replicas": 4} | settings)


def _expected_rates(epochs: int = 4, warm: float = 2, target: float = 0.4, replicas: int = 4) -> list[float]:
    """The learning rates as Horovod's callback sets them, for each step."""
    done = np.minimum(np.arange(1, epochs * _STEPS + 1) / _STEPS, warm)
    return list(target / replicas * (done * (replicas - 1) / warm + 1))


def _expected_weights(rates: list[float], momentum: float = 0.9) -> np.ndarray:
    """Momentum with the correction of Goyal et al., eq. 10, step by step."""
    weights, velocity, before = np.zeros([3, 1]), np.zeros([3, 1]), rates[0]
    for step, rate in enumerate(rates):
        rows = slice(step % _STEPS * _BATCH, (step % _STEPS + 1) * _BATCH)
        gradient = 2 * _X[rows].T @ (_X[rows] @ weights - _Y[rows]) / _BATCH
        velocity = momentum * rate / before * velocity - rate * gradient
        weights, before = weights + velocity, rate
    return weights


def test_rules() -> None:
    assert tfrep.callbacks.scale_learning_rate(0.1, 8) == pytest.approx(0.8)
    assert tfrep.callbacks.scale_learning_rate(1, 2, rule="sqrt") == pytest.approx(2**0.5)


def test_rates_and_weights_of_each_step() -> None:
    model, noting = _model(), _Noting()
    history = _fit(model, _warmup(), noting)
    np.testing.assert_allclose(noting.rates, _expected_rates(), rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], [0.25, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], _expected_weights(_expected_rates()), rtol=1e-4)


def test_without_correction_velocity_stays() -> None:
    model, corrected = _model(), _model()
    _fit(model, _warmup(momentum_correction=False))
    _fit(corrected, _warmup())
    assert np.abs(model.get_weights()[0] - corrected.get_weights()[0]).max() > 1e-3


def test_several_steps_in_a_call_share_a_rate() -> None:
    noting = _Noting()
    _fit(_model(steps_per_execution=2), _warmup(), noting)
    per_step = _expected_rates()
    last_of_call = [1, 3, 4, 6, 8, 9]
    np.testing.assert_allclose(noting.rates[:6], [per_step[i] for i in last_of_call], rtol=1e-6)
    assert noting.rates[6:] == [pytest.approx(0.4)] * 6


@pytest.mark.parametrize("optimizer", ["rmsprop", "scaled", "adam"])
def test_other_optimizers(optimizer: str) -> None:
    made = {
        "rmsprop": lambda: keras.optimizers.RMSprop(0.4, momentum=0.9),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.4, momentum=0.9), initial_scale=1.0),
        "adam": lambda: keras.optimizers.Adam(0.4),
    }[optimizer]
    model, noting = _model(made()), _Noting()
    _fit(model, _warmup(), noting, epochs=3)
    np.testing.assert_allclose(noting.rates, _expected_rates(3), rtol=1e-6)
    if optimizer == "scaled":
        np.testing.assert_allclose(model.get_weights()[0], _expected_weights(_expected_rates(3)), rtol=1e-4)


@pytest.mark.parametrize("fails_at", [4, 8, 13])
def test_a_resumed_run_goes_on(fails_at: int, tmp_path: Path) -> None:
    noting = _Noting(fails_at)
    with pytest.raises(InterruptedError):
        _fit(_model(), keras.callbacks.BackupAndRestore(tmp_path), _warmup(), noting)
    resumed, model = _Noting(), _model()
    _fit(model, keras.callbacks.BackupAndRestore(tmp_path), _warmup(), resumed)
    whole = _expected_rates()
    np.testing.assert_allclose(resumed.rates, whole[(fails_at - 1) // _STEPS * _STEPS :], rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], _expected_weights(whole), rtol=1e-4)


def test_a_later_epoch_begins_there() -> None:
    noting, after = _Noting(), _Noting()
    _fit(_model(), _warmup(), noting, initial_epoch=1)
    np.testing.assert_allclose(noting.rates, _expected_rates()[_STEPS:], rtol=1e-6)
    # What has lowered the rate since the warm-up is left alone.
    _fit(_model(keras.optimizers.SGD(0.01)), _warmup(), after, initial_epoch=2)
    np.testing.assert_allclose(after.rates, [0.01] * 2 * _STEPS, rtol=1e-6)


def _train(strategy: Any) -> tuple[list[float], np.ndarray]:
    with strategy.scope():
        model = _model()
    noting = _Noting()
    _fit(model, tfrep.callbacks.LearningRateWarmup(0.4, epochs=2), noting)
    return noting.rates, model.get_weights()[0]


def _check(rates: list[float], weights: np.ndarray) -> None:
    expected = _expected_rates(replicas=2)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    np.testing.assert_allclose(weights, _expected_weights(expected), rtol=1e-4)


def test_mirrored_replicas() -> None:
    _check(*_train(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])))


@pytest.mark.lane("callbacks")
@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_processes(communicator: str, worker_pool: Any) -> None:
    for rates, weights in worker_pool(communicator, 2).run(_train):
        _check(rates, weights)


def _only_on_rank_0(strategy: Any) -> str:
    with strategy.scope():
        model = _model()
    try:
        _fit(model, *([_warmup()] if strategy.rank == 0 else []))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.lane("callbacks")
def test_it_has_to_be_on_all_ranks(worker_pool: Any) -> None:
    for said in worker_pool("tf", 2).run(_only_on_rank_0):
        assert "Only some ranks were given a LearningRateWarmup" in said


_SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, 10)


@pytest.mark.parametrize(
    "settings", [{"epochs": 0}, {"epochs": True}, {"replicas": 0}, {"steps_per_epoch": 0.5}, {"learning_rate": -1.0}]
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with refuses(**settings):
        tfrep.callbacks.LearningRateWarmup(**{"learning_rate": 0.1} | settings)


@pytest.mark.parametrize("arguments", [(0.1, 0), (0.1, 2.0), (-0.1, 2), ("0.1", 2), (0.1, 2, "cubic"), (float("nan"), 2)])
def test_bad_scales(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="Received"):
        tfrep.callbacks.scale_learning_rate(*arguments)


def test_schedules_are_refused() -> None:
    with refuses(hint="warmup_target", learning_rate=_SCHEDULE):
        tfrep.callbacks.scale_learning_rate(_SCHEDULE, 2)  # type: ignore[arg-type]
    with refuses(hint="give the optimizer a number", learning_rate=...):
        _fit(_model(keras.optimizers.SGD(_SCHEDULE)), _warmup())


def test_an_epoch_of_unknown_length() -> None:
    def batches() -> Any:
        while True:
            yield _X[:_BATCH], _Y[:_BATCH]

    with refuses(steps_per_epoch=None):
        _model().fit((batch for batch in [(_X, _Y)]), epochs=2, verbose=0, callbacks=[_warmup()])
    noting = _Noting()
    _model().fit(batches(), steps_per_epoch=_STEPS, epochs=2, verbose=0, callbacks=[_warmup(), noting])
    np.testing.assert_allclose(noting.rates, _expected_rates(2), rtol=1e-6)
