"""Models, optimizers, metrics and variables that were made outside the scope in which they are to train.

What no strategy has made is one set of variables that all replicas change, or one on each process that nobody else sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message


def refuse_foreign_model(model: Any, strategy: Any, method: str) -> None:
    """Refuses a model that was made elsewhere.

    Raises:
        ConfigurationError: when it was not made in the scope of the strategy.
    """
    if model._distribute_strategy is not strategy:
        _refuse(f"`{method}`", "a model", strategy, model=model.name)


def refuse_foreign_metrics(model: Any, strategy: Any, method: str) -> None:
    """Refuses metrics that a model has beside those of `compile`, and that were made elsewhere: each process would log its rows.

    Raises:
        ConfigurationError: when one of them was not made in the scope of the strategy.
    """
    for metric in model.metrics:
        if any(_is_foreign(variable, strategy) for variable in metric.variables):
            _refuse(f"`{method}`", "a metric", strategy, metric=metric.name, model=model.name)


def refuse_foreign_parts(model: Any, strategy: Any) -> None:
    """Refuses what `compile` was given and what was made elsewhere.

    Raises:
        ConfigurationError: when its optimizer, or one of the metrics, was not made in the scope of the strategy.
    """
    if getattr(model.optimizer, "_distribution_strategy", strategy) is not strategy:
        _refuse("`compile`", "an optimizer", strategy, optimizer=model.optimizer.name, model=model.name)
    for metric in _metrics_given_to(model):
        if any(_is_foreign(variable, strategy) for variable in metric.variables):
            _refuse("`compile`", "a metric", strategy, metric=metric.name, model=model.name)


def refuse_foreign_optimizer(optimizer: Any, strategy: Any) -> None:
    """Refuses an optimizer that was made or is built elsewhere, also inside one that was not: each replica would count its steps.

    Raises:
        ConfigurationError: when it was not made, or is not built, in the scope of the strategy.
    """
    if optimizer._distribution_strategy is not strategy:
        _refuse("A step", "an optimizer", strategy, optimizer=optimizer.name)
    if not tf.distribute.has_strategy():
        raise ConfigurationError(
            message(
                "An optimizer is built outside the strategy's scope.",
                hint="call `build` inside `with strategy.scope():`, or leave it out: `fit` builds it.",
                optimizer=optimizer.name,
                strategy=type(strategy).__name__,
            )
        )


def refuse_foreign_variables(variables: Sequence[Any], strategy: Any) -> None:
    """Refuses to optimize, in a loop of the user's own too, what the strategy in scope has not made.

    Raises:
        ConfigurationError: when one of the variables was not made in the scope of the strategy.
    """
    for variable in variables:
        if _is_foreign(variable, strategy):
            _refuse("An optimizer", "a variable", strategy, variable=getattr(variable, "path", variable.name))


def _is_foreign(variable: Any, strategy: Any) -> bool:
    return getattr(getattr(variable, "_value", variable), "_distribute_strategy", None) is not strategy


def _metrics_given_to(model: Any) -> list[Any]:
    given = getattr(model, "_compile_metrics", None)
    flat = keras.tree.flatten([given._user_metrics, given._user_weighted_metrics]) if given else []
    return [metric for metric in flat if isinstance(metric, keras.metrics.Metric)]


def _refuse(who: str, what: str, strategy: Any, **received: Any) -> None:
    raise ConfigurationError(
        message(
            f"{who} got {what} made outside the strategy's scope.",
            hint="make it inside `with strategy.scope():`.",
            **received,
            strategy=type(strategy).__name__,
        )
    )
