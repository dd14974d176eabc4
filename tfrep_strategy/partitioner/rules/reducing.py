"""Operations that reduce axes, or run along one.

Some sums are of deviations, or their squares, from a value that the replicas have yet to compute, as in the variance of a batch.
A replica could wait for the value before it sends its sum. Instead it sends sums of its rows at once. From these all replicas
compute the squared deviations from any value: `sum (x - m)^2 = sum x^2 - 2 m sum x + m^2 n`. So the mean and the
variance of a batch cost one round of collectives.

Squares of large values would cancel. So they are relative to the mean of the replica's own rows, `c`, and are combined in
64 bits (T. F. Chan, G. H. Golub, R. J. LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979).

Softmaxes may run along the axis of the rows, as when the rows of a batch are compared with each other. Replicas then send the
largest value and the sum of the exponentials of their own rows, not the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, Rule, always, rule
from tfrep_strategy.partitioner.program import AT_ONCE, Tensor


class _Deviations(NamedTuple):
    """The deviations `x - center`, or zero where a mask is false; or their squares."""

    x: Any
    center: Any
    mask: Any = None
    are_squared: bool = True


def sum_of_deviations(plan: Planner, summed: Any, axes: Sequence[int]) -> Tensor | None:
    """Returns the sum of deviations over axes that include the row axis, replicated and with all axes kept.

    Args:
        plan: The planner.
        summed: The sharded tensor: deviations, or their squares.
        axes: The axes, counted from 0.

    Returns:
        The sum; None if the tensor has no deviations, or if nothing would be gained.
    """
    found = _deviations(summed)
    shard = plan.placement(summed)
    if found is None or not isinstance(shard, Shard) or summed.dtype != tf.float32:
        return None
    x, center, mask, are_squared = found
    dims, of_center = plan.dims(x), plan.dims(center)
    if dims is None or of_center is None or len(of_center) != len(dims) or any(of_center[i] != 1 for i in axes):
        return None  # The center may differ between rows.
    fits = plan.placement(x) == shard and dims == plan.dims(summed) and (mask is None or plan.placement(mask) == shard)
    if not fits or not isinstance(plan.placement(center), Replicate):
        return None
    own, masked = plan.local(x), None if mask is None else plan.local(mask)
    if plan.local(center).level <= max(own.level, 0 if masked is None else masked.level):
        return None
    return _sum(plan, own, masked, plan.local(center), shard, axes, are_squared)


def _sum(
    plan: Planner, x: Tensor, mask: Tensor | None, center: Tensor, shard: Shard, axes: Sequence[int], are_squared: bool
) -> Tensor:
    add, places = plan.program.add, plan.program.constant(list(axes))

    def total(rows: Tensor) -> Tensor:
        return add("Sum", rows, places, keep_dims=True)

    def chosen(rows: Tensor) -> Tensor:
        return rows if mask is None else add("SelectV2", mask, rows, plan.program.constant(0, tf.float32))

    def long(tensor: Tensor) -> Tensor:
        return add("Cast", tensor, DstT=tf.float64)

    def plus(a: Tensor, b: Tensor) -> Tensor:
        return add("AddV2", a, b)

    def times(a: Any, b: Tensor) -> Tensor:
        return add("Mul", a, b)

    def of_replicas(addend: Tensor) -> Tensor:
        addend.shape = center.shape
        sum_ = plan.program.send("sum", addend)
        sum_.shape = center.shape
        return sum_

    if mask is None:
        others = [i for i in axes if i != shard.axis]
        of_row = add("Prod", add("GatherV2", add("Shape", x), others, 0), 0) if others else plan.program.constant(1)
        rows = plan.elements(shard)
        count, of_all = (long(times(each, of_row)) for each in (rows.count, rows.total))
    else:
        count = long(total(add("Cast", mask, DstT=tf.int32)))
        of_all = of_replicas(count)
    at_least_one = add("Maximum", count, plan.program.constant(1, tf.float64))
    mean = add("RealDiv", total(chosen(x)), add("Cast", at_least_one, DstT=tf.float32))
    own = chosen(add("Sub", x, mean))
    c, m, left, squares = long(mean), long(center), long(total(own)), long(total(add("Square", own)))
    c_count = times(c, count)  # The mean is rounded, so each sum has a remainder.
    sums = of_replicas(plus(c_count, left))
    if not are_squared:
        return add("Cast", add("Sub", sums, times(m, of_all)), DstT=tf.float32)
    sums_of_squares = of_replicas(plus(squares, times(c, plus(c_count, plus(left, left)))))
    result = plus(sums_of_squares, times(m, add("Sub", times(m, of_all), plus(sums, sums))))
    return add("Cast", add("Maximum", result, plan.program.constant(0, tf.float64)), DstT=tf.float32)


def _deviations(summed: Any) -> _Deviations | None:
    """Returns the deviations that a tensor of the trace holds; None if it holds none."""
    operation = summed.op
    if operation.type in ("SquaredDifference", "Sub"):  # TensorFlow 2.22 corrects its variances by the mean of the differences.
        x, center = operation.inputs
        return _Deviations(x, center, are_squared=operation.type == "SquaredDifference")
    if operation.type != "Square":
        return None
    mask, difference = None, operation.inputs[0].op
    if difference.type == "SelectV2" and tf.get_static_value(difference.inputs[2]) == 0:
        mask, difference = difference.inputs[0], difference.inputs[1].op
    if difference.type != "Sub":
        return None
    x, center = difference.inputs
    return _Deviations(x, center, mask)


class _Normalized(NamedTuple):
    """Values along the last axis minus the largest one, their exponentials, and the sum of these, with the axis kept."""

    values: Tensor
    exponentials: Tensor
    total: Tensor


def _normalized(plan: Planner, x: Any, shard: Shard) -> _Normalized:
    add, send, own, last = plan.program.add, plan.program.send, plan.local(x), plan.program.constant([shard.axis])
    largest = add("Max", own, last, keep_dims=True)  # Without values it is the smallest number.
    largest.shape = tf.TensorShape([*x.shape[:-1], 1])
    values = add("Sub", own, add("Max", send("gather", largest, shard.axis), last, keep_dims=True))
    exponentials = add("Exp", values)
    return _Normalized(values, exponentials, send("sum", add("Sum", exponentials, last, keep_dims=True)))


def _softmax(plan: Planner, operation: Any, shard: Shard) -> None:
    _, exponentials, total = _normalized(plan, operation.inputs[0], shard)
    plan.put(operation.outputs[0], shard, plan.program.add("RealDiv", exponentials, total))


def _log_softmax(plan: Planner, operation: Any, shard: Shard) -> None:
    values, _, total = _normalized(plan, operation.inputs[0], shard)
    plan.put(operation.outputs[0], shard, plan.program.add("Sub", values, plan.program.add("Log", total)))


def _sparse_cross_entropy(plan: Planner, operation: Any, shard: Shard) -> None:
    """The classes are rows: each replica has some classes, and finds the labels among them."""
    logits, labels = operation.inputs
    add, one, zero, nan = plan.program.add, *(plan.program.constant(x, logits.dtype) for x in (1.0, 0.0, float("nan")))
    rows = plan.elements(shard)
    first, count, classes = (plan.as_dtype(size, labels.dtype) for size in (rows.start, rows.count, rows.total))
    whole = plan.replicated(labels)
    own = add("OneHot", add("Sub", whole, first), plan.as_dtype(count, tf.int32), one, zero, axis=-1)
    # The loss of a label that is not a class is NaN, as on GPUs.
    is_class = add("LogicalAnd", add("GreaterEqual", whole, plan.program.constant(0, labels.dtype)), add("Less", whole, classes))
    _put_losses(plan, operation, shard, own, add("ExpandDims", add("SelectV2", is_class, zero, nan), -1))


def _cross_entropy(plan: Planner, operation: Any, shard: Shard) -> None:
    """The classes are rows, and their probabilities are sharded alike."""
    _put_losses(plan, operation, shard, plan.sharded(operation.inputs[1], shard), None)


def _put_losses(plan: Planner, operation: Any, shard: Shard, labels: Tensor, unknown: Tensor | None) -> None:
    add, last = plan.program.add, plan.program.constant([shard.axis])
    values, exponentials, total = _normalized(plan, operation.inputs[0], shard)
    own = add("Sum", add("Mul", labels, add("Sub", add("Log", total), values)), last, keep_dims=False)
    losses = plan.program.send("sum", own)
    gradient = add("Sub", add("RealDiv", exponentials, total), labels)
    if unknown is not None:
        losses, gradient = add("AddV2", losses, add("Squeeze", unknown, squeeze_dims=[-1])), add("AddV2", gradient, unknown)
    plan.put(operation.outputs[0], REPLICATE, losses)
    plan.put(operation.outputs[1], shard, gradient)


ACROSS_REPLICAS: dict[str, Callable[[Planner, Any, Shard], None]] = {
    "LogSoftmax": _log_softmax,
    "Softmax": _softmax,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
}
"""The planning functions of operations whose last axis is the row axis."""


_OTHERS = {"Max": "Max", "Min": "Min", "Prod": "Prod", "All": "All", "Any": "Any", "EuclideanNorm": None}


def reduced_axes(plan: Planner, operation: Any) -> list[int] | None:
    """Returns the axes that an operation reduces, counted from 0; None if they are unknown."""
    axes, rank = plan.numbers(operation.inputs[1]), plan.rank(operation.inputs[0])
    return None if axes is None or rank is None else [axis % rank for axis in axes]


def _kept(shard: Shard, axes: list[int], keeps: bool) -> Shard:
    return shard if keeps else shard.on(shard.axis - sum(axis < shard.axis for axis in axes))


def _note_dims(plan: Planner, operation: Any) -> None:
    """Records sizes of a result that the trace does not know."""
    axes, dims = reduced_axes(plan, operation), plan.dims(operation.inputs[0])
    if axes is None or dims is None:
        return
    if operation.get_attr("keep_dims"):
        left = [1 if axis in axes else d for axis, d in enumerate(dims)]
    else:
        left = [d for axis, d in enumerate(dims) if axis not in axes]
    plan.known_dims[operation.outputs[0].name] = left


def noting_dims(function: Rule) -> Rule:
    """Makes a rule of a reduction record the sizes of its result, even if nothing is sharded."""

    @always
    @functools.wraps(function)
    def noting(plan: Planner, operation: Any) -> None:
        function(plan, operation)
        _note_dims(plan, operation)

    return noting


@rule("Sum")
@noting_dims
def sum_(plan: Planner, operation: Any) -> None:
    """Sums over rows as the sum of the replicas' sums."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if axes == []:
        plan.put_same(operation, x)
    elif isinstance(placement, Partial) and axes is not None:
        plan.emit(operation, [plan.local(x), plan.replicated(operation.inputs[1])], PARTIAL)
    elif not isinstance(placement, Shard) or axes is None:
        _replicate(plan, operation)
    elif placement.axis in axes and (found := sum_of_deviations(plan, x, axes)) is not None:
        _put_reduced(plan, operation, found)
    else:
        inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
        plan.emit(operation, inputs, PARTIAL if placement.axis in axes else _kept(placement, axes, keeps))


