"""Short sums between many processes: over the rows, and then the columns, of a grid of ranks.

TensorFlow's ring has `2 (n - 1)` messages that follow each other. Here a member gathers what the others of its row bring, adds it
up, and does the same in its column: `2 (sqrt(n) - 1)` messages, some more if the last row is shorter. More bytes travel, so that it
is for what is short.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import run_independently

_MERGE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "Add": tf.add, "Min": tf.minimum, "Max": tf.maximum, "Mul": tf.multiply,
}  # fmt: skip
_BYTES_PER_MESSAGE = 16 << 10
"""How many bytes take as long as a message without any, at least: less than was measured, as on a network of 1 Gb/s."""
_MOST_BYTES = 256 << 10
GATHERED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""What TensorFlow gathers between CPUs."""


class Grid:
    """The place of a member in the grid. All members get the same bits: they add up in the same order.

    Args:
        rank: The rank of this member.
        size: How many members there are.
        key_of: Returns the group key that belongs to a name.

    Attributes:
        messages: How many messages follow each other.
        most_bytes: Up to how many bytes the messages that are saved are worth more than the bytes that travel more.
    """

    def __init__(self, rank: int, size: int, key_of: Callable[[str], int]) -> None:
        shapes = [_Shape(columns, size) for columns in range(1, size + 1)]
        shape = min(shapes, key=lambda each: (each.messages, -each.columns))
        row, column = divmod(rank, shape.columns)
        is_last = row == shape.rows - 1
        self._row = shape.in_last if is_last else shape.columns, key_of(f"row{row}/")
        # Members of a shorter last row stand in for those that it lacks.
        own_columns = range(column, shape.columns, shape.in_last) if is_last else [column]
        self._columns = [(shape.rows, key_of(f"column{each}/")) for each in own_columns]
        self.messages, of_ring = shape.messages, 2 * (size - 1)
        travels_more = self.messages - of_ring / size  # As many times the tensor.
        worth = _BYTES_PER_MESSAGE * (of_ring - self.messages) / travels_more if travels_more else math.inf
        self.most_bytes = int(min(worth, _MOST_BYTES))

    def reduce(self, input: tf.Tensor, merge_op: str, group_size: int, group_key: int, **options: Any) -> tf.Tensor:
        """Does what `CollectiveReduceV2` does, whose arguments it takes.

        Args:
            input: A tensor of rank 1, of one of the dtypes of `GATHERED`.
            merge_op: How two tensors become one.
            group_size: How many members there are.
            group_key: That of all members, which is not used.
            **options: Passed on.
        """
        merge = _MERGE[merge_op]
        own = functools.reduce(merge, _gathered(input, *self._row, options))
        # TensorFlow sorts members by the numbers of their devices: all columns add up in the same order.
        return [functools.reduce(merge, _gathered(own, *column, options)) for column in self._columns][0]


class _Shape:
    """How many columns and rows some members make. The last row has `in_last` members."""

    def __init__(self, columns: int, size: int) -> None:
        self.columns, self.rows = columns, -(-size // columns)
        self.in_last = size - (self.rows - 1) * columns
        self.messages = columns - 1 + -(-columns // self.in_last) * (self.rows - 1)


def _gathered(tensor: tf.Tensor, size: int, key: int, options: dict[str, Any]) -> list[tf.Tensor]:
    if size == 1:
        return [tensor]
    gathered = tf.raw_ops.CollectiveGatherV2(input=tensor, group_size=size, group_key=key, **options)
    if not tf.executing_eagerly():
        run_independently(gathered.op)
    return tf.unstack(tf.reshape(gathered, [size, -1]))
