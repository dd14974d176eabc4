"""A model that trains outside the scope, although a strategy with several replicas exists: refused on ranks, else told once."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scenarios import dense, regression

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.keras_integration import refusals

X, Y = regression()
OUTSIDE = " got a model made outside the strategy's scope, so "


def compiled() -> keras.Model:
    model = dense()
    model.compile("sgd", "mse")
    return model


def fitted(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history["loss"]


def applied(trace: Callable[..., Any]) -> None:
    """Trains in a loop of its own, without a strategy."""
    model, optimizer = dense(), keras.optimizers.SGD(0.1)

    @trace
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X) - Y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step()


class Probes(keras.callbacks.Callback):
    """Fits a plain model beside the one of the strategy."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        fitted(compiled())


def of_layers_in(strategy: Any) -> keras.Model:
    """A model that is made outside, of layers that were made inside."""
    with strategy.scope():
        inside = dense()
    outer = keras.Model(inside.inputs, inside.outputs)
    outer.compile("sgd", "mse")
    return outer


def in_thread(strategy: Any) -> None:
    """A thread is not in the scope that is open where it starts."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            fitted(compiled())
        except BaseException as error:
            errors.append(error)

    with strategy.scope():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    raise errors[0]


def loaded(folder: str) -> keras.Model:
    path = Path(folder, f"{threading.get_native_id()}.keras")
    compiled().save(path)
    return keras.models.load_model(path)


def on_ranks(strategy: Any, folder: str) -> dict[str, Any]:
    refusals.note(strategy)  # The pool of processes has it look for nothing.
    with strategy.scope():
        inside = compiled()
    early = compiled()
    attempts = {
        "fit": lambda: fitted(early),
        "train_on_batch": lambda: early.train_on_batch(X, Y),
        "loaded": lambda: fitted(loaded(folder)),
        "layers": lambda: fitted(of_layers_in(strategy)),
        "thread": lambda: in_thread(strategy),
        "callback": lambda: inside.fit(X, Y, verbose=0, callbacks=[Probes()]),
        "eager": lambda: applied(lambda step: step),
        "traced": lambda: applied(tf.function),
    }
    refused = {}
    for name, attempt in attempts.items():
        with pytest.raises(ConfigurationError) as error:
            attempt()
        refused[name] = str(error.value)
    weights = early.get_weights()
    extractor = of_layers_in(strategy)
    free = {
        "untouched": all(np.array_equal(a, b) for a, b in zip(weights, dense().get_weights(), strict=True)),
        "evaluate": [early.evaluate(X, Y, batch_size=16, verbose=0), float(early.test_on_batch(X, Y))],
        "predict": [float(early.predict(X, verbose=0).sum()), float(early.predict_on_batch(X).sum())],
        "extracted": extractor.predict(X, verbose=0).shape,
    }
    strategy.rank_data = "own"
    try:
        for name, evaluate in (("evaluate", early.evaluate), ("test_on_batch", early.test_on_batch)):
            with pytest.raises(ConfigurationError) as error:
                evaluate(X, Y)
            refused[f"{name} of own data"] = str(error.value)
    finally:
        strategy.rank_data = "same"
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        placed = compiled()
    free["elsewhere"] = fitted(placed)
    strategy.allow_plain_models = True
    try:
        applied(tf.function)
        free["allowed"] = fitted(compiled())
    finally:
        strategy.allow_plain_models = False
    return {"refused": refused, "free": free}


def test_ranks_do_not_train_apart(worker_pool: Any, tmp_path: Path) -> None:
    first, second = worker_pool("tf", 2).run(on_ranks, str(tmp_path))
    for name, text in first["refused"].items():
        assert "so each rank would work alone. Received: " in text, name
        assert "Hint: make " in text, name
        assert "allow_plain_models=True" in text, name
    assert first["refused"]["fit"].startswith("`fit`" + OUTSIDE)
    assert first["refused"]["train_on_batch"].startswith("`train_on_batch`" + OUTSIDE)
    assert "An optimizer is applied outside the strategy's scope, so " in first["refused"]["traced"]
    assert first["refused"].keys() == second["refused"].keys()
    assert first["free"] == second["free"]
    assert first["free"]["untouched"]
    model = compiled()
    assert first["free"]["evaluate"] == [pytest.approx(model.evaluate(X, Y, batch_size=16, verbose=0), rel=1e-5)] * 2
    losses = fitted(model)
    assert first["free"]["elsewhere"] == first["free"]["allowed"] == pytest.approx(losses, rel=1e-5)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    # NumPy tells of TensorFlow 2.19 that its tensors know no `copy`.
    texts += [str(each.message) for each in caught if not issubclass(each.category, DeprecationWarning)]


@pytest.mark.lane("quick")
def test_devices_of_one_process_say_it_once() -> None:
    plain = fitted(compiled())
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    model = compiled()
    with said() as texts:
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
    assert texts == []
    with said() as texts:
        assert fitted(model) == plain
        model.train_on_batch(X, Y)
        applied(tf.function)
        fitted(compiled())
    assert len(texts) == 1
    assert texts[0].startswith("`fit`" + OUTSIDE + "only one device works. Received: model='")
    with strategy.scope():
        inside = compiled()
    with said() as texts:
        assert fitted(inside) == pytest.approx(plain, rel=1e-5)
    assert texts == []


def _allowed() -> Any:
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"], allow_plain_models=True)


def _one_replica() -> Any:
    return tfrep.MirroredStrategy(["CPU:1"]), tfrep.MultiWorkerStrategy()


def _freed() -> None:
    tfrep.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.lane("quick")
@pytest.mark.parametrize("make", [_allowed, _one_replica, _freed])
def test_nothing_is_forgotten(make: Callable[[], Any]) -> None:
    kept = make()
    gc.collect()
    with said() as texts:
        fitted(compiled())
        applied(lambda step: step)
    assert texts == []
    del kept


@pytest.mark.lane("quick")
def test_it_is_looked_for_once_in_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _allowed()
    looked, forgotten = [], refusals._forgotten
    monkeypatch.setattr(refusals, "_forgotten", lambda owner: looked.append(owner) or forgotten(owner))
    model = compiled()
    for steps in (2, 30):
        looked.clear()
        data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(4)
        model.fit(data, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0)
        assert len(looked) <= 2, "the fit, and the trace of its step"
    del kept
