"""Whether code that reads data has drawn random numbers: then all of an epoch has to be read for the next one to be the same."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RandomStates:
    """The states of generators.

    Attributes:
        of_python: That of the module `random`.
        others: Those of NumPy, and of generators that the data holds.
    """

    of_python: Any
    others: bytes

    def after_shuffling(self, length: int) -> RandomStates:
        """Returns the states after `random.shuffle` of a list.

        Args:
            length: Of the list.
        """
        generator = random.Random()
        generator.setstate(self.of_python)
        generator.shuffle(list(range(length)))
        return replace(self, of_python=generator.getstate())


def random_states(data: Any) -> RandomStates:
    """Returns the states of the generators that code of some data may draw from.

    Args:
        data: What `fit` is given. Its attributes may be generators.

    Example:
        >>> before = random_states(None)
        >>> random_states(None) == before
        True
    """
    own = [_state(value) for value in getattr(data, "__dict__", {}).values()]
    return RandomStates(random.getstate(), pickle.dumps([np.random.get_state(), own]))


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, np.random.RandomState) else None
