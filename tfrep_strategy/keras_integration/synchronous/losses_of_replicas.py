"""The losses that a layer adds, where several replicas of a process call it in turns."""

from __future__ import annotations

import collections
from collections.abc import Iterable, MutableSequence
from typing import Any

import tensorflow as tf


class LossesOfReplicas(MutableSequence[Any]):
    """A list that each replica has for itself: a replica may stop between adding a loss and reading it, while another one begins.

    Outside replicas it is the list of the first one, which has called the layer as one device would.

    Args:
        losses: What the layer has added before.

    Example:
        >>> losses = LossesOfReplicas([1.0])
        >>> losses.extend([2.0, 3.0])
        >>> losses[:]
        [1.0, 2.0, 3.0]
    """

    def __init__(self, losses: Iterable[Any]) -> None:
        self._of: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
        self._of[0] = list(losses)

    def _own(self) -> list[Any]:
        context: Any = tf.distribute.get_replica_context()
        return self._of[0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))]

    def __getitem__(self, index: Any) -> Any:
        return self._own()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._own()[index]

    def __len__(self) -> int:
        return len(self._own())

    def insert(self, index: int, value: Any) -> None:
        self._own().insert(index, value)
