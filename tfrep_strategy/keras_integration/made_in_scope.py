"""Models, optimizers and variables that were made outside the scope in which they are to train."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.protocol import current_strategy

_Trainer = keras_internal("backend.tensorflow.trainer", "TensorFlowTrainer")
_BaseOptimizer = keras_internal("optimizers.base_optimizer", "BaseOptimizer")


def _needs_own_variables(name: str) -> None:
    @replaces(_Trainer, name)
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses variables that no strategy has made: replicas would all change the same ones, or each its own."""
        strategy = self.distribute_strategy
        synchronous = getattr(strategy, "drives_keras", False) and strategy.num_replicas_in_sync > 1
        if synchronous or getattr(strategy, "trains_asynchronously", False):
            optimizer = getattr(getattr(self, "optimizer", None), "_distribution_strategy", strategy)
            makers = {"a model": self._distribute_strategy, "an optimizer": optimizer}
            outside = [what for what, maker in makers.items() if maker is not strategy]
            if outside:
                raise ConfigurationError(
                    message(
                        f"`{name}` got {' and '.join(outside)} made outside the strategy's scope.",
                        hint="make and compile the model inside `with strategy.scope():`.",
                        model=self.name,
                        strategy=type(strategy).__name__,
                    )
                )
        return original(self, *args, **kwargs)


for _name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
    _needs_own_variables(_name)


@replaces(_BaseOptimizer, "build")
def build(original: Any, self: Any, variables: Any) -> None:
    """Refuses to optimize, in a loop of the user's own too, what the strategy in scope has not made."""
    strategy = current_strategy()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        for variable in variables:
            maker = getattr(getattr(variable, "_value", variable), "_distribute_strategy", None)
            if maker is not strategy:
                raise ConfigurationError(
                    message(
                        "An optimizer got a variable made outside the strategy's scope.",
                        hint="make the model inside `with strategy.scope():`.",
                        variable=getattr(variable, "path", variable.name),
                        strategy=type(strategy).__name__,
                    )
                )
    original(self, variables)
