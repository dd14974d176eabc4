"""Unmodified Keras 3 on many devices and many machines, with the answer that one device gives."""

from tfrep_strategy import keras_integration  # noqa: F401  (makes Keras work under the strategies)
from tfrep_strategy._version import __version__
from tfrep_strategy.communicators import Communicator
from tfrep_strategy.strategies.mirrored import MirroredStrategy, use_logical_cpus
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy

__all__ = ["Communicator", "MirroredStrategy", "MultiWorkerStrategy", "__version__", "use_logical_cpus"]
