"""Chooses the strategy for this run."""

from __future__ import annotations

import functools
import os

import tensorflow as tf

from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.transports import wanted_communicator
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.base import SynchronousStrategy
from tfrep_strategy.strategies.mirrored import MirroredStrategy
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy


@functools.cache
def auto_strategy() -> SynchronousStrategy:
    """Makes the strategy of this run. Later calls return the same strategy.

    `TFREP_STRATEGY` and `TFREP_COMMUNICATOR`, which `tfrep run` sets, come first. Otherwise several processes get a
    `MultiWorkerStrategy`, a single process with several GPUs or logical CPUs gets a `MirroredStrategy`, and a process with
    one device gets a `MultiWorkerStrategy` of one replica.

    Returns:
        The strategy.

    Raises:
        ConfigurationError: `TFREP_STRATEGY` does not name a strategy, or `TFREP_COMMUNICATOR` no communicator.

    Example:
        >>> auto_strategy() is auto_strategy()
        True
    """
    wanted = os.environ.get("TFREP_STRATEGY") or "auto"
    if wanted not in ("auto", "mirrored", "multi-worker"):
        raise ConfigurationError(
            message("Unknown strategy.", hint='use "auto", "mirrored" or "multi-worker".', TFREP_STRATEGY=wanted)
        )
    if wanted == "auto":
        devices = tf.config.get_visible_devices("GPU")
        alone = detect_environment().size == 1
        several = len(devices) > 1 or (not devices and alone and len(tf.config.list_logical_devices("CPU")) > 1)
        wanted = "mirrored" if alone and several else "multi-worker"
    if wanted == "mirrored":
        return MirroredStrategy()
    return MultiWorkerStrategy(wanted_communicator())
