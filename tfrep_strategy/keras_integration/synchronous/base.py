"""What the parts of the synchronous driver have in common."""

from __future__ import annotations

import tensorflow as tf

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.protocol import KerasStrategy


class SynchronousBase(KerasDriver):
    """A driver of a strategy whose replicas train in step."""

    @property
    def strategy(self) -> KerasStrategy:
        """The strategy that has brought this driver."""
        return super().strategy

    @property
    def has_several(self) -> bool:
        """Whether there is more than one replica."""
        return self.strategy.num_replicas_in_sync > 1

    def num_processes(self) -> int:
        """Counts the processes that train together. Every process has to call it."""
        return len(self.strategy.extended.all_gather_object(None))

    @property
    def in_replica(self) -> bool:
        """Whether the caller is inside a replica, given that the strategy is in scope."""
        return tf.distribute.get_replica_context() is not None
