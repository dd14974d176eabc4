"""The strategies that distributions of Keras bring into scope."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.keras_integration import distribution
from tfrep_strategy.strategies.auto import auto_strategy
from tfrep_strategy.strategies.mirrored import MirroredStrategy


def enable_keras_distribution() -> None:
    """Makes `keras.distribution` work with the TensorFlow backend, as with JAX. `tfrep run` calls it by itself.

    A distribution that is set brings a strategy into scope: `MirroredStrategy` for the devices of this process, or
    `MultiWorkerStrategy` for several processes, which a launcher or `keras.distribution.initialize` has described. In the
    scope of a strategy, its replicas are the devices. Each process gets the global batch, as each replica of a strategy does.

    Example:
        >>> _ = tfrep.use_logical_cpus(2)
        >>> enable_keras_distribution()
        >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
        >>> tf.distribute.get_strategy().num_replicas_in_sync
        2
        >>> keras.distribution.set_distribution(None)
    """
    distribution.make_strategy = _strategy_of


def _strategy_of(devices: Sequence[str]) -> Any:
    return auto_strategy() if detect_environment().size > 1 else _mirrored(tuple(each.upper() for each in devices))


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> MirroredStrategy:
    """Makes the strategy of some devices once: a model that was made under a distribution trains under an equal one."""
    return MirroredStrategy(devices)