def _replicate(plan: Planner, operation: Any) -> None:
    """Reduces a replicated tensor. A large one is summed in steps, so that the number of threads does not matter."""
    x, (result,) = operation.inputs[0], operation.outputs
    size = x.shape.num_elements() or 0
    if size <= AT_ONCE or result.shape.num_elements() != 1 or not (x.dtype.is_floating or x.dtype.is_complex):
        plan.replicate(operation)
        return
    total, add = plan.replicated(x), plan.program.add
    if operation.type == "L2Loss":
        total = add("Square", total)
    left = size
    while left > AT_ONCE and (each := max(k for k in range(1, 1025) if left % k == 0)) > 1:
        total, left = add("Sum", add("Reshape", total, [-1, each]), 1), left // each
    total = add("Sum", total, list(range(1 if left < size else x.shape.rank)))
    total.varies = total.varies or left > AT_ONCE
    if operation.type != "Sum":
        by = plan.program.constant(2 if operation.type == "L2Loss" else size, x.dtype)
        total = add("RealDiv", total, by)
    if result.shape.rank:
        total = add("Reshape", total, result.shape.as_list())
    plan.put(result, REPLICATE, total)


def _put_reduced(plan: Planner, operation: Any, total: Tensor) -> None:
    """Sets the value of a reduction, given its result with the reduced axes."""
    if not operation.get_attr("keep_dims"):
        total = plan.program.add("Squeeze", total, squeeze_dims=reduced_axes(plan, operation))
    plan.put(operation.outputs[0], REPLICATE, total)


