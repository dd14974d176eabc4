"""An upper bound of the memory that a replica needs for the tensors of a step, from the plan of its trace.

A tensor has a buffer from the operation that makes it to the last one that reads it. Nothing is fused, and no operation writes into
the buffer of an input. The operations run one after the other, as in the trace, or each as soon as its inputs are there, or XLA
compiles them, and gives variables new buffers at the end: what needs more memory counts.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import OF_LAYOUT, WHOLE, Items, Offset, Partial, Parts, Rows, Shard, is_number
from tfrep_strategy.partitioner.planner import Planner, in_order
from tfrep_strategy.partitioner.program import SAME_BITS
from tfrep_strategy.partitioner.rules.row_loops import origin

_IN_PLACE = frozenset({
    "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient", "TensorListPopBack",
    "TensorListPushBack", "TensorListResize", "TensorListSetItem",
})  # fmt: skip
"""Operations whose first output has the buffer of their first input."""

_PADS = ("Pad", "PadV2")
_SHAPE_AGAIN = ("Identity", "Reshape", *_PADS)
"""Operations that bring a gradient into the shape in which replicas get their parts of it."""

_WRITE = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"})
_FEW = 1024
"""Tensors of so few bytes are not told of."""


class Footprint(NamedTuple):
    """The memory that the tensors of a step need on a replica, in bytes.

    Attributes:
        gradients: What optimizers are given.
        others: The most that all other tensors need at a time: an upper bound.
        guessed: How many tensors have a size that only the data tell. They count as the largest tensor that they are made of.
    """

    gradients: int
    others: int
    guessed: int


class _Buffer:
    """The memory of a tensor.

    Args:
        size: In bytes.
        whole: The buffer of the whole tensor, where replicas have parts of it, and one asks for the whole.

    Attributes:
        begin: The operation that makes it, by its place in each order.
        end: The last one that reads it, by its place in each order.
        length: Of a list: how many elements it gets; None if that is not known.
        is_constant: Whether it is computed from constants alone. TensorFlow may then keep it from step to step.
    """

    def __init__(self, size: int = 0, whole: _Buffer | None = None) -> None:
        self.size, self.whole = size, whole
        self.begin = self.end = (0, 0)
        self.length: int | None = None
        self.is_constant = False

    def read(self, now: tuple[int, int]) -> None:
        """Notes that an operation reads it."""
        self.end = max(self.end[0], now[0]), max(self.end[1], now[1])
        if self.whole is not None:
            self.whole.read(now)


def footprint(plan: Planner, graph: Any, batch: int, replicas: int, bucket_bytes: int = 0) -> Footprint:
    """Finds what the tensors of a step need on the replica with the most rows.

    Args:
        plan: That of the step.
        graph: The traced step.
        batch: How many rows the global batch has.
        replicas: How many replicas share them.
        bucket_bytes: The size of the buckets in which gradients of sharded weights travel.

    Returns:
        The bytes.
    """
    walk = _Walk(batch, replicas)
    inputs = {x.name: walk.new(plan, x) for x in graph.inputs}
    walk.visit(plan, graph, dict(inputs))
    gradients, given = (sum(each.size for each in some) for some in (walk.gradients.values(), inputs.values()))
    updates = walk.written + given + (gradients if replicas > 1 else 0)  # The sums of gradients are there, too.
    return Footprint(gradients, max(walk.peak(), updates) + walk.beside(bucket_bytes), walk.guessed)


class _Walk:
    """Visits the operations of a graph, and of the functions that it calls.

    Args:
        batch: How many rows the global batch has.
        replicas: How many replicas share them.

    Attributes:
        buffers: Those of all tensors.
        gradients: Those that optimizers are given, by their ids.
        written: How many bytes of variables are written.
        guessed: How many tensors of more than a few bytes have a size that is not known.
        gathered: How many bytes each value takes that is gathered from parts: what replicas send, and the tensor without padding.
        unreduced: How many bytes each gradient takes of which a replica gets its part of the sum.
    """

    def __init__(self, batch: int, replicas: int) -> None:
        self._batch, self._replicas = batch, replicas
        self.buffers: list[_Buffer] = []
        self.gathered: list[int] = []
        self.unreduced: list[int] = []
        self._cut: dict[str, int] = {}
        """By the name of a gradient of which a replica gets its part of the sum: the bytes of the part."""
        self._on_the_way: set[str] = set()
        """The names of operations between such a gradient and the part."""
        self.gradients: dict[int, _Buffer] = {}
        self.written = self.guessed = self._count = 0
        self._made: dict[str, int] = {}
        """By the name of a loop: how many rounds it makes."""

    def new(self, plan: Planner | None, tensor: Any, now: tuple[int, int] = (0, 0), at_least: int = 0) -> _Buffer:
        """Makes a buffer for a tensor that an operation makes.

        Args:
            plan: The plan of its graph, if there is one.
            tensor: The tensor.
            now: The operation, by its place in each order.
            at_least: How many elements it is taken to have if that is not known.

        Returns:
            The buffer.
        """
        has_none = tensor.dtype in (tf.resource, tf.variant)
        buffer = _Buffer(0 if has_none else self._size(plan, tensor, at_least))
        if not has_none and plan is not None and tensor.name in plan.whole and self._replicas > 1:
            buffer.whole = _Buffer(self._bytes(plan, plan.dims(tensor), tensor.dtype, at_least=at_least))
        for each in filter(None, (buffer, buffer.whole)):
            each.begin = each.end = now
            self.buffers.append(each)
        return buffer

    def visit(self, plan: Planner | None, graph: Any, names: dict[str, _Buffer], begin: int = 0) -> None:
        """Visits a graph.

        Args:
            plan: Its plan; None if it has none.
            graph: The graph.
            names: By the name of an input: its buffer. Those of all other tensors are added.
            begin: How many operations have to run before, one after the other.
        """
        given_to_optimizers = {x.name for x in graph.get_collection(marks.APPLIED)}
        if plan is not None and any(isinstance(plan.placement(x), Parts) for x in graph.inputs):
            self._note_cut(plan, graph, given_to_optimizers)
        depths: dict[str, int] = {}
        for operation in in_order(graph):
            if operation.outputs and operation.outputs[0].name in names:
                continue  # An input.
            own = [names[x.name] for x in operation.inputs]
            waits = [depths.get(x.name, 0) for x in operation.control_inputs]
            depth = max([begin, *waits, *(each.begin[1] for each in own)])
            if plan is not None and operation.name in plan.called:
                inner_graph, inner = plan.called[operation.name]
                inside = {x.name: each for x, each in zip(inner_graph.inputs, own, strict=True)}
                self.visit(inner, inner_graph, inside, depth)
                results = [inside[x.name] for x in inner_graph.outputs]
                names.update((x.name, each) for x, each in zip(operation.outputs, results, strict=False))
                depths[operation.name] = max([depth, *(each.begin[1] for each in results)])
            else:
                self._count += 1
                depths[operation.name] = depth + 1
                self._add(plan, operation, own, names, (self._count, depth + 1))
            for x in (x for x in operation.outputs if x.name in given_to_optimizers):
                found = _Buffer(self._cut[x.name]) if x.name in self._cut else names[x.name]
                self.gradients[id(found)] = found
        last = self._count + 1, max(depths.values(), default=0) + 1
        for x in [*graph.inputs, *graph.outputs]:
            names[x.name].read(last)

    def _add(
        self, plan: Planner | None, operation: Any, own: Sequence[_Buffer], names: dict[str, _Buffer], now: tuple[int, int]
    ) -> None:
        """Adds an operation that calls no function, as the one of these numbers."""
        type_, mark = operation.type, marks.mark_of(operation)
        is_on_the_way = operation.name in self._on_the_way
        for each in own if not is_on_the_way else ():  # A gradient is sent as soon as it is there.
            each.read(now)
        if plan is not None:
            self._note_gathered(plan, operation)
        if bodies := plan.bodies.get(operation.name, ()) if plan is not None else ():
            beside = _Buffer(self._need_of_bodies(plan, operation, own, bodies))
            beside.begin = beside.end = now
            self.buffers.append(beside)
        if type_ in _WRITE:
            self.written += self._size(plan, operation.inputs[1])
        largest = max((each.size // max(x.dtype.size, 1) for each, x in zip(own, operation.inputs, strict=True)), default=0)
        is_constant = type_ == "Const" or (bool(own) and type_ in SAME_BITS and all(each.is_constant for each in own))
        for place, tensor in enumerate(operation.outputs):
            is_gathered = mark == marks.SLICES and plan is not None and isinstance(plan.placement(operation.inputs[0]), Shard)
            if is_gathered and plan is not None and own[0].whole is None:
                found = _Buffer(self._bytes(plan, plan.dims(operation.inputs[0]), tensor.dtype))
                travelling = _Buffer(
                    found.size + own[0].size
                )  # The rows that a replica sends, and those of all, not yet one tensor.
                for each in (found, travelling):
                    each.begin = each.end = now
                    self.buffers.append(each)
                if self.gradients.pop(id(own[0]), None) is not None:  # The optimizer is given those of all replicas.
                    self.gradients[id(found)] = found
            elif mark in (marks.GRADIENT, marks.SLICES):
                found = own[0].whole or own[0]
            elif type_ == "IdentityN" and mark is None:
                found = own[place]
            elif type_ in _IN_PLACE and mark is None and not place:
                found = own[0]
            elif type_.endswith("While") and tensor.dtype == tf.variant:
                found = own[place]
            elif type_ == "ReadVariableOp" or (is_on_the_way and type_ in _PADS):
                found = _Buffer()  # It is that of the variable, or of a bucket.
            else:
                found = self.new(plan, tensor, now, largest)
                found.is_constant = is_constant and tensor.dtype != tf.variant
            names[tensor.name] = found
            if tensor.dtype == tf.variant and plan is not None:
                self._fill(plan, operation, tensor, found)

    def peak(self) -> int:
        """Returns the most that buffers need at a time, without those of gradients."""
        most = 0
        for order in (0, 1):
            changes: collections.Counter[int] = collections.Counter()
            for each in self.buffers:
                if not each.is_constant and id(each) not in self.gradients:
                    changes[each.begin[order]] += each.size
                    changes[each.end[order] + 1] -= each.size
            most = max(most, *itertools.accumulate(changes[place] for place in sorted(changes)), 0)
        return most + sum(each.size for each in self.buffers if each.is_constant)

    def beside(self, bucket_bytes: int) -> int:
        """Finds what values of sharded weights need: the two largest that are gathered, and gradients in buckets.

        Args:
            bucket_bytes: The size of a bucket.

        Returns:
            The bytes.
        """
        largest = max(self.unreduced, default=0)
        in_bucket = min(sum(self.unreduced), bucket_bytes + largest)
        return sum(sorted(self.gathered)[-2:]) + 2 * in_bucket  # The gradients, and what is sent of them.

    def _note_cut(self, plan: Planner, graph: Any, given_to_optimizers: Collection[str]) -> None:
        """Notes gradients of which a replica gets its part of the sum."""
        for operation in graph.get_operations():
            if marks.mark_of(operation) != marks.OWN_ROW or not isinstance(plan.placement(operation.inputs[0]), Partial):
                continue
            self._on_the_way.add(operation.name)
            source = operation.inputs[0]
            while source.name not in given_to_optimizers and source.op.type in _SHAPE_AGAIN:
                self._on_the_way.add(source.op.name)
                source = source.op.inputs[0]
            self.unreduced.append(self._size(plan, operation.inputs[0]))
            if source.name in given_to_optimizers:
                self._cut[source.name] = self._size(plan, operation.outputs[0])

    def _note_gathered(self, plan: Planner, operation: Any) -> None:
        """Notes the values in parts that an operation needs whole."""
        if marks.mark_of(operation) is not None or operation.type in _WRITE or operation.type == "ReadVariableOp":
            return
        if any(isinstance(plan.placement(x), Parts) for x in operation.outputs):
            return
        for x in operation.inputs:
            placement = plan.placement(x)
            if isinstance(placement, Parts) and x.dtype != tf.resource:
                copies = 1 if placement.replicas * placement.width == placement.elements else 2
                self.gathered.append(copies * placement.replicas * placement.width * int(x.dtype.size))

    # Sizes.

    def _size(self, plan: Planner | None, tensor: Any, at_least: int = 0) -> int:
        """Returns how many bytes a replica has of a tensor."""
        if plan is None:
            dims = None if tensor.shape.rank is None else tensor.shape.as_list()
            return self._bytes(plan, dims, tensor.dtype, at_least=at_least)
        placed = plan.values[tensor.name].placement if tensor.name in plan.values else None
        if isinstance(placed, Parts):
            return placed.width * int(tensor.dtype.size)
        return self._bytes(plan, plan.dims(tensor), tensor.dtype, placed if isinstance(placed, Shard) else None, at_least)

    def _bytes(self, plan: Planner | None, dims: Any, dtype: tf.DType, shard: Shard | None = None, at_least: int = 0) -> int:
        """Returns how many bytes a replica has of a tensor. A first axis of unknown size is that of the batch at least."""
        sizes: list[Any] = [None] if dims is None else [self._number(plan, size) for size in dims]
        if shard is not None and dims is not None:
            total = self._number(plan, Rows(1, shard.rows))
            sizes[shard.axis] = None if total is None else shard.per_row * -(-total // self._replicas)
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            return math.prod(known) * int(dtype.size)
        of_batch = self._batch * math.prod(known) if len(sizes) > 1 and len(known) == len(sizes) - 1 and sizes[0] is None else 0
        guess = max(at_least, of_batch) * int(dtype.size)
        self.guessed += guess > _FEW
        return guess

    def _number(self, plan: Planner | None, size: Any) -> Any:
        if isinstance(size, Offset):
            return size.per_row * self._batch + size.more
        if not isinstance(size, Rows):
            return int(size) if is_number(size) else None
        if size.rows == OF_LAYOUT:
            return size.per_row * self._replicas
        beside = {} if plan is None else {rows: total for total, rows in plan.beside.items()} | {WHOLE: self._batch}
        total = beside.get(size.rows) if size.rows else self._batch
        return None if total is None else size.per_row * total

    def _fill(self, plan: Planner, operation: Any, tensor: Any, buffer: _Buffer) -> None:
        """Gives the buffer of a list the size of all elements that it gets."""
        if operation.type == "TensorListFromTensor":
            dims = plan.dims(operation.inputs[0])
            buffer.length = self._number(plan, dims[0]) if dims else None
        elif operation.type in ("EmptyTensorList", "TensorListReserve"):
            number = plan.number(operation.inputs[1])
            buffer.length = None if number is None or number < 0 else number
        value = plan.values[tensor.name]
        if value.elements is None or (buffer.length is None and not operation.type.endswith("While")):
            return
        shard = value.placement if isinstance(value.placement, Shard) else None
        each = self._bytes(plan, value.elements.dims, value.elements.dtype, shard)
        if buffer.length is None:
            self.guessed += 1
            return
        length = -(-buffer.length // self._replicas) if isinstance(value.placement, Items) else buffer.length
        buffer.size = max(buffer.size, each * length)

    # Loops and branches.

    def _need_of_bodies(self, plan: Any, operation: Any, own: Sequence[_Buffer], bodies: Sequence[Any]) -> int:
        """Returns what the rounds of a loop that may run at a time need beside what it carries, or the largest branch."""
        needs = []
        for graph, inner in bodies:
            walk = _Walk(self._batch, self._replicas)
            walk.visit(inner, graph, {x.name: _Buffer() for x in graph.inputs})
            needs.append(walk.peak())
            self.gradients |= walk.gradients
            self.written, self.guessed = self.written + walk.written, self.guessed + walk.guessed
        if not operation.type.endswith("While"):
            return max(needs)
        rounds = self._rounds(plan, operation, bodies[0][0])
        if rounds is not None:
            self._made[operation.name] = rounds
        for each in own:
            if each.length is None:
                each.length = rounds
        at_once = int(operation.get_attr("parallel_iterations"))
        return max(needs) * (at_once if rounds is None else min(at_once, rounds))

    def _rounds(self, plan: Planner, operation: Any, test: Any) -> int | None:
        """Returns how many rounds a loop makes that counts them up to a number; None if it does something else."""
        places, stack = {x.name: i for i, x in enumerate(test.inputs)}, [origin(test.outputs[0])]
        found: list[int] = []
        while stack:
            condition = stack.pop().op
            if condition.type == "LogicalAnd":
                stack += map(origin, condition.inputs)
            elif condition.type == "Less":
                limit = origin(condition.inputs[1])
                known = tf.get_static_value(limit)
                if known is None and limit.name in places:
                    given = origin(operation.inputs[places[limit.name]])
                    sizes = plan.sizes_of(given)  # The loop of a gradient makes as many rounds as another one.
                    known = self._made.get(given.op.name) if sizes is None else self._number(plan, sizes.ravel()[0])
                if known is not None:
                    found.append(int(known))
        return min(found, default=None)
