"""Refusals before training: objects made outside the scope, objects of Keras 2, TensorFlow 1 or Horovod, and a forgotten scope.

* Training outside all scopes, in a process whose strategy has several replicas, means that the program has forgotten the scope.
  Several ranks would each train their own model. In one process, one device would do all of the work.
* Models, optimizers, metrics and variables made outside the scope in which they train are one set of variables that all
  replicas change, or one set on each process that no other process sees.
* Models and optimizers of `tf_keras`, which is Keras 2, aggregate losses, gradients and predictions as TensorFlow's own
  strategies need it. Here their results would be wrong. Under other strategies `tf_keras` works unchanged. It is never imported
  here.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.keras_integration.finding import driver_of, driver_of_model, of_optimizer


def refuse_foreign_model(model: Any, strategy: Any, method: str) -> None:
    """Refuses a model that was made outside the strategy's scope.

    Raises:
        ConfigurationError: The model was not made in the scope of the strategy.
    """
    if model._distribute_strategy is not strategy:
        _refuse(f"`{method}`", "a model", strategy, model=model.name)


def refuse_foreign_metrics(model: Any, strategy: Any, method: str) -> None:
    """Refuses a model's metrics beside those of `compile` if they were made outside the scope: each process would log its own rows.

    Raises:
        ConfigurationError: A metric was not made in the scope of the strategy.
    """
    for metric in model.metrics:
        if any(_is_foreign(variable, strategy) for variable in metric.variables):
            _refuse(f"`{method}`", "a metric", strategy, metric=metric.name, model=model.name)


def refuse_foreign_parts(model: Any, strategy: Any) -> None:
    """Refuses an optimizer or metrics of `compile` that were made outside the scope.

    Raises:
        ConfigurationError: The optimizer, or one of the metrics, was not made in the scope of the strategy.
    """
    if getattr(model.optimizer, "_distribution_strategy", strategy) is not strategy:
        _refuse("`compile`", "an optimizer", strategy, optimizer=model.optimizer.name, model=model.name)
    for metric in _metrics_given_to(model):
        if any(_is_foreign(variable, strategy) for variable in metric.variables):
            _refuse("`compile`", "a metric", strategy, metric=metric.name, model=model.name)


def refuse_foreign_optimizer(optimizer: Any, strategy: Any) -> None:
    """Refuses an optimizer that was made or is built outside the scope, also as a part of another: each replica would count its
    steps.

    Raises:
        ConfigurationError: The optimizer was not made, or is not built, in the scope of the strategy.
    """
    if optimizer._distribution_strategy is not strategy:
        _refuse("A step", "an optimizer", strategy, optimizer=optimizer.name)
    if not tf.distribute.has_strategy():
        raise ConfigurationError(
            message(
                "An optimizer is built outside the strategy's scope.",
                hint="call `build` inside `with strategy.scope():`, or leave it out: `fit` builds it.",
                code="TFREP-E016",
                optimizer=optimizer.name,
                strategy=type(strategy).__name__,
            )
        )


def refuse_foreign_variables(variables: Sequence[Any], strategy: Any) -> None:
    """Refuses to optimize variables that the strategy in scope has not made, also in a custom training loop.

    Raises:
        ConfigurationError: A variable was not made in the scope of the strategy.
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
            code="TFREP-E016",
            **received,
            strategy=type(strategy).__name__,
        )
    )


def refuse_old_optimizer(optimizer: Any, what: str) -> None:
    """Refuses an optimizer of TensorFlow 1, of Keras 2 or of Horovod.

    Args:
        optimizer: A Keras optimizer, a name, a configuration, or anything else.
        what: The receiver, such as "`compile`".

    Raises:
        ConfigurationError: The optimizer is of one of those packages.

    Example:
        >>> refuse_old_optimizer(tf.compat.v1.train.AdamOptimizer(0.01), "`compile`")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: `compile` got an optimizer of TensorFlow 1. Received: optimizer='AdamOptimizer'
        Hint: write an optimizer of keras.optimizers with the same settings: strategies sum its gradients. [TFREP-E002]
    """
    origin = {"horovod": "Horovod", "tf_keras": "Keras 2"}.get(_package(optimizer))
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        origin = "TensorFlow 1"
    if origin is not None:
        hint = "write an optimizer of keras.optimizers with the same settings: strategies sum its gradients."
        raise ConfigurationError(
            message(f"{what} got an optimizer of {origin}.", hint=hint, code="TFREP-E002", optimizer=type(optimizer).__name__)
        )


