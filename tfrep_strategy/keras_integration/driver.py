"""The base class of drivers: the methods that Keras's code calls instead of replaced functions."""

from __future__ import annotations

import weakref
from typing import Any

from tfrep_strategy.keras_integration import refusals
from tfrep_strategy.keras_integration.patching import Registry
from tfrep_strategy.keras_integration.tables import ModelPatches, TrainingPatches


class KerasDriver(TrainingPatches, ModelPatches):
    """Trains as Keras wrote it. The drivers of strategies override methods.

    A method has the name of an entry of the tables. It gets Keras's own function, then the arguments of the call.

    Args:
        strategy: The strategy of the driver.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)
        refusals.note(strategy)

    @property
    def strategy(self) -> Any:
        """The strategy of this driver."""
        return self._strategy()

    @property
    def has_several(self) -> bool:
        """Whether the strategy trains on more than one device."""
        return True

    @property
    def has_several_ranks(self) -> bool:
        """Whether several processes run the program."""
        return False

    def num_processes(self) -> int:
        """Returns the number of processes that train together, and save at the same time."""
        return 1


registry = Registry(KerasDriver)
"""All replacements in Keras."""
