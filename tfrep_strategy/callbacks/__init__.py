"""Callbacks for Keras's `fit`, under every strategy and under none, and the learning rate of larger batches."""

import sys
from typing import Any

from tfrep_strategy.callbacks.learning_rate import LearningRateWarmup, scale_learning_rate
from tfrep_strategy.callbacks.throughput import Throughput
from tfrep_strategy.old_spellings import OF_CALLBACKS, no_attribute

__all__ = ["LearningRateWarmup", "Throughput", "scale_learning_rate"]


def __getattr__(name: str) -> Any:
    owner = f"module {__name__!r}"
    text = no_attribute(owner, name, OF_CALLBACKS[name]) if name in OF_CALLBACKS else f"{owner} has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])
