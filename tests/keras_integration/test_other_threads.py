"""Threads of a script's own beside the one that trains, in processes: each rank answers alone, and training does not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

_X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
_Y = _X.sum(1, keepdims=True)
_LIMIT = 60.0


def _model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


class _Meanwhile(keras.callbacks.Callback):
    """Has another thread do something in the middle of an epoch, and waits for it: its moments are the same in each run."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work, self.results, self.errors = work, list[Any](), list[Exception]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            other = threading.Thread(target=self._run, daemon=True)
            other.start()
            other.join(_LIMIT)
            assert not other.is_alive()

    def _run(self) -> None:
        try:
            self.results.append(self.work())
        except Exception as error:
            self.errors.append(error)


def _trained(work: Callable[[Any], Any], epochs: int = 2, **options: Any) -> tuple[list[float], list[np.ndarray], _Meanwhile]:
    model = _model()
    meanwhile = _Meanwhile(lambda: work(model))
    losses = model.fit(_X, _Y, epochs=epochs, batch_size=8, shuffle=False, verbose=0, callbacks=[meanwhile], **options)
    return losses.history["loss"], model.get_weights(), meanwhile


def _answers(model: Any) -> list[Any]:
    data = _X[:7]
    return [model.predict(data, batch_size=3, verbose=0), model.predict_on_batch(data), np.asarray(model(data))]


def _evaluated(model: Any) -> list[Any]:
    return [model.evaluate(_X[:7], _Y[:7], verbose=0), model.test_on_batch(_X[:7], _Y[:7])]


def _saved(folder: str) -> Callable[[Any], None]:
    def save(model: Any) -> None:
        for name in ("now.weights.h5", "now.keras"):
            (model.save_weights if "weights" in name else model.save)(f"{folder}/{name}")
        model.export(f"{folder}/exported", verbose=False)

    return save


def _numbers(meanwhile: _Meanwhile) -> list[np.ndarray]:
    assert not meanwhile.errors
    return [np.asarray(each) for result in meanwhile.results for each in result or ()]


def _in_process(strategy: Any, folder: str) -> tuple[list[Any], list[str]]:
    with strategy.scope():
        predicted = _trained(_answers)
        saved = _trained(_saved(folder))
        assert not saved[2].errors
        alone = _trained(_evaluated, epochs=1)
        nothing = _trained(lambda model: None)
        return [predicted[0], _numbers(predicted[2]), saved[0], nothing[0], _numbers(alone[2])], [
            each.name for each in Path(folder).iterdir()
        ]


@pytest.mark.parametrize("communicator", ["tf", *in_lane("callbacks", "horovod", "shared_memory")])
def test_other_threads_predict_evaluate_and_save(communicator: str, worker_pool: Any, tmp_path: Path) -> None:
    predicted, alone = _trained(_answers), _trained(_evaluated, epochs=1)
    for own, files in worker_pool(communicator, 2).run(_in_process, str(tmp_path), limit=200.0):
        losses, answers, *others, evaluated = own
        np.testing.assert_allclose([losses, *others], [predicted[0]] * 3, rtol=1e-5)
        for got, right in zip(answers, _numbers(predicted[2]), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
        for got, right in zip(evaluated, _numbers(alone[2]), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4)
        assert {"now.weights.h5", "now.keras", "exported"} <= set(files)
    restored = keras.models.load_model(tmp_path / "now.keras")
    np.testing.assert_allclose(restored.predict(_X, verbose=0).shape, (24, 1))


def _trains_in_two_threads(strategy: Any) -> tuple[list[float], str, list[float]]:
    with strategy.scope():
        losses, _, meanwhile = _trained(lambda model: model.fit(_X, _Y, verbose=0), epochs=1)
        (error,) = meanwhile.errors
        assert isinstance(error, ConfigurationError)
        later: list[Any] = []

        def train() -> None:  # Nothing trains now, so that this thread may.
            with strategy.scope():
                later.append(_trained(lambda model: None)[0])

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(_LIMIT)
        assert not strategy.extended.keras_driver.is_other_thread, "that thread has ended, so that the main one leads again"
        return losses, str(error), later[0]


def test_two_threads_do_not_train_at_once(worker_pool: Any) -> None:
    wanted = _trained(lambda model: None)[0]
    for losses, error, later in worker_pool("tf", 2).run(_trains_in_two_threads):
        np.testing.assert_allclose(losses, wanted[:1], rtol=1e-5)
        np.testing.assert_allclose(later, wanted, rtol=1e-5)
        assert "Another thread trains" in error
        assert "Hint: " in error


def _dies(model: Any) -> None:
    def batches() -> Iterator[np.ndarray]:
        yield _X[:3]
        raise OSError("the camera is gone")

    if not tfrep.is_chief():
        model.predict(batches(), verbose=0)


def _predicts_in_a_thread_that_dies(strategy: Any) -> tuple[list[float], list[str], np.ndarray]:
    with strategy.scope():
        losses, weights, meanwhile = _trained(_dies)
        model = _model()
        model.set_weights(weights)
        return losses, [str(each) for each in meanwhile.errors], model.predict(_X, verbose=0)


@pytest.mark.parametrize("communicator", ["tf", *in_lane("callbacks", "horovod", "shared_memory")])
def test_a_thread_that_dies_while_it_predicts_ends_nothing_else(communicator: str, worker_pool: Any) -> None:
    wanted, weights, _ = _trained(lambda model: None)
    alone = _model()
    alone.set_weights(weights)
    ranks = worker_pool(communicator, 2).run(_predicts_in_a_thread_that_dies)
    for losses, _, predicted in ranks:
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        np.testing.assert_allclose(predicted, alone.predict(_X, verbose=0), rtol=1e-4, atol=1e-5)
    (_, errors, _), (_, of_other, _) = ranks
    assert not errors
    assert len(of_other) == 2, of_other  # In each epoch.
    assert all("the camera is gone" in each for each in of_other)


def _sharded(strategy: Any, folder: str) -> tuple[list[float], list[str]]:
    with tfrep.MultiWorkerStrategy(strategy.communicator.name, shard_optimizer_state=True).scope():
        model = _model()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        meanwhile = _Meanwhile(lambda: model.save(f"{folder}/sharded.keras"))
        history = model.fit(_X, _Y, epochs=2, batch_size=8, shuffle=False, verbose=0, callbacks=[meanwhile])
        return history.history["loss"], [str(each) for each in meanwhile.errors]


@pytest.mark.lane("callbacks")
def test_sharded_state_is_not_saved_by_another_thread(worker_pool: Any, tmp_path: Path) -> None:
    (losses, errors), (others, _) = worker_pool("tf", 2).run(_sharded, str(tmp_path))
    np.testing.assert_allclose(losses, others, rtol=1e-6)
    assert len(errors) == 2, errors  # In each epoch, on the rank that would write.
    assert all("sharded" in each for each in errors)
    assert not (tmp_path / "sharded.keras").exists()
