"""The strategies. Importing them replaces what `replaced.py` names; `REPLACED.uninstall()` restores TensorFlow."""

import tensorflow as tf

from tfrep_strategy.strategies.replaced import REPLACED

REPLACED.install(tf.__version__)

__all__ = ["REPLACED"]
