"""A driver: the methods that Keras's own code calls in the place of what is replaced."""

from __future__ import annotations

import weakref
from typing import Any

from tfrep_strategy.keras_integration import refusals
from tfrep_strategy.keras_integration.patching import Registry
from tfrep_strategy.keras_integration.tables import ModelPatches, TrainingPatches


class KerasDriver(TrainingPatches, ModelPatches):
    """Trains as Keras wrote it; the drivers of strategies override what they need.

    A method has the name of an entry of the tables. It gets Keras's own function, then the arguments of the call.

    Args:
        strategy: The strategy that brings it.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)
        refusals.note(strategy)

    @property
    def strategy(self) -> Any:
        """The strategy that has brought this driver."""
        return self._strategy()

    @property
    def has_several(self) -> bool:
        """Whether the strategy has more to train with than one device."""
        return True

    @property
    def has_several_ranks(self) -> bool:
        """Whether several processes run the program."""
        return False

    def num_processes(self) -> int:
        """Counts the processes that train together, and call what saves at the same time."""
        return 1


registry = Registry(KerasDriver)
"""All that is replaced."""
