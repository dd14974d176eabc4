"""Models and optimizers of `tf_keras`, which is Keras 2, refuse to work under the strategies of this package.

Keras 2 aggregates losses, gradients and predictions as TensorFlow's own strategies need it. Here its results would be wrong. Where
no strategy of this package takes part, `tf_keras` works as ever. It is never imported here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.finding import driver_of_model, of_optimizer

_CALLS_OF_MODELS = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class NoticesKeras2:
    """Looks whether the program has imported `tf_keras`: when a scope begins, and when a variable is made in one.

    No model and no optimizer comes to a strategy otherwise. It is a mixin for the `extended` of a strategy, and comes before
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
    if package is not None and hasattr(package, "Model"):  # Else another thread is importing it.
        _change(package)


@functools.cache
def _change(package: Any) -> None:
    for name in _CALLS_OF_MODELS:
        _let_refuse(package.Model, name, "model", driver_of_model)
    for kind in (package.optimizers.Optimizer, package.optimizers.legacy.Optimizer):
        _let_refuse(kind, "apply_gradients", "optimizer", of_optimizer)


def _let_refuse(kind: type, name: str, what: str, find_driver: Callable[..., Any]) -> None:
    """Replaces a method by one that refuses objects which belong to a strategy of this package, or are used in its scope."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        driver = find_driver(self)
        if driver is not None:
            raise ConfigurationError(
                message(
                    f"`{name}` of a tf_keras {what} (Keras 2) does not work under the strategies of tfrep_strategy.",
                    hint="make it with Keras 3: `import keras`, or `tf.keras` without TF_USE_LEGACY_KERAS.",
                    **{what: type(self).__name__},
                    strategy=type(driver.strategy).__name__,
                )
            )
        return original(self, *args, **kwargs)

    setattr(kind, name, method)
