"""Callbacks for Keras's `fit`, under every strategy and under none, and the learning rate of larger batches."""

from tfrep_strategy.callbacks.learning_rate import LearningRateWarmup, scale_learning_rate
from tfrep_strategy.callbacks.throughput import Throughput

__all__ = ["LearningRateWarmup", "Throughput", "scale_learning_rate"]
