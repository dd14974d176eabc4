"""The base class of the parts of the synchronous driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.step import KerasStrategy
from tfrep_strategy.keras_integration.driver import KerasDriver


class SynchronousBase(KerasDriver):
    """A driver of a strategy whose replicas train in step."""

    @property
    def strategy(self) -> KerasStrategy:
        """The strategy of this driver."""
        return super().strategy

    @property
    def has_several(self) -> bool:
        """Whether there is more than one replica."""
        return self.strategy.num_replicas_in_sync > 1

    @property
    def has_several_ranks(self) -> bool:
        """Whether there are replicas in other processes."""
        return self.strategy.num_replicas_in_sync > self.strategy.extended.num_local_replicas

    def what_overwrites(self, gradients: Sequence[Any], variables: Sequence[Any]) -> dict[int, tf.Tensor]:
        """Reduces gradients that overwrite their variables, and returns them by their places in the list.

        Training in float8 keeps the largest absolute values of tensors in such variables, so the maximum over the replicas is
        taken.
        """
        named = zip(gradients, variables, strict=False)  # Keras reports different lengths.
        places = [i for i, (g, v) in enumerate(named) if g is not None and overwrites(v)]
        if not places:
            return {}
        own = [gradients[i] for i in places]
        return dict(zip(places, self.strategy.extended.own_communicator().all_reduce(own, "max"), strict=True))

    def num_processes(self) -> int:
        """Returns the number of processes that train together. Every process must call it."""
        return len(self.strategy.extended.all_gather_object(None))

    @property
    def in_replica(self) -> bool:
        """Whether the caller is inside a replica, given that the strategy is in scope."""
        return tf.distribute.get_replica_context() is not None


def overwrites(variable: Any) -> bool:
    """Returns whether an optimizer overwrites a variable with its gradient."""
    return getattr(variable, "overwrite_with_gradient", False)
