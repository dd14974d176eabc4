"""The strategies. Importing them replaces what `replaced.py` names; `REPLACED.uninstall()` makes TensorFlow what it was."""

import tensorflow as tf

from tfrep_strategy.strategies.replaced import REPLACED

REPLACED.install(tf.__version__)

__all__ = ["REPLACED"]
