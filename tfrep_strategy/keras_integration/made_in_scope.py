"""Models, optimizers, metrics and variables that were made outside the scope in which they are to train.

What no strategy has made is one set of variables that all replicas change, or one on each process that nobody else sees.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import current_strategy

_Trainer = keras_internal("backend.tensorflow.trainer", "TensorFlowTrainer")
_BaseTrainer = keras_internal("trainers.trainer", "Trainer")
_BaseOptimizer = keras_internal("optimizers.base_optimizer", "BaseOptimizer")


def _strategy_of(model: Any) -> Any:
    """Returns the strategy of a model, or the one in scope, where it matters who makes variables; else None."""
    strategy = model.distribute_strategy
    synchronous = getattr(strategy, "drives_keras", False) and strategy.num_replicas_in_sync > 1
    return strategy if synchronous or getattr(strategy, "trains_asynchronously", False) else None


def _refuse(who: str, what: str, strategy: Any, **received: Any) -> None:
    raise ConfigurationError(
        message(
            f"{who} got {what} made outside the strategy's scope.",
            hint="make it inside `with strategy.scope():`.",
            **received,
            strategy=type(strategy).__name__,
        )
    )


def _is_foreign(variable: Any, strategy: Any) -> bool:
    return getattr(getattr(variable, "_value", variable), "_distribute_strategy", None) is not strategy


def _needs_own_model(name: str) -> None:
    @replaces(_Trainer, name)
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses a model that was made elsewhere."""
        strategy = _strategy_of(self)
        if strategy is not None and self._distribute_strategy is not strategy:
            _refuse(f"`{name}`", "a model", strategy, model=self.name)
        return original(self, *args, **kwargs)


for _name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
    _needs_own_model(_name)


@replaces(_BaseTrainer, "compile")  # Where it is defined: Keras compares it with that to see if a model has its own.
def compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: A001
    """Makes in the model's scope what is given by name, and refuses objects that were made elsewhere."""
    strategy = _strategy_of(self)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        original(self, *args, **kwargs)
    if not getattr(strategy, "drives_keras", False):
        return
    if getattr(self.optimizer, "_distribution_strategy", strategy) is not strategy:
        _refuse("`compile`", "an optimizer", strategy, optimizer=self.optimizer.name, model=self.name)
    for metric in _metrics_given_to(self):
        if any(_is_foreign(variable, strategy) for variable in metric.variables):
            _refuse("`compile`", "a metric", strategy, metric=metric.name, model=self.name)


def _metrics_given_to(model: Any) -> list[Any]:
    given = getattr(model, "_compile_metrics", None)
    flat = keras.tree.flatten([given._user_metrics, given._user_weighted_metrics]) if given else []
    return [metric for metric in flat if isinstance(metric, keras.metrics.Metric)]


@replaces(_BaseOptimizer, "build")
def build(original: Any, self: Any, variables: Any) -> None:
    """Refuses to optimize, in a loop of the user's own too, what the strategy in scope has not made."""
    strategy = current_strategy()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        for variable in variables:
            if _is_foreign(variable, strategy):
                _refuse("An optimizer", "a variable", strategy, variable=getattr(variable, "path", variable.name))
    original(self, variables)
