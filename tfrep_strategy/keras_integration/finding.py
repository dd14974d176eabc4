"""Finds a driver by the strategy of the object that Keras passes, or by the strategy in scope.

The driver of a strategy is `strategy.extended.keras_driver`. None means that Keras's own code runs, as under other packages'
strategies and under none.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.scoped import Setting

loops_data_of: Setting[Any] = Setting(None)
"""The driver whose loop makes a data adapter now; None outside loops."""


driver_of_trace: Setting[Any] = Setting(None)
"""The driver of the one-device step that is traced now; None outside such traces."""


def driver_of(strategy: Any) -> Any:
    """Returns the driver of a strategy; None for other packages' strategies and for None."""
    return getattr(getattr(strategy, "extended", None), "keras_driver", None)


def driver_in_scope(*args: Any, **kwargs: Any) -> Any:
    """Returns the driver of the strategy in scope, or of the one-device step that is traced."""
    return driver_of_trace.value or driver_of(tf.distribute.get_strategy())


def driver_of_model(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the driver of the strategy that a model was made under; None for other objects."""
    return driver_of(getattr(model, "distribute_strategy", None))


def of_callback(callback: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the driver of the model that a callback belongs to."""
    return driver_of_model(callback.model)


def of_callbacks(
    callback_list: Any, callbacks: Any = None, add_history: Any = False, add_progbar: Any = False, model: Any = None, **params: Any
) -> Any:
    """Returns the driver of the model that a list of callbacks is made for."""
    return driver_of_model(model)


def of_loop(*args: Any, distribute_strategy: Any = None, **kwargs: Any) -> Any:
    """Returns the driver of the strategy that a loop reads data for."""
    return driver_of(distribute_strategy)


def of_outputs(values: Any, strategy: Any, reduction: Any) -> Any:
    """Returns the driver of the strategy whose replicas have returned values."""
    return driver_of(strategy)


def of_predictions(tensors: Any) -> Any:
    """Returns the driver of the workers that make predictions; None if the predictions are tensors already."""
    return driver_of(getattr(tensors[0], "strategy", None))


def of_reader(*args: Any, **kwargs: Any) -> Any:
    """Returns the driver whose loop adapts data."""
    return loops_data_of.value


def of_variable(variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the driver that a variable on servers holds, which needs no scope; else the driver in scope."""
    # TensorFlow's containers of copies forward unknown attributes to their value, which replicas would sum up.
    own = inspect.getattr_static(getattr(variable, "_value", None), "keras_driver", None)
    return driver_in_scope() if own is None else own


def of_embedding(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the driver of a layer's table; else the driver in scope."""
    return of_variable(getattr(layer, "_embeddings", None))


def of_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the driver in scope; outside scopes, the driver of the optimizer's strategy."""
    driver = driver_in_scope()
    return driver_of(optimizer._distribution_strategy) if driver is None else driver
