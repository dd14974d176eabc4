"""What processes do that a script forks, and the script."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np

from tfrep_strategy.errors import ConfigurationError

_X = np.ones([8, 3], "float32")
AT_ONCE = 15.0
"""Seconds; a fork that waits does so for ever."""


def _model() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    return model


def adds(number: int) -> float:
    return float(np.arange(number).sum())


def _makes(_: int) -> Any:
    return _model()


_made: list[Any] = []


def _predicts(_: int) -> Any:
    return _made[0].predict(_X, verbose=0)


def _fits(_: int) -> Any:
    return _made[0].fit(_X, _X[:, :1], verbose=0)


def forks(strategy: Any) -> tuple[list[float], list[str], float, float]:
    """Returns what children have added, what they were told, how long that took, and how a training goes on."""
    with strategy.scope():
        model = _model()
        _made[:] = [model]
        model.fit(_X, _X[:, :1], verbose=0)
        began, told = time.monotonic(), []
        for work in (_makes, _predicts, _fits):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
                try:
                    pool.submit(work, 1).result(timeout=AT_ONCE)
                except ConfigurationError as error:
                    told.append(str(error))
        took = time.monotonic() - began
        with multiprocessing.get_context("fork").Pool(2) as pool:
            added = pool.map(adds, [3, 4])
        return added, told, took, model.fit(_X, _X[:, :1], verbose=0).history["loss"][0]


class _Kills(keras.callbacks.Callback):
    """Kills the process of a pool in the middle of an epoch, and asks the pool what has become of its work."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        super().__init__()
        self.pool, self.told = pool, ""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            pid = self.pool.submit(os.getpid).result(AT_ONCE)
            work = self.pool.submit(time.sleep, 10 * AT_ONCE)
            os.kill(pid, signal.SIGKILL)
            self.told = type(work.exception(AT_ONCE)).__name__


def loses_a_child(strategy: Any) -> tuple[str, list[float], list[float]]:
    """Returns what is told of a child that was killed, the losses of that training, and those without."""
    with strategy.scope(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        callback, losses = _Kills(pool), []
        for callbacks in ([callback], []):
            model = _model()
            losses.append(model.fit(_X, _X[:, :1], batch_size=2, verbose=0, callbacks=callbacks).history["loss"])
        return callback.told, *losses
