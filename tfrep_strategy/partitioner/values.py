"""The tensors that the program of a replica has for those of a traced graph, and conversions between placements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import CannotPartitionError, message
from tfrep_strategy.partitioner import sizes as by_value
from tfrep_strategy.partitioner.placements import (
    REPLICATE,
    WHOLE,
    Items,
    Own,
    Partial,
    Parts,
    Placement,
    Replicate,
    Rows,
    Shard,
    Size,
    Vacant,
    is_number,
)
from tfrep_strategy.partitioner.program import Program, Tensor


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """A replica's rows of the global batch: int32 scalars, or the arguments of its program for them.

    Attributes:
        start: The index of its first row.
        count: Number of its rows.
        total: Number of rows of all replicas.
        replica: The replica id.
    """

    start: Any
    count: Any
    total: Any
    replica: Any


_numbers = itertools.count(1)

NUMBER, LENGTH = "number", "length"
"""Roles of elements in a loop over rows: the number of a row among a replica's rows, or the number of a replica's rows."""


@dataclasses.dataclass(frozen=True)
class Elements:
    """The knowledge about each element of a list.

    Attributes:
        dtype: Its dtype.
        dims: Its global shape, as far as known.
        sizes: Its value, if it holds sizes.
        elements: If it is a list: the knowledge about its elements.
        role: `NUMBER` or `LENGTH`; None for other tensors.
    """

    dtype: tf.DType
    dims: tuple[Size, ...] | None = None
    sizes: tuple[Any, ...] | None = None
    elements: Elements | None = None
    role: str | None = None


@dataclasses.dataclass
class Value:
    """The program's counterpart of a tensor of the traced graph.

    Attributes:
        placement: Its placement; for the handle of a variable, the placement of the variable's value.
        local: The tensor of the program.
        is_shared: For a handle: whether all replicas of the process share the variable.
        elements: For a list: the knowledge about its elements.
    """

    placement: Placement
    local: Tensor
    is_shared: bool = False
    elements: Elements | None = None


class Values:
    """Queries of rules about the tensors of a traced graph.

    Args:
        program: The program, to which nodes are added.
        rows: Its arguments for the rows.
    """

    def __init__(self, program: Program, rows: OwnRows) -> None:
        self.program, self.rows = program, rows
        self.chosen: dict[int, OwnRows] = {}
        """Rows other than those of the batch, by their number in placements."""
        self.values: dict[str, Value] = {}
        self.whole: dict[str, Tensor] = {}
        """The whole of sharded or partial tensors, if it was needed."""
        self.seen: dict[str, Tensor] = {}
        """The whole of tensors in parts, as an operation got it, for verification."""
        self.sizes: dict[str, by_value.Sizes | None] = {}
        self.known_dims: dict[str, list[Size]] = {}
        self.traced_rows: int | None = None
        """The number of rows in the trace, if it has a fixed one."""

    # Queries.

    def value(self, tensor: Any) -> Value:
        """Returns the program's counterpart of a tensor."""
        return self.values[tensor.name]

    def placement(self, tensor: Any) -> Placement:
        """Returns the placement of a tensor."""
        return self.values[tensor.name].placement

    def local(self, tensor: Any) -> Tensor:
        """Returns the local tensor of a replica."""
        return self.values[tensor.name].local

    def sizes_of(self, tensor: Any) -> by_value.Sizes | None:
        """Returns the known value of a tensor of sizes."""
        return self.sizes.get(tensor.name)

    def number(self, tensor: Any) -> int | None:
        """Returns the value of an integer scalar, or of a vector of one, if it is known."""
        found = by_value.numbers(self.sizes_of(tensor))
        return int(found.ravel()[0]) if found is not None and found.size == 1 else None

    def numbers(self, tensor: Any) -> list[int] | None:
        """Returns the values of an integer vector, if all are known."""
        found = by_value.numbers(self.sizes_of(tensor))
        return None if found is None else [int(x) for x in found.ravel()]

    def note_sizes(self, tensor: Any, sizes: tuple[Any, ...] | None) -> None:
        """Records the value of a tensor of sizes.

        Args:
            tensor: The tensor.
            sizes: Its shape, then all values.
        """
        if sizes is not None:
            shape, *values = sizes
            self.sizes[tensor.name] = by_value.array(values).reshape(shape)

    def dims(self, tensor: Any) -> list[Size] | None:
        """Returns the global shape of a tensor as far as known; None if its rank is unknown, or it is a list or a handle."""
        if tensor.dtype in (tf.variant, tf.resource):
            return None
        dims: list[Size] | None = self.known_dims.get(tensor.name)
        if dims is None and tensor.shape.rank is not None:
            dims = tensor.shape.as_list()
        if dims is None:
            return None
        placed = self.values.get(tensor.name)
        if placed is not None and isinstance(placed.placement, Shard) and dims[placed.placement.axis] is None:
            dims[placed.placement.axis] = placed.placement.size
        return dims

    def dims_held(self, tensor: Any) -> list[Size] | None:
        """Returns the global shape of a tensor, or of the variable behind a handle that a layout shards."""
        return self.known_dims.get(tensor.name) if tensor.dtype == tf.resource else self.dims(tensor)

    def rank(self, tensor: Any) -> int | None:
        """Returns the rank of a tensor, if it is known."""
        dims = self.dims(tensor)
        return None if dims is None else len(dims)

    def have_rows(self, tensor: Any, shard: Shard, like: Any = None) -> bool:
        """Returns whether an axis of a tensor is known to have the size of a shard's axis.

        Args:
            tensor: The tensor; its axis is `shard.axis`.
            shard: The shard.
            like: The size of the sharded axis in the traced graph.
        """
        dims = self.dims(tensor)
        size = None if dims is None or shard.axis >= len(dims) else dims[shard.axis]
        return size == shard.size or (is_number(size) and size == like)

    # Conversions between placements.

    def replicated(self, tensor: Any, sum_as: str = "sum") -> Tensor:
        """Returns the whole of a tensor. This may take a collective.

        Args:
            tensor: The tensor.
            sum_as: The kind of collective that sums addends.
        """
        value = self.value(tensor)
        if isinstance(value.placement, (Replicate, Vacant)):
            return value.local
        if tensor.dtype == tf.resource:
            raise CannotPartitionError(
                message(
                    "An operation takes a variable of which each replica holds an addend, and has no rule.",
                    hint="read the variable before, outside of loops and branches.",
                    operation=tensor.name,
                )
            )
        if isinstance(value.placement, Parts):
            return self.gathered(tensor)
        if tensor.name not in self.whole:
            self.whole[tensor.name] = self._whole(tensor, value, sum_as)
        if isinstance(value.placement, Partial):  # The addends are not needed any more.
            self.values[tensor.name] = dataclasses.replace(value, placement=REPLICATE, local=self.whole[tensor.name])
        return self.whole[tensor.name]

    def gathered(self, tensor: Any, after: Sequence[Tensor] = ()) -> Tensor:
        """Returns the whole of a tensor that replicas hold in parts. It is gathered after some tensors are computed."""
        value, add, constant = self.value(tensor), self.program.add, self.program.constant
        parts = value.placement
        assert isinstance(parts, Parts)
        rows = self.program.send("equal rows", value.local, after=after)
        rows.shape = tf.TensorShape([parts.replicas, parts.width])
        flat = add("Reshape", rows, constant([-1]))
        if parts.elements < parts.replicas * parts.width:
            flat = add("Slice", flat, constant([0]), constant([parts.elements]))
        missing = tensor.shape.num_elements() - parts.elements
        if missing:
            flat = add("PadV2", flat, constant([[0, missing]]), constant(0, value.local.dtype))
        whole: Tensor = add("Reshape", flat, constant(tensor.shape.as_list(), tf.int32))
        whole.shape = tensor.shape
        return whole

    def part(self, tensor: Any, parts: Parts) -> Tensor:
        """Returns the replica's part of a tensor, as a vector."""
        own = self.placement(tensor)
        if isinstance(own, Parts) and (own.width, own.replicas) == (parts.width, parts.replicas):
            return self.local(tensor)
        add, constant, whole = self.program.add, self.program.constant, self.replicated(tensor)
        flat = add("Reshape", whole, constant([-1]))
        missing = parts.replicas * parts.width - parts.elements
        if missing:
            flat = add("PadV2", flat, constant([[0, missing]]), constant(0, whole.dtype))
        rows = add("Reshape", flat, constant([parts.replicas, parts.width]))
        part: Tensor = add("GatherV2", rows, self.rows.replica, constant(0))
        part.shape = tf.TensorShape([parts.width])
        return part

    def agreed(self, tensor: Any, sum_as: str = "sum") -> Tensor:
        """Returns the whole of a tensor, with the same bits on all ranks: replica 0's if ranks may have computed different ones.

        Args:
            tensor: The tensor.
            sum_as: The kind of collective that sums addends.
        """
        whole = self.replicated(tensor, sum_as)
        if not whole.varies or whole.dtype in (tf.variant, tf.resource):
            return whole
        can_be_added = whole.dtype.is_floating or whole.dtype.is_complex
        agreed = self.program.send(sum_as, self.counted_once(whole)) if can_be_added else self.program.send("first", whole)
        agreed.shape = whole.shape if whole.shape.rank is not None else tensor.shape
        return agreed

    def _whole(self, tensor: Any, value: Value, sum_as: str) -> Tensor:
        assert not isinstance(value.placement, Own), tensor
        again = self._from_whole_inputs(tensor) or self._from_sum(tensor, value, sum_as)
        if again is not None:
            return again
        if value.elements is not None:
            return self._whole_list(value)
        if isinstance(value.placement, Shard):
            if value.local.shape.rank is None and (rank := self.rank(tensor)) is not None:
                value.local.shape = tf.TensorShape([None] * rank)
            whole = self.program.send("gather", value.local, value.placement.axis)
        else:
            whole = self.program.send(sum_as, value.local)
        whole.shape = tensor.shape
        return whole

    def _whole_list(self, value: Value) -> Tensor:
        """Replicates the elements of a list with one collective."""
        assert value.elements is not None
        dims = value.elements.dims
        if dims is None or None in dims:  # Or the elements are lists.
            hint = "nothing has to be done: replicas run such steps."
            raise CannotPartitionError(message("A list whose elements may have several shapes is wanted whole.", hint))
        add, placement = self.program.add, value.placement
        if value.elements.role is not None:  # The elements of a replica refer to its own rows.
            total = self.rows.total
            whole = add("Range", 0, total, 1) if value.elements.role == NUMBER else add("Fill", add("Pack", [total], axis=0), total)
            return add("TensorListFromTensor", self.as_dtype(whole, value.elements.dtype), -1)
        if isinstance(placement, Items):
            own = add(
                "TensorListStack",
                value.local,
                self.program.constant(dims, tf.int32),
                element_dtype=value.elements.dtype,
            )
            own.shape = tf.TensorShape([None, *(d if is_number(d) else None for d in dims)])
            return add("TensorListFromTensor", self.program.send("gather", own), -1)
        shape = self.program.constant(self.element_shape(dims, placement), tf.int32)
        stacked = add("TensorListStack", value.local, shape, element_dtype=value.elements.dtype)
        if isinstance(placement, Shard):
            stacked.shape = tf.TensorShape([None] * (1 + len(dims)))
            whole = self.program.send("gather", stacked, placement.axis + 1)
        else:
            whole = self.program.send("sum", stacked)
        whole.shape = tf.TensorShape([None, *(d if is_number(d) else None for d in dims)])
        return add("TensorListFromTensor", whole, -1)

    def element_shape(self, dims: Any, placement: Placement) -> Any:
        """Returns the shape of a list's elements that all replicas share, in the form of a list operation: -1 is any size."""
        if dims is None:
            return -1
        axis = placement.axis if isinstance(placement, Shard) else None
        return [d if is_number(d) and i != axis and d != self.traced_rows else -1 for i, d in enumerate(dims)]

    def to(self, tensor: Any, placement: Placement) -> Tensor:
        """Returns the local tensor for another placement."""
        if placement == self.placement(tensor) or isinstance(self.placement(tensor), Vacant):
            return self.local(tensor)
        if isinstance(placement, Shard):
            return self.sharded(tensor, placement)
        return self.partial(tensor) if isinstance(placement, Partial) else self.replicated(tensor)

    def can_be(self, tensor: Any, placement: Placement) -> bool:
        """Returns whether a tensor can have a placement without communication."""
        own = self.placement(tensor)
        if own == placement or isinstance(own, Vacant):
            return True
        if not isinstance(own, Replicate) or self.value(tensor).elements is not None or tensor.dtype == tf.resource:
            return False
        if isinstance(placement, Shard):
            like = self.traced_rows * placement.per_row if self.traced_rows and not placement.rows else None
            return self.have_rows(tensor, placement, like)
        return isinstance(placement, Partial)

    def _from_sum(self, tensor: Any, value: Value, sum_as: str) -> Tensor | None:
        """Computes the whole of a tensor from its only partial operand, which others may need whole as well."""
        operation = tensor.op
        if not isinstance(value.placement, Partial) or operation.type not in _KEEP_SUMS:
            return None
        if operation.type == "IdentityN":
            return self.replicated(operation.inputs[tensor.value_index], sum_as)
        summed = [x for x in operation.inputs if x.name in self.values and isinstance(self.placement(x), Partial)]
        others = [x for x in operation.inputs if x.name not in self.values or isinstance(self.placement(x), Shard)]
        if len(summed) != 1 or others or not tensor.shape.rank:
            return None
        if operation.type not in _ONLY_RESHAPED and not summed[0].shape.is_compatible_with(tensor.shape):
            return None
        self.replicated(summed[0], sum_as)
        return self.program.copy_of(operation, [self.replicated(x) for x in operation.inputs]).outputs[0]

    def _from_whole_inputs(self, tensor: Any) -> Tensor | None:
        """Computes the whole of a tensor from inputs that are already whole, which saves a collective."""
        operation = tensor.op
        if operation.type not in _CHEAP or len(operation.outputs) != 1:
            return None
        inputs = []
        for each in operation.inputs:
            value = self.values[each.name]
            if not isinstance(value.placement, Replicate) and each.name not in self.whole:
                return None
            inputs.append(value.local if isinstance(value.placement, Replicate) else self.whole[each.name])
        return self.program.copy_of(operation, inputs).outputs[0]

    def sharded(self, tensor: Any, shard: Shard) -> Tensor:
        """Returns the own rows of a tensor. A whole tensor is cut."""
        value = self.value(tensor)
        if value.placement == shard:
            return value.local
        return self.cut(self.replicated(tensor), shard, self.rank(tensor))

    def cut(self, whole: Tensor, shard: Shard, rank: int | None) -> Tensor:
        """Cuts a replica's rows out of a whole tensor."""
        assert rank is not None
        own = self.elements(shard)
        first, size = self.vector(rank, shard.axis, 0, own.start), self.vector(rank, shard.axis, -1, own.count)
        part: Tensor = self.program.add("Slice", whole, first, size)
        part.shape = shard.local_shape(whole.shape)
        return part

    def partial(self, tensor: Any) -> Tensor:
        """Returns an addend of a tensor. For a whole tensor, replica 0 has the value, and the others have zeros."""
        if isinstance(self.placement(tensor), Partial):
            return self.local(tensor)
        return self.counted_once(self.replicated(tensor))

    def counted_once(self, whole: Tensor) -> Tensor:
        """Returns a whole tensor on replica 0, and zeros on the others."""
        add = self.program.add
        is_first = add("Equal", self.rows.replica, 0)
        return add("SelectV2", is_first, whole, add("ZerosLike", whole))

    def elements(self, of: Shard | Rows) -> OwnRows:
        """Returns a replica's elements of an axis that has rows."""
        rows = self.chosen[of.rows] if of.rows else self.rows
        start, count, total = (self.times(x, of.per_row) for x in (rows.start, rows.count, rows.total))
        return OwnRows(start, count, total, rows.replica)

    def put_rows(self, own: OwnRows) -> Rows:
        """Gives a number to rows other than those of the batch."""
        rows = Rows(1, next(_numbers))
        self.chosen[rows.rows] = own
        return rows

    def times(self, size: Tensor, factor: int) -> Tensor:
        """Returns a size multiplied by a factor."""
        return size if factor == 1 else self.program.add("Mul", size, factor)

    def vector(self, rank: int, place: int, others: int, value: Tensor, dtype: tf.DType = tf.int32) -> Tensor:
        """Returns a vector with a value at one index, and a number at all others."""
        value = self.as_dtype(value, dtype)
        values = [value if i == place else self.program.constant(others, dtype) for i in range(rank)]
        return self.program.add("Pack", values, axis=0)

    def as_dtype(self, tensor: Tensor, dtype: tf.DType) -> Tensor:
        """Converts integers to another dtype."""
        return tensor if tensor.dtype == dtype else self.program.add("Cast", tensor, DstT=dtype)

    def own_sizes(self, sizes: Any, shard: Shard, is_filled: bool = False) -> Tensor:
        """Returns a vector of global sizes, with the replica's own size at one index.

        Args:
            sizes: int32 or int64 vector of the traced graph, of known length.
            shard: Its axis is the index of the own size.
            is_filled: Whether a row of zeros replaces no rows.
        """
        whole, length = self.replicated(sizes), self.length(sizes)
        assert length is not None
        count, place = self.elements(shard).count, shard.axis
        if is_filled:
            count = self.program.add("Maximum", count, shard.per_row)
        own = self.as_dtype(count, sizes.dtype)
        known = self.sizes_of(sizes)
        if known is not None and all(is_number(x) for i, x in enumerate(known) if i != place):
            values = [own if i == place else self.program.constant(x, sizes.dtype) for i, x in enumerate(known)]
            return self.program.add("Pack", values, axis=0)
        index = self.program.constant([[place]])
        return self.program.add("TensorScatterUpdate", whole, index, self.program.add("Pack", [own], axis=0))

    def length(self, vector: Any) -> int | None:
        """Returns the length of a vector, if it is known."""
        known = self.sizes_of(vector)
        if known is not None:
            return int(known.size)
        return vector.shape[0] if vector.shape.rank == 1 else None

    def row_place(self, sizes: Any) -> Shard | None:
        """Returns the placement of a tensor whose shape is this vector; None if the shape has no rows."""
        known = self.sizes_of(sizes)
        if known is None or known.ndim != 1:
            return None
        places = [x.at(i) for i, x in enumerate(known) if isinstance(x, Rows) and x.rows != WHOLE]
        return places[0] if len(places) == 1 else None


_ONLY_RESHAPED = frozenset({"ExpandDims", "Reshape", "Squeeze"})

_KEEP_SUMS = _ONLY_RESHAPED | {"Add", "AddV2", "DivNoNan", "Identity", "IdentityN", "Mul", "Neg", "RealDiv", "Sub"}
"""Operations that are linear in a partial operand, and whose result costs as much to send."""

_CHEAP = frozenset({
    "AddN", "AddV2", "Cast", "Exp", "ExpandDims", "Fill", "Identity", "Mul", "Neg", "OneHot", "PreventGradient", "Range", "RealDiv",
    "Relu", "Reshape", "Rsqrt", "Sigmoid", "Sqrt", "Square", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Tanh", "Transpose",
})  # fmt: skip
"""Operations that cost less to repeat than to send their result."""