@rule("Mean")
@noting_dims
def mean(plan: Planner, operation: Any) -> None:
    """Averages over rows as the sum of the replicas' sums, each divided by the number of all elements."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if not isinstance(placement, (Shard, Partial)) or axes is None:
        _replicate(plan, operation)
        return
    inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
    if isinstance(placement, Partial) or placement.axis not in axes:
        plan.emit(operation, inputs, PARTIAL if isinstance(placement, Partial) else _kept(placement, axes, keeps))
        return
    if not x.dtype.is_floating and not x.dtype.is_complex:
        plan.replicate(operation)
        return
    add = plan.program.add
    dtype = tf.float32 if x.dtype.size == 2 else x.dtype  # A sum of 16-bit floats could overflow where their mean does not.
    rows = inputs[0] if dtype == x.dtype else add("Cast", inputs[0], DstT=dtype)
    total = add("Sum", rows, inputs[1], keep_dims=keeps)
    count = add("Cast", plan.elements(placement).total, DstT=dtype)
    others = [axis for axis in axes if axis != placement.axis]
    if others:
        sizes = add("GatherV2", add("Shape", inputs[0]), others, 0)
        count = add("Mul", count, add("Cast", add("Prod", sizes, 0), DstT=dtype))
    if (found := sum_of_deviations(plan, x, axes)) is not None:
        _put_reduced(plan, operation, add("RealDiv", found, count))
        return
    addend = add("RealDiv", total, count)
    plan.put(operation.outputs[0], PARTIAL, addend if dtype == x.dtype else add("Cast", addend, DstT=x.dtype))


@rule(*_OTHERS)
@noting_dims
def reduced_twice(plan: Planner, operation: Any) -> None:
    """Reduces over rows twice, as for the maximum of the replicas' maxima."""
    x = operation.inputs[0]
    placement, axes, keeps = plan.placement(x), reduced_axes(plan, operation), operation.get_attr("keep_dims")
    if not isinstance(placement, Shard) or axes is None:
        plan.replicate(operation)
        return
    inputs = [plan.local(x), plan.replicated(operation.inputs[1])]
    if placement.axis not in axes:
        plan.emit(operation, inputs, _kept(placement, axes, keeps))
        return
    if _OTHERS[operation.type] is None:
        plan.replicate(operation)
        return
    add = plan.program.add
    own = add(operation.type, *inputs, keep_dims=True)
    own.shape = tf.TensorShape([None] * (plan.rank(x) or 1))
    of_all = plan.program.send("gather", own, placement.axis)
    plan.put(operation.outputs[0], REPLICATE, add(operation.type, of_all, inputs[1], keep_dims=keeps))


