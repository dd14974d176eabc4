"""Every optimizer that Keras exports, by itself, wrapped, and several in one: the answer of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from sharded_training import fit, made, same, state

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("optimizers")

_O = keras.optimizers
_NAMES = [
    name
    for name, found in vars(_O).items()
    if isinstance(found, type) and issubclass(found, _O.Optimizer) and found.update_step is not _O.Optimizer.update_step
]


def _several(**options: Any) -> Any:
    """Makes a MultiOptimizer."""
    optimizers = _O.OptimizerMap(_O.Adam(0.01, **options), {".*kernel": _O.SGD(0.1, **options)})
    return _O.MultiOptimizer(optimizers)


def _chosen_by_a_function() -> Any:
    """Makes a MultiOptimizer that knows its optimizers when it is built."""
    adam, sgd = _O.Adam(0.01), _O.SGD(0.1)
    return _O.MultiOptimizer(lambda variable: sgd if variable.path.endswith("kernel") else adam)


_SEVERAL: dict[str, Callable[[], Any]] = {
    "several": _several,
    "several_by_a_function": _chosen_by_a_function,
    "several_that_accumulate": lambda: _several(gradient_accumulation_steps=2),
    "several_that_clip": lambda: _several(global_clipnorm=0.1, weight_decay=0.1),
    "several_with_averages": lambda: _several(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "several_in_a_loss_scale": lambda: _O.LossScaleOptimizer(_several(), dynamic_growth_steps=2),
    "several_that_accumulate_in_a_loss_scale": lambda: _O.LossScaleOptimizer(_several(gradient_accumulation_steps=2)),
}
_OPTIONS: dict[str, Callable[[type], Any]] = {
    "accumulation": lambda kind: kind(0.01, gradient_accumulation_steps=2),
    "averages": lambda kind: kind(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "loss_scale": lambda kind: _O.LossScaleOptimizer(kind(0.01), dynamic_growth_steps=2),
    "schedule_and_decay": lambda kind: kind(_O.schedules.CosineDecay(0.05, 8), weight_decay=0.1),
}
_PLAIN: dict[str, Callable[[], Any]] = {name: functools.partial(getattr(_O, name), 0.01) for name in _NAMES}
_WITH_OPTIONS: dict[str, Callable[[], Any]] = {
    f"{name}-{option}": functools.partial(make, getattr(_O, name)) for name in _NAMES for option, make in _OPTIONS.items()
}
OPTIMIZERS = _PLAIN | _WITH_OPTIONS | (_SEVERAL if hasattr(_O, "MultiOptimizer") else {})


def trained(name: str, builds: bool = False) -> list[np.ndarray]:
    model = made(OPTIMIZERS[name]())
    if builds:
        model.optimizer.build(model.trainable_variables)
    fit(model)
    return state(model)


@functools.cache
def on_one_device(name: str) -> list[np.ndarray]:
    """Trains with plain Keras.

    Keras's ScheduleFreeAdamW assigns to its slots when it is built. Without a strategy `fit` builds it in a graph that never
    runs, so the assignment is lost, which it is not in an eager step. So it is built first.
    """
    return trained(name, builds=name.startswith("ScheduleFreeAdamW"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas(name: str) -> None:
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        found = trained(name)
    same(found, on_one_device(name))


@pytest.mark.lane("short")
@pytest.mark.skipif("several" not in OPTIMIZERS, reason="this Keras has no MultiOptimizer")
def test_several_in_one() -> None:
    test_two_replicas("several")


def in_scope(strategy: Any, name: str) -> list[np.ndarray]:
    with strategy.scope():
        return trained(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_processes(name: str, worker_pool: Any) -> None:
    for found in worker_pool("tf", 2).run(in_scope, name, meanwhile=lambda: on_one_device(name)):
        same(found, on_one_device(name))
