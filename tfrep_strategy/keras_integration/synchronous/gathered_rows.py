"""The rows of all replicas, in the order that they have on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.row_growth import note_global
from tfrep_strategy.keras_integration.synchronous.row_reductions import Reductions
from tfrep_strategy.slices import note_of_all_replicas


class GatheredRows:
    """Gathers what a comparison of rows needs, each tensor once in a step. All replicas have to make it.

    Args:
        step: What the replica knows of the step.
        found: Its "all_rows" and "shape" are gathered.

    Attributes:
        of_all: Both kinds, of all replicas.
    """

    def __init__(self, step: Step, found: Reductions) -> None:
        self._step, self._places = step, found.places
        rows, shapes = found.kinds["all_rows"], found.kinds["shape"]
        new_rows, new_shapes = ([own for own in each if own.name not in step.gathered] for each in (rows, shapes))
        self._own_sizes = {own.name: self._sizes(own.name, tf.shape(own)) for own in new_rows}
        self._own_sizes |= {own.name: self._sizes(own.name, own) for own in new_shapes}
        tables = self._all_sizes()
        step.gathered.update((own.name, (tables[own.name], self._gathered(own))) for own in new_rows)
        step.gathered.update((own.name, (tables[own.name], self._whole_shape(own, tables[own.name]))) for own in new_shapes)
        self.of_all: dict[str, list[tf.Tensor]] = {
            "all_rows": [step.gathered[own.name][1] for own in rows],
            "shape": [step.gathered[own.name][1] for own in shapes],
        }

    def own_part(self, own: tf.Tensor, of_all: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor that has those of all replicas, as those of `own` were gathered."""
        (table, _), replica = self._step.gathered[own.name], self._replica
        whole = self._cut(own.name, tf.convert_to_tensor(of_all), tf.reduce_sum(table, 0))
        parts = []
        for part, sizes in zip(whole, tf.unstack(table, axis=1), strict=True):
            first = tf.reduce_sum(sizes[:replica])
            parts.append(part[first : first + sizes[replica]])
        return self._put_together(own.name, parts)

    def _sizes(self, name: str, shape: tf.Tensor) -> list[tf.Tensor]:
        """Returns how many rows a tensor has of each of those that were joined to it."""
        axis, joined = self._places[name]
        rows = tf.cast(shape[axis], tf.int32)
        if not joined:
            return [rows]
        sizes = tf.stack([tf.shape(each)[dimension] for each, dimension in joined])
        return tf.unstack(sizes * (rows // tf.maximum(tf.reduce_sum(sizes), 1)))

    def _all_sizes(self) -> dict[str, tf.Tensor]:
        """Asks all replicas at once. Returns for each tensor a table with a line for each replica."""
        flat = [size for sizes in self._own_sizes.values() for size in sizes]
        if not flat:
            return {}
        table = self._communicator.all_gather_equal(tf.stack(flat)[tf.newaxis])
        parts = tf.split(table, [len(sizes) for sizes in self._own_sizes.values()], axis=1)
        return dict(zip(self._own_sizes, parts, strict=True))

    def _gathered(self, own: tf.Tensor) -> tf.Tensor:
        parts = self._cut(own.name, tf.stop_gradient(own), tf.stack(self._own_sizes[own.name]))
        of_all = self._put_together(own.name, list(map(self._step.strategy.extended.gather_over_replicas, parts)))
        note_of_all_replicas(of_all)
        return note_global(of_all)

    def _whole_shape(self, own: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        axis, _ = self._places[own.name]
        total = tf.cast(tf.reduce_sum(table), own.dtype)
        return note_global(tf.concat([own[:axis], total[tf.newaxis], own[axis + 1 :]], 0))

    def _cut(self, name: str, tensor: tf.Tensor, sizes: tf.Tensor) -> Sequence[tf.Tensor]:
        """Returns the parts that were joined, with rows in the first dimension."""
        axis, joined = self._places[name]
        first = tf.transpose(tensor, _exchanged(axis, tensor.shape.rank)) if axis else tensor
        return tf.split(first, sizes, num=len(joined)) if joined else [first]

    def _put_together(self, name: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        axis, _ = self._places[name]
        joined = tf.concat(parts, 0) if len(parts) > 1 else parts[0]
        return tf.transpose(joined, _exchanged(axis, joined.shape.rank)) if axis else joined

    @property
    def _communicator(self) -> Any:
        return self._step.strategy.extended.own_communicator()

    @property
    def _replica(self) -> Any:
        context: Any = tf.distribute.get_replica_context()
        return context.replica_id_in_sync_group


def _exchanged(axis: int, rank: int) -> list[int]:
    order = list(range(rank))
    order[0], order[axis] = axis, 0
    return order