@rule("L2Loss")
@always
def l2_loss(plan: Planner, operation: Any) -> None:
    """Plans half the sum of squares."""
    if isinstance(plan.placement(operation.inputs[0]), Shard):
        plan.emit(operation, plan.locals(operation), PARTIAL)
    else:
        _replicate(plan, operation)


@rule("ArgMax", "ArgMin")
def arg_max(plan: Planner, operation: Any) -> None:
    """Keeps rows sharded if the reduced axis is another one."""
    x = operation.inputs[0]
    placement, axis, rank = plan.placement(x), plan.number(operation.inputs[1]), plan.rank(x)
    if not isinstance(placement, Shard) or axis is None or rank is None or axis % rank == placement.axis:
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.local(x), plan.replicated(operation.inputs[1])], _kept(placement, [axis % rank], False))


_TOTALS = {"Cumsum": ("Sum", "AddV2"), "Cumprod": ("Prod", "Mul")}
"""For each cumulative operation: the operation that reduces all rows, and the one that combines two results."""


def _cumulate_rows(plan: Planner, operation: Any, shard: Shard, rank: int) -> None:
    """Continues on each replica from the total of the rows before its own."""
    (x, axis), (result,) = operation.inputs, operation.outputs
    (total, joined), add, replica = _TOTALS[operation.type], plan.program.add, plan.rows.replica
    inputs = [plan.local(x), plan.replicated(axis)]
    of_own = add(total, *inputs, keep_dims=True)
    of_own.shape = tf.TensorShape([None] * rank)
    of_all = plan.program.send("gather", of_own, shard.axis)
    if operation.get_attr("reverse"):
        first, count = add("AddV2", replica, 1), plan.program.constant(-1)
    else:
        first, count = plan.program.constant(0), replica
    bounds = plan.vector(rank, shard.axis, 0, first), plan.vector(rank, shard.axis, -1, count)
    of_others = add(total, add("Slice", of_all, *bounds), inputs[1], keep_dims=True)
    plan.put(result, shard, add(joined, plan.program.copy_of(operation, inputs).outputs[0], of_others))


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative(plan: Planner, operation: Any) -> None:
    """Plans a cumulative operation along any axis. The cumulative sum of a partial tensor is partial."""
    x = operation.inputs[0]
    placement, axis, rank = plan.placement(x), plan.number(operation.inputs[1]), plan.rank(x)
    inputs = operation.inputs
    if isinstance(placement, Partial) and operation.type == "Cumsum":
        plan.emit(operation, [plan.local(x), plan.replicated(inputs[1])], PARTIAL)
    elif isinstance(placement, Shard) and axis is not None and rank is not None and axis % rank != placement.axis:
        plan.emit(operation, [plan.local(x), plan.replicated(inputs[1])], placement)
    elif isinstance(placement, Shard) and axis is not None and rank is not None and operation.type in _TOTALS:
        _cumulate_rows(plan, operation, placement, rank)
    else:
        plan.replicate(operation)


