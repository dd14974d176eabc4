"""What processes do that a script forks, and the script."""

from __future__ import annotations

import multiprocessing
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
