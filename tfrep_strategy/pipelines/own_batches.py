"""Reads the own part of batches whose sizes are known beforehand.

TensorFlow optimizes each function of a pipeline whenever an iterator starts, in every epoch and every process: 2 to 7 ms of CPU
time for a function of more than three operations. What is known beforehand therefore stands in data sets, not in functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.batches import as_element, bounds, empty_batch, has_open_sizes
from tfrep_strategy.keras_integration.protocol import Shards


class Map(NamedTuple):
    """A map of single examples.

    Attributes:
        name: Its name, for explanations.
        function: From an element to an element.
        parallel_calls: How many run at once; None if one after the other.
    """

    name: str
    function: Callable[[Any], Any]
    parallel_calls: int | None

    def on(self, rows: tf.data.Dataset) -> tf.data.Dataset:
        """Maps a data set, in order."""
        spec = rows.element_spec

        @tf.autograph.experimental.do_not_convert
        def mapped(*components: Any) -> Any:
            return self.function(as_element(spec, components))

        return rows.map(mapped, self.parallel_calls, deterministic=None if self.parallel_calls is None else True)


class Lifted(NamedTuple):
    """A data set, taken apart.

    Attributes:
        source: The data set without some of its maps.
        maps: These maps. `source`, mapped by them in order, has the elements of the data set.
    """

    source: tf.data.Dataset
    maps: tuple[Map, ...] = ()


class Batches(NamedTuple):
    """How many rows each batch has.

    Attributes:
        rows: Of the whole data set; negative if it has no end.
        size: Of a full batch.
        drops: Whether a last batch of fewer rows is left out.
    """

    rows: int
    size: int
    drops: bool

    def each(self, value: Callable[[int], Any]) -> tf.data.Dataset:
        """Returns a data set with `value(rows)` for each batch."""
        full = tf.data.Dataset.from_tensors(value(self.size))
        if self.rows < 0:
            return full.repeat()
        number, rest = divmod(self.rows, self.size)
        values = full.repeat(number)
        return values if not rest or self.drops else values.concatenate(tf.data.Dataset.from_tensors(value(rest)))


def are_known(batches: Batches, place: Any, spec: Any) -> bool:
    """Returns whether `own_batches` can read these batches.

    Args:
        batches: Which rows make a batch.
        place: The replicas of this process.
        spec: The specification of a batch. A part without rows needs the sizes of all other dimensions.
    """
    if place.local > 1 or batches.size < place.total or batches.rows == tf.data.UNKNOWN_CARDINALITY:
        return False
    return not (_last_part_is_empty(batches, place) and has_open_sizes(spec))


def own_batches(lifted: Lifted, batches: Batches, place: Any) -> tf.data.Dataset:
    """Takes the own rows of each batch, and maps them.

    Args:
        lifted: The rows of all batches, and their maps.
        batches: Which rows make a batch; `are_known` says yes to them.
        place: The replica of this process.

    Returns:
        A data set of `Shards` with one part.
    """

    def own(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
        start, stop = bounds(rows, place.total, place.first)
        return tf.constant(start, tf.int64), tf.constant(stop - start, tf.int64)

    @tf.autograph.experimental.do_not_convert
    def own_rows(window: Any, limits: tuple[tf.Tensor, tf.Tensor]) -> tf.data.Dataset:
        rows = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
        return rows.skip(limits[0]).take(limits[1])

    windows = lifted.source.window(batches.size, drop_remainder=batches.drops)
    rows = tf.data.Dataset.zip((windows, batches.each(own))).flat_map(own_rows)
    for each in lifted.maps:
        rows = each.on(rows)
    start, stop = bounds(batches.size, place.total, place.first)
    parts = rows.batch(stop - start, drop_remainder=batches.drops)
    if _last_part_is_empty(batches, place):
        parts = parts.concatenate(tf.data.Dataset.from_tensors(empty_batch(parts.element_spec)))

    @tf.autograph.experimental.do_not_convert
    def shards(part: Any, total: tf.Tensor) -> Shards:
        return Shards((part,), total, tf.constant(True))

    totals = batches.each(lambda rows: tf.constant(rows, tf.int64))
    return tf.data.Dataset.zip((parts, totals)).map(shards)


def _last_part_is_empty(batches: Batches, place: Any) -> bool:
    """Returns whether the last batch is too short to have a row for this process."""
    rest = 0 if batches.rows < 0 or batches.drops else batches.rows % batches.size
    start, stop = bounds(rest, place.total, place.first)
    return rest > 0 and start == stop