@rule(
    "Softmax",
    "LogSoftmax",
    "TopKV2",
    "InTopKV2",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SoftmaxCrossEntropyWithLogits",
)
def along_last_axis(plan: Planner, operation: Any) -> None:
    """Keeps rows sharded if the operation runs along another, the last, axis."""
    x = operation.inputs[0]
    rank = plan.rank(x)
    shards = {p for p in map(plan.placement, operation.inputs) if isinstance(p, Shard)}
    placement = plan.placement(x)
    known = operation.type in ACROSS_REPLICAS and x.dtype.size > 2  # Sums of 16-bit floats would be rounded differently.
    if known and isinstance(placement, Shard) and rank is not None and placement.axis == rank - 1:
        ACROSS_REPLICAS[operation.type](plan, operation, placement)
        return
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None or rank is None or shard.axis == rank - 1:
        plan.replicate(operation)
        return
    size = next(t.shape[shard.axis] for t in operation.inputs if plan.placement(t) == shard)
    inputs = []
    for tensor in operation.inputs:
        if not tensor.shape.rank:  # The number of results.
            inputs.append(plan.replicated(tensor))
        elif plan.placement(tensor) == shard or plan.have_rows(tensor, shard, size):
            inputs.append(plan.sharded(tensor, shard))
        else:
            plan.replicate(operation)
            return
    plan.emit(operation, inputs, shard)
    dims = plan.dims(x)
    if dims is not None:
        for result in operation.outputs:  # The losses lack the last axis.
            known = result.shape.as_list() if result.shape.rank is not None else dims
            plan.known_dims[result.name] = [d if d is not None else dims[i] for i, d in enumerate(known)]


@rule("BiasAddGrad")
def bias_add_gradient(plan: Planner, operation: Any) -> None:
    """Sums over all axes except the channel axis."""
    (x,) = operation.inputs
    placement, rank = plan.placement(x), plan.rank(x)
    channels = 1 if operation.get_attr("data_format") == b"NCHW" else -1
    is_summed = isinstance(placement, Shard) and rank is not None and placement.axis != channels % rank
    if isinstance(placement, Partial) or is_summed:
        plan.emit(operation, [plan.local(x)], PARTIAL)
    elif isinstance(placement, Shard) and rank is not None:
        plan.emit(operation, [plan.local(x)], placement.on(0))
    else:
        plan.replicate(operation)
