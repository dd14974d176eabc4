"""Placements of the tensors of a global step on replicas: replicated, sharded, partial, or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Replicate:
    """Every replica holds the whole tensor."""


OF_LAYOUT, WHOLE = -1, -2
"""Kinds of rows: those along which layouts shard weights, as many as there are replicas, one for each; and those of a batch that
each replica has whole, which name the size of an axis and shard nothing."""


@dataclass(frozen=True)
class Shard:
    """Every replica holds contiguous rows. Concatenated in replica order, they are the tensor.

    Attributes:
        axis: The axis of the rows.
        per_row: Number of elements of that axis in one row: 1, or more after axes were merged.
        rows: The number of the kind of rows: 0 for those of the batch; `OF_LAYOUT` for parts of weights, one for each replica;
            others for rows that data have chosen (`rules/indexing.py`), or that are sharded beside the batch (`choice.py`).
    """

    axis: int = 0
    per_row: int = 1
    rows: int = 0

    def __post_init__(self) -> None:
        assert self.axis >= 0, self.axis

    @property
    def size(self) -> Rows:
        """The size of the axis."""
        return Rows(self.per_row, self.rows)

    def local_shape(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Returns the shape of a replica's part of a tensor, as far as it is known."""
        if shape.rank is None:
            return shape
        own = self.per_row if self.rows == OF_LAYOUT else None
        return tf.TensorShape([own if i == self.axis else size for i, size in enumerate(shape)])

    def on(self, axis: int) -> Shard:
        """Returns the placement of a tensor that has these rows along another axis."""
        return Shard(axis, self.per_row, self.rows)


@dataclass(frozen=True)
class Partial:
    """Every replica holds an addend of the tensor's shape; the tensor is their sum."""


@dataclass(frozen=True)
class Own:
    """Every replica holds its own value. Computations with it are per replica."""


@dataclass(frozen=True)
class Vacant:
    """An empty list. The first element that is added determines the placement."""


@dataclass(frozen=True)
class Items:
    """A list whose elements are rows. Every replica holds the elements of its rows."""


@dataclass(frozen=True)
class Parts:
    """Every replica holds equally many consecutive elements, as a vector. In replica order, with the padding, they are the tensor.

    Attributes:
        width: Number of elements of a part.
        replicas: Number of parts.
        elements: Number of elements that are not padding.
        is_read: Whether it is the value of a variable, which each operation gathers for itself shortly before.
        shape: For the handle of a variable: the shape of its value.
        part_shape: For the handle of a variable: the shape of a part.
    """

    width: int
    replicas: int
    elements: int
    is_read: bool = False
    shape: tuple[int, ...] = ()
    part_shape: tuple[int, ...] = ()


Placement = Replicate | Shard | Partial | Own | Vacant | Items | Parts
"""A list has the placement of its elements, unless the elements are rows."""

REPLICATE, PARTIAL, OWN, VACANT, ITEMS = Replicate(), Partial(), Own(), Vacant(), Items()


@dataclass(frozen=True)
class Rows:
    """A size that is a multiple of the number of rows of the global batch, or of other rows.

    Attributes:
        per_row: The factor.
        rows: The number of the kind of rows, as in `Shard`.

    Example:
        >>> 3 * Rows(2)
        Rows(per_row=6, rows=0)
    """

    per_row: int = 1
    rows: int = 0

    def at(self, axis: int) -> Shard:
        """Returns the placement of a tensor that has these rows along an axis."""
        return Shard(axis, self.per_row, self.rows)

    def __mul__(self, other: Any) -> Any:
        return Rows(self.per_row * int(other), self.rows) if is_number(other) and other > 0 else None

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if is_number(other) and other > 0 and self.per_row % other == 0:
            return Rows(self.per_row // int(other), self.rows)
        if isinstance(other, Rows) and self.rows == other.rows and self.per_row % other.per_row == 0:
            return self.per_row // other.per_row
        return None

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Rows):
            return Rows(self.per_row + other.per_row, self.rows) if self.rows == other.rows else None
        if not is_number(other) or (other and self.rows):
            return None
        return Offset(self.per_row, int(other)) if other else self

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if is_number(other) else 0 if self == other else None


@dataclass(frozen=True)
class Offset:
    """A size that exceeds a multiple of the rows by a constant, such as the length of row splits of ragged rows.

    Example:
        >>> Rows() + 1, Rows() + 1 - 1
        (Offset(per_row=1, more=1), Rows(per_row=1, rows=0))
    """

    per_row: int
    more: int

    def __add__(self, other: Any) -> Any:
        return Rows(self.per_row) + (self.more + other) if is_number(other) else None

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if is_number(other) else 0 if self == other else None

    def __mul__(self, other: Any) -> Any:
        return None

    __rmul__ = __floordiv__ = __rfloordiv__ = __rsub__ = __mul__


Size = Any
"""A number, a multiple of the number of rows, or None if unknown."""


def is_number(size: Any) -> bool:
    """Returns whether a size is a number."""
    return isinstance(size, (int, np.integer)) and not isinstance(size, bool)


def product(sizes: Any) -> Size:
    """Returns the product of sizes; None if it is neither a number nor a multiple of the rows.

    Example:
        >>> product([2, Rows(), 3]), product([Rows(), Rows()]), product([2, None])
        (Rows(per_row=6, rows=0), None, None)
    """
    result: Any = 1
    for size in sizes:
        if result is None or size is None or isinstance(size, Offset):
            return None
        result = size * result if isinstance(size, Rows) else result * int(size)
    return result


def common_dims(a: Sequence[Size] | None, b: Sequence[Size] | None) -> tuple[Size, ...] | None:
    """Returns the sizes that two shapes share, None for others; None if a shape is unknown, or the ranks differ.

    Example:
        >>> common_dims([Rows(), 3], [Rows(), 4])
        (Rows(per_row=1, rows=0), None)
    """
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))