def refuse_old_callbacks(callbacks: Any) -> None:
    """Refuses callbacks of Horovod.

    Args:
        callbacks: The callbacks of `fit`.

    Raises:
        ConfigurationError: A callback is Horovod's.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        if _package(callback) == "horovod":
            raise ConfigurationError(
                message(
                    "`fit` got a callback of Horovod, whose Keras front end does not work with Keras 3.",
                    hint="leave it out, or take the one of docs/migration/horovod.md.",
                    callback=type(callback).__name__,
                )
            )


def _package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


_CALLS_OF_MODELS = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class NoticesKeras2:
    """Checks whether the program has imported `tf_keras`: when a scope begins, and when a variable is made in one.

    Models and optimizers reach a strategy only in these ways. This is a mixin for the `extended` of a strategy. It comes before
    TensorFlow's class.
    """

    def _scope(self, strategy: Any) -> Any:
        _look()
        return super()._scope(strategy)  # type: ignore[misc]

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        _look()
        return super()._create_variable(next_creator, **kwargs)  # type: ignore[misc]


def _look() -> None:
    package = sys.modules.get("tf_keras")
    if package is not None and hasattr(package, "Model"):  # Otherwise another thread is importing it.
        _change(package)


@functools.cache
def _change(package: Any) -> None:
    for name in _CALLS_OF_MODELS:
        _let_refuse(package.Model, name, "model", driver_of_model)
    for kind in (package.optimizers.Optimizer, package.optimizers.legacy.Optimizer):
        _let_refuse(kind, "apply_gradients", "optimizer", of_optimizer)


def _let_refuse(kind: type, name: str, what: str, find_driver: Callable[..., Any]) -> None:
    """Replaces a method by one that refuses objects that belong to a strategy of this package, or are used in its scope."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        driver = find_driver(self)
        if driver is not None:
            raise ConfigurationError(
                message(
                    f"`{name}` of a tf_keras {what} (Keras 2) does not work under the strategies of tfrep_strategy.",
                    hint="make it with Keras 3: `import keras`, or `tf.keras` without TF_USE_LEGACY_KERAS.",
                    code="TFREP-E002",
                    **{what: type(self).__name__},
                    strategy=type(driver.strategy).__name__,
                )
            )
        return original(self, *args, **kwargs)

    setattr(kind, name, method)


_strategies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The living strategies, in the order of their creation."""
_numbers = itertools.count()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def note(strategy: Any) -> None:
    """Records a new strategy."""
    _strategies[next(_numbers)] = strategy


def train(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `fit` or `train_on_batch` of a model that no strategy of this package drives.

    Raises:
        ConfigurationError: This process is one of several ranks, which would train apart.
    """
    if (strategy := _forgotten(model.distribute_strategy)) is not None:
        _say(strategy, f"`{original.__name__}` got a model made outside the strategy's scope", "make", model=model.name)
    return original(model, *args, **kwargs)


def evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `evaluate` or `test_on_batch` of such a model. With the same data, each rank gets the result of one device.

    Raises:
        ConfigurationError: Each rank has its own data, and would get its own result.
    """
    strategy = _forgotten(model.distribute_strategy)
    if strategy is not None and getattr(strategy, "rank_data", None) == "own":
        _say(strategy, f"`{original.__name__}` got a model made outside the strategy's scope", "make", model=model.name)
    return original(model, *args, **kwargs)


def apply(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `apply` of an optimizer outside the scopes of the strategies of this package.

    Raises:
        ConfigurationError: This process is one of several ranks, which would train apart.
    """
    if (strategy := _forgotten(optimizer._distribution_strategy)) is not None:
        _say(strategy, "An optimizer is applied outside the strategy's scope", "make and apply", optimizer=optimizer.name)
    return original(optimizer, *args, **kwargs)


def _forgotten(owner: Any) -> Any:
    """Returns the strategy whose scope is missing; None if none is missing, or the strategy allows it.

    Objects made in the scope of another package's strategy are there on purpose.

    Of several strategies, the latest one is returned, preferring those that connect ranks. The latest of these is never freed, so
    all ranks decide alike.
    """
    if not _strategies or tf.distribute.has_strategy():
        return None
    if driver_of(owner) is None and owner is not tf.distribute.get_strategy():
        return None
    candidates = [
        (strategy.extended.keras_driver.has_several_ranks, number, strategy)
        for number, strategy in _strategies.items()
        if strategy.extended.keras_driver.has_several
    ]
    *_, latest = max(candidates, default=(None,))
    return None if latest is None or latest.allow_plain_models else latest


def _say(strategy: Any, what: str, do: str, **received: Any) -> None:
    several_ranks = strategy.extended.keras_driver.has_several_ranks
    text = message(
        f"{what}, so {'each rank would work alone' if several_ranks else 'only one device works'}.",
        hint=f"{do} it inside `with strategy.scope():`, or set allow_plain_models=True on the strategy.",
        code="TFREP-E016",
        **received,
        strategy=type(strategy).__name__,
    )
    if several_ranks:
        raise ConfigurationError(text)
    if strategy not in _warned:
        _warned.add(strategy)
        warn(text)
