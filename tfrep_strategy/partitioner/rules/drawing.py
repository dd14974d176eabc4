"""Random numbers: each replica has one device's numbers for its rows.

For counter-based generators, a replica starts at the counter of its first row, and draws only its own numbers. Philox (Salmon et
al., SC 2011) makes several numbers for each counter value, and TensorFlow returns them in order.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner.placements import Rows, Shard, is_number
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import SAME_BITS, Tensor

DRAWS = {
    "StatelessRandomUniformV2": 0, "StatelessRandomNormalV2": 0, "StatelessTruncatedNormalV2": 0, "StatelessRandomUniformIntV2": 0,
    "StatelessRandomUniformFullIntV2": 0, "StatelessRandomUniform": 0, "StatelessRandomNormal": 0, "StatelessTruncatedNormal": 0,
    "RandomUniform": 0, "RandomStandardNormal": 0, "TruncatedNormal": 0, "RandomUniformInt": 0,
    "StatelessRandomGammaV3": 0, "StatefulUniform": 2, "StatefulStandardNormalV2": 2,
}  # fmt: skip
"""The index of the input with the shape, for operations that draw numbers."""

SAME_BITS.update(DRAWS)

_COUNTED = frozenset({
    "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2",
})  # fmt: skip
"""Operations that use a fixed number of counter values for each number."""

_BY_PHILOX = (1, 3)
"""Values of `tf.random.Algorithm`: Philox, and the default of the device, which is Philox on CPUs and GPUs without XLA."""


@rule(*DRAWS)
@always
def draw(plan: Planner, operation: Any) -> None:
    """Gives every replica one device's numbers for its rows."""
    plan.replicate(operation)
    (result,) = operation.outputs
    wanted = operation.inputs[DRAWS[operation.type]]
    sizes, place = plan.sizes_of(wanted), plan.row_place(wanted)
    if sizes is None:
        return
    known = [None] * sizes.size if result.shape.rank is None else result.shape.as_list()
    plan.known_dims[result.name] = [s if d is None else d for d, s in zip(known, sizes, strict=True)]
    if place is None and _has_all_rows(plan, result):
        assert plan.traced_rows is not None
        place = Shard(0, sizes[0] // plan.traced_rows)
    if place is None and sizes.size and sizes[0] in plan.beside:
        place = Shard(0, 1, plan.beside[sizes[0]])
    if place is not None and not any(isinstance(x, Rows) for i, x in enumerate(sizes) if i != place.axis):
        whole, shard = plan.replicated(result), place
        rest = [size for i, size in enumerate(sizes) if i != shard.axis]
        if shard.axis == 0 and all(map(is_number, rest)) and _counts(plan, operation):
            own = _own_numbers(plan, operation, shard, math.prod(rest))
        else:
            own = plan.cut(whole, shard, sizes.size)
        plan.put(result, shard, own)
        plan.whole[result.name] = whole


def drawn_rows(graph: Any) -> int | None:
    """Returns the leading size of most of the numbers that a step draws; None if no size is known."""
    drawn: collections.Counter[int] = collections.Counter()
    for operation in graph.get_operations():
        shape = operation.outputs[0].shape if operation.type in DRAWS else tf.TensorShape(None)
        if shape.rank and shape.is_fully_defined() and shape[0] > 1:
            drawn[shape[0]] += shape.num_elements()
    return max(drawn, key=lambda size: drawn[size]) if drawn else None


def _has_all_rows(plan: Planner, result: Any) -> bool:
    """Returns whether the leading size of random numbers is the number of rows of the batch, or a multiple."""
    size = result.shape[0] if result.shape.rank else None
    return bool(plan.traced_rows and size and size % plan.traced_rows == 0)


def _counts(plan: Planner, operation: Any) -> bool:
    is_compiled = operation.node_def.attr["_XlaCompile"].b  # XLA draws in another order.
    return operation.type in _COUNTED and not is_compiled and plan.number(operation.inputs[3]) in _BY_PHILOX


def _own_numbers(plan: Planner, operation: Any, shard: Shard, per_element: int) -> Tensor:
    """Draws the numbers of the own rows, from the counter value of the first of them."""
    add, constant = plan.program.add, plan.program.constant
    shape, key, counter, *others = operation.inputs
    (result,) = operation.outputs
    at_once = 4 if result.dtype.size <= 4 else 2
    each, rows = constant(per_element, tf.int64), plan.elements(shard)
    start, count = (add("Mul", plan.as_dtype(x, tf.int64), each) for x in (rows.start, rows.count))
    turns = add("FloorDiv", start, constant(at_once, tf.int64))
    before = add("Sub", start, add("Mul", turns, constant(at_once, tf.int64)))
    from_there = _counted_on(plan, plan.replicated(counter), turns)
    length = add("Pack", [add("AddV2", before, count)], axis=0)
    inputs = [length, plan.replicated(key), from_there, *map(plan.replicated, others)]
    flat = plan.program.copy_of(operation, inputs, Tshape=tf.int64).outputs[0]
    own = add("Slice", flat, add("Pack", [before], axis=0), add("Pack", [count], axis=0))
    return add("Reshape", own, plan.own_sizes(shape, shard))


def _counted_on(plan: Planner, counter: Tensor, turns: Tensor) -> Tensor:
    """Returns a counter of 128 bits, two uint64, advanced by a number of values."""
    add, constant = plan.program.add, plan.program.constant
    low, high = add("Unpack", add("Bitcast", counter, type=tf.int64), num=2, axis=0)
    total, sign = add("AddV2", low, turns), constant(-(2**63), tf.int64)
    # Flipping the sign bit maps the order of unsigned numbers to that of signed ones.
    carries = add("Less", add("BitwiseXor", total, sign), add("BitwiseXor", low, sign))
    further = add("Pack", [total, add("AddV2", high, add("Cast", carries, DstT=tf.int64))], axis=0)
    return add("Bitcast", further, type=tf.uint64)
