"""Training outside all scopes, in a process whose strategy has several replicas: the program has forgotten the scope.

Several ranks would each train a model of their own. In one process, one device would do all of the work.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.keras_integration.finding import driver_of

_strategies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Those that are still alive, by the order in which they were made."""
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
        ConfigurationError: Each rank has data of its own, and would get a result of its own.
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
    """Returns the strategy whose scope is missing here; None if none is missing, or the strategy allows that.

    What was made in the scope of a strategy of others is there on purpose.

    Of several strategies it is the latest, and one that connects ranks if there is one: the latest of these is never freed, so that
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
        **received,
        strategy=type(strategy).__name__,
    )
    if several_ranks:
        raise ConfigurationError(text)
    if strategy not in _warned:
        _warned.add(strategy)
        warn(text)
