"""Loops, branches and lists of tensors, in parts and whole, with the gradients that go through them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences

from tfrep_strategy.core.tf import trace
from tfrep_strategy.partitioner import planner
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Items, Shard
from tfrep_strategy.partitioner.rules import control_flow, lists, row_loops

pytestmark = pytest.mark.lane("quick")

_ROWS = Shard(0)
_SPLITS = [(3, 2), (4, 0, 1), (0, 0, 1)]
"""How many rows each replica has: unequal numbers, none, and one row in all."""


def _carries_rows(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]


def _adds_losses(x: Any, w: Any) -> Any:
    def body(i: Any, loss: Any) -> Any:
        return i + 1, loss + tf.cast(i, x.dtype) * tf.reduce_mean(tf.square(tf.tanh(x * w[0]) - tf.cast(i, x.dtype)))

    return tf.while_loop(lambda i, loss: i < 3, body, (0, tf.constant(0.0, x.dtype)))[1]


def _adds_rows(x: Any, w: Any) -> Any:
    """A sum is carried through the loop, and squared behind it."""
    total = tf.while_loop(
        lambda i, s: i < 3,
        lambda i, s: (i + 1, 0.5 * s + tf.reduce_sum(tf.tanh(x @ w), 0)),
        (0, tf.zeros([4], x.dtype)),
    )[1]
    return total * total


def _until_the_mean_is_small(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda h: tf.reduce_mean(h * h) > 0.1, lambda h: [tf.tanh(h @ w) * 0.7], [x])


def _until_it_stands(x: Any, w: Any) -> Any:
    def body(i: Any, v: Any, moved: Any) -> Any:
        new = tf.matmul(x, x @ v, transpose_a=True) + w[:, :1]
        new = new / tf.norm(new)
        return i + 1, new, tf.norm(new - v)

    start = tf.ones([4, 1], x.dtype) / 2.0
    return tf.while_loop(lambda i, v, d: (d > 1e-3) & (i < 9), body, (0, start, tf.constant(1.0, x.dtype)))


def _wants_the_whole_of_what_does_not_change(x: Any, w: Any) -> Any:
    mean, h = tf.reduce_mean(x, 0), tf.tanh(x @ w)

    def body(i: Any, s: Any) -> Any:
        mixed = tf.nn.softmax(tf.matmul(s, h, transpose_b=True)) @ h
        return i + 1, tf.tanh(s + mixed * tf.exp(-mean * mean))

    return tf.while_loop(lambda i, s: i < 2, body, (0, tf.zeros_like(x)))[1]


def _starts_with_zeros(x: Any, w: Any) -> Any:
    start = tf.zeros([tf.shape(x)[0], 4], x.dtype)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w + x)), (0, start))[1]


def _grows_to_rows(x: Any, w: Any) -> Any:
    """What is carried has one row at first."""
    shapes = tf.TensorShape([]), tf.TensorShape([None, 4])
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h + x), (0, w[:1]), shape_invariants=shapes)[1]


def _swaps(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b, a + w[0]), (0, x, tf.zeros_like(x)))[1:]


def _becomes_a_constant(x: Any, w: Any) -> Any:
    """What is carried has rows, then it has what does not change."""
    return tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, w[:1] * 1.0), (0, x[:1]))[1]


def _rows_then_sums(x: Any, w: Any) -> Any:
    """A sum and rows take turns."""

    def body(i: Any, a: Any, b: Any) -> Any:
        return i + 1, tf.zeros_like(x) + tf.reduce_sum(b * x, 0), a + x

    return tf.while_loop(lambda i, a, b: i < 2, body, (0, x, x))[1:]


def _no_rounds(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 0, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]


def _as_long_as_there_are_rows(x: Any, w: Any) -> Any:
    """The number of rounds is the number of rows, but the rounds are not about rows."""
    return tf.while_loop(lambda i, h: i < tf.shape(x)[0], lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]


def _loop_in_a_loop(x: Any, w: Any) -> Any:
    def outer(i: Any, h: Any, n: Any) -> Any:
        def inner(k: Any, h: Any, n: Any) -> Any:
            h = tf.tanh(h @ w + x)
            h, n = tf.cond(tf.reduce_mean(h) > 0.0, lambda: (0.9 * h, n + tf.reduce_sum(h)), lambda: (h, n))
            return k + 1, h, n

        return i + 1, *tf.while_loop(lambda k, h, n: k < 2, inner, (0, h, n))[1:]

    return tf.while_loop(lambda i, h, n: i < 2, outer, (0, x, tf.constant(0.0, x.dtype)))[1:]


def _branches(x: Any, w: Any) -> Any:
    h = tf.tanh(x @ w)
    mean = tf.reduce_mean(h)
    yes, no = (lambda: (2.0 * h, mean * w[0])), (lambda: (h - mean, tf.reduce_sum(h, 0)))
    return [*tf.cond(mean > 0.0, yes, no), *tf.cond(mean <= 0.0, yes, no)]


def _rows_or_a_constant(x: Any, w: Any) -> Any:
    """One branch gives rows, and one gives what has no rows; or as many."""
    shape = tf.shape(x)
    is_positive = tf.reduce_sum(x) > 0.0
    return [
        tf.cond(is_positive, lambda: x * 2.0, lambda: tf.zeros(shape, x.dtype)),
        tf.cond(is_positive, lambda: tf.reduce_sum(x, 0, keepdims=True), lambda: w[:1]),
        tf.cond(is_positive, lambda: x[:1], lambda: w[:1]),
    ]


def _cases(x: Any, w: Any) -> Any:
    h = tf.tanh(x @ w)
    ways = [lambda: 2.0 * h, lambda: tf.nn.relu(h) + tf.reduce_mean(h, 0), lambda: tf.sin(h)]
    number = tf.cast(tf.reduce_sum(tf.abs(x)) * 10, tf.int32)
    return [tf.switch_case((number + i) % 3, ways) for i in range(3)]


def _carries_sizes(x: Any, w: Any) -> Any:
    """A size is carried, which grows from the number of rows in one loop, and becomes it in another one."""
    size = tf.shape(x)[0]
    grown = tf.while_loop(lambda i, n: i < 2, lambda i, n: (i + 1, n + 1), (0, size))[1]
    became = tf.while_loop(lambda i, n: i < 2, lambda i, n: (i + 1, size), (0, size + 2))[1]
    is_positive = tf.reduce_sum(x) > 0.0
    chosen = [tf.cond(each, lambda: size, lambda: size + 1) for each in (is_positive, ~is_positive)]
    zeros = [tf.zeros([n, 4], x.dtype) for n in (grown, became, *chosen)]
    return [*(tf.shape(each)[0] for each in zeros), *(tf.reduce_sum(tf.cos(each)) * x for each in zeros)]


def _list_over_time(x: Any, w: Any) -> Any:
    """Elements are read, and others are written; reads have no order, and one element is never written."""
    steps = tf.TensorArray(x.dtype, 3, clear_after_read=False).unstack(tf.stack([x, 2.0 * x, 3.0 * x]))
    written = tf.TensorArray(x.dtype, 4, element_shape=[None, 4])

    def body(i: Any, h: Any, written: Any) -> Any:
        h = tf.tanh(h @ w + steps.read(2 - i))
        return i + 1, h, written.write(i, h)

    _, h, written = tf.while_loop(lambda i, *_: i < 3, body, (0, tf.zeros_like(x), written))
    return h, written.gather([2, 0]), written.write(3, x).stack()


def _list_of_sums(x: Any, w: Any) -> Any:
    sums = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=[4])
    sums = tf.while_loop(
        lambda i, _: i < 3, lambda i, sums: (i + 1, sums.write(i, tf.reduce_sum(tf.tanh(x * w[i]), 0))), (0, sums)
    )[1]
    return sums.stack() ** 2


def _list_of_both(x: Any, w: Any) -> Any:
    """A list has rows, sums, and what all replicas have."""
    mixed = tf.TensorArray(x.dtype, 3, element_shape=[None, 4], clear_after_read=False)
    mixed = mixed.write(0, x).write(1, x * 0.0 + w[0]).write(2, tf.zeros_like(x) + tf.reduce_sum(x, 0))
    return mixed.read(0), mixed.read(1), mixed.read(2), mixed.stack()


def _list_of_rows(x: Any, w: Any) -> Any:
    return tf.map_fn(lambda row: tf.tanh(row * w[0]), x)


def _maps_two(x: Any, w: Any) -> Any:
    """A round looks at its rows of two tensors, at the size of the batch, and has a branch of its own."""
    size = tf.cast(tf.shape(x)[0], x.dtype)

    def of_row(rows: Any) -> Any:
        a, b = rows
        chosen = tf.cond(tf.reduce_sum(a) > 0.0, lambda: a * b, lambda: a - b)
        return tf.linalg.matvec(w, chosen) / size, tf.reduce_max(a)

    return tf.map_fn(of_row, (x, tf.cos(x)), fn_output_signature=(x.dtype, x.dtype))


def _maps_a_map(x: Any, w: Any) -> Any:
    return tf.map_fn(lambda row: tf.map_fn(lambda each: each * w[0, 0], row), x)


def _folds_to_a_sum(x: Any, w: Any) -> Any:
    return tf.foldl(lambda total, row: total + tf.tanh(row * w[0]), x, initializer=tf.zeros([4], x.dtype)) ** 2


def _folds_otherwise(x: Any, w: Any) -> Any:
    """The rounds hang on each other."""
    zeros = tf.zeros([4], x.dtype)
    return [
        tf.foldl(lambda a, row: tf.maximum(a, row), x, initializer=zeros),
        tf.foldl(lambda a, row: 0.5 * a + row * w[0], x, initializer=zeros),
        tf.scan(lambda a, row: a + row, x, initializer=zeros),
    ]


def _maps_with_numbers(x: Any, w: Any) -> Any:
    """A round uses the number of its row."""
    size = tf.shape(x)[0]
    rows = tf.TensorArray(x.dtype, size).unstack(x)
    made = tf.TensorArray(x.dtype, size, element_shape=[4])
    made = tf.while_loop(
        lambda i, _: i < size, lambda i, made: (i + 1, made.write(i, rows.read(i) * tf.cast(i, x.dtype))), (0, made)
    )[1]
    return made.stack()


def _lengths_of_lists(x: Any, w: Any) -> Any:
    """What is carried is multiplied by the number of rows, as a list tells it."""
    rows = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[4])
    return x * tf.cast(tf.raw_ops.TensorListLength(input_handle=rows), x.dtype)


def _maps_backwards(x: Any, w: Any) -> Any:
    """A round takes the row of another one."""
    size = tf.shape(x)[0]
    rows = tf.TensorArray(x.dtype, size).unstack(x)
    made = tf.TensorArray(x.dtype, size, element_shape=[4])
    made = tf.while_loop(lambda i, _: i < size, lambda i, made: (i + 1, made.write(i, rows.read(size - 1 - i))), (0, made))[1]
    return made.stack()


def _maps_some(x: Any, w: Any) -> Any:
    """There are other numbers of rounds than rows."""
    size = tf.shape(x)[0]
    rows = tf.TensorArray(x.dtype, size).unstack(x)
    made = tf.TensorArray(x.dtype, size, element_shape=[4])
    made = tf.while_loop(lambda i, _: i < (size + 1) // 2, lambda i, made: (i + 1, made.write(i, rows.read(i))), (0, made))[1]
    return made.stack()


def _maps_into_more(x: Any, w: Any) -> Any:
    """A list has more places than there are rows, and another one gets two elements of each."""
    size = tf.shape(x)[0]
    rows = tf.TensorArray(x.dtype, size, clear_after_read=False).unstack(x)
    more = tf.TensorArray(x.dtype, size + size, element_shape=[4])
    more = tf.while_loop(lambda i, _: i < size, lambda i, more: (i + 1, more.write(i, rows.read(i))), (0, more))[1]
    empty = tf.raw_ops.EmptyTensorList(element_shape=[4], max_num_elements=-1, element_dtype=x.dtype)

    def push(i: Any, pushed: Any) -> Any:
        row = rows.read(i)
        once = tf.raw_ops.TensorListPushBack(input_handle=pushed, tensor=row)
        return i + 1, tf.raw_ops.TensorListPushBack(input_handle=once, tensor=2.0 * row)

    pushed = tf.while_loop(lambda i, _: i < size, push, (0, empty))[1]
    twice = tf.raw_ops.TensorListStack(input_handle=pushed, element_shape=[4], element_dtype=x.dtype)
    return more.stack(), tf.stop_gradient(twice)


def _folds_to_more(x: Any, w: Any) -> Any:
    """What rounds add up to has another shape than the beginning."""
    rows = tf.TensorArray(x.dtype, tf.shape(x)[0]).unstack(x)
    shapes = tf.TensorShape([]), tf.TensorShape(None)
    size, start = tf.shape(x)[0], tf.constant(0.0, x.dtype)
    total = tf.while_loop(lambda i, _: i < size, lambda i, a: (i + 1, a + rows.read(i)), (0, start), shape_invariants=shapes)
    return tf.ensure_shape(total[1], [4])


def _other_lists(x: Any, w: Any) -> Any:
    scattered = tf.TensorArray(x.dtype, 4, element_shape=[None, 4], clear_after_read=False).scatter([1, 3], tf.stack([x, 2.0 * x]))
    parts = tf.TensorArray(x.dtype, 2, element_shape=[None, 4]).split(tf.concat([x, w], 0), [tf.shape(x)[0], 4])
    return scattered.read(3), parts.read(0), parts.read(1)


def _raw_lists(x: Any, w: Any) -> Any:
    raw = tf.raw_ops
    empty = raw.EmptyTensorList(element_shape=[-1, 4], max_num_elements=-1, element_dtype=x.dtype)
    one = raw.TensorListPushBack(input_handle=empty, tensor=x)
    two = raw.TensorListPushBack(input_handle=one, tensor=2.0 * x)
    batch = raw.TensorListPushBackBatch(input_handles=tf.stack([one, two]), tensor=tf.stack([x, x]))
    taken = raw.TensorListGetItem(input_handle=tf.unstack(batch)[1], index=1, element_shape=[-1, 4], element_dtype=x.dtype)
    total = raw.AddN(inputs=[two, two, raw.ZerosLike(x=two)])
    joined = raw.TensorListConcatLists(input_a=two, input_b=one, element_dtype=x.dtype)
    fewer = raw.TensorListResize(input_handle=joined, size=2)
    indices = raw.TensorListScatterV2(tensor=tf.stack([x, x]), indices=[1, 0], element_shape=[-1, 4], num_elements=2)
    more = raw.TensorListScatterIntoExistingList(input_handle=indices, tensor=tf.stack([3.0 * x]), indices=[0])
    shape = raw.TensorListElementShape(input_handle=two, shape_type=tf.int32)
    return [
        taken,
        *(raw.TensorListStack(input_handle=each, element_shape=[-1, 4], element_dtype=x.dtype) for each in (total, fewer, more)),
        raw.TensorListLength(input_handle=joined),
        tf.size(shape),
    ]


_EXACT: dict[str, Callable[..., Any]] = {
    function.__name__.strip("_"): function
    for function in (
        _carries_rows, _adds_losses, _adds_rows, _until_the_mean_is_small, _until_it_stands,
        _wants_the_whole_of_what_does_not_change, _starts_with_zeros, _grows_to_rows, _swaps, _becomes_a_constant, _rows_then_sums,
        _no_rounds, _as_long_as_there_are_rows, _loop_in_a_loop, _branches, _rows_or_a_constant, _cases, _carries_sizes,
        _list_over_time, _list_of_sums, _list_of_both, _list_of_rows, _other_lists, _maps_two, _maps_a_map, _folds_to_a_sum,
        _folds_otherwise, _maps_with_numbers, _maps_backwards, _maps_some, _maps_into_more, _folds_to_more, _lengths_of_lists,
    )
}  # fmt: skip


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            results = tf.nest.flatten(function(x, w))
            loss = tf.add_n([tf.reduce_sum(tf.sin(each)) for each in results if each.dtype == x.dtype])
        gradients = tape.gradient(loss, [x, w], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [*results, *gradients]

    return both


def _values(rows: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(1)
    return [drawn.normal(size=(rows, 4)), 0.4 * drawn.normal(size=(4, 4))]


@pytest.mark.parametrize("placement", [Shard(0), PARTIAL, REPLICATE], ids=["rows", "a sum", "whole"])
@pytest.mark.parametrize("name", _EXACT)
def test_control_flow(name: str, placement: Any) -> None:
    function = _with_gradients(_EXACT[name])
    for counts, is_open in [*((counts, True) for counts in _SPLITS), (_SPLITS[0], False)]:
        worst, _, _ = differences(function, _values(sum(counts)), [placement, REPLICATE], counts, is_open)
        assert worst <= 1e-12, counts


def test_operations_on_lists() -> None:
    for counts in _SPLITS:
        for placement in (Shard(0), PARTIAL, REPLICATE):
            worst, _, _ = differences(_raw_lists, _values(sum(counts)), [placement, REPLICATE], counts)
            assert worst <= 1e-12, (counts, placement)


@pytest.mark.parametrize("name", ["list_of_rows", "maps_two", "folds_to_a_sum"])
def test_each_replica_makes_the_rounds_of_its_rows(name: str) -> None:
    def summed(x: Any, w: Any) -> Any:
        return [tf.reduce_sum(each) for each in tf.nest.flatten(_with_gradients(_EXACT[name])(x, w))]

    worst, step, transport = differences(summed, _values(5), [Shard(0), REPLICATE], (3, 2), in_function=True)
    assert worst <= 1e-12
    assert transport.gathers == 0
    assert not step.without_rule


_SENT = {
    "carries_rows": (1, 0), "adds_losses": (1, 0), "adds_rows": (1, 0), "starts_with_zeros": (1, 0), "swaps": (1, 0),
    "list_over_time": (1, 0), "list_of_sums": (1, 0), "until_the_mean_is_small": (2, 0), "loop_in_a_loop": (2, 0),
}  # fmt: skip
"""How often replicas sum, and how often they gather, in the trace: what is sent in a loop counts once."""


@pytest.mark.parametrize("name", _SENT)
def test_what_a_loop_sends(name: str) -> None:
    def summed(x: Any, w: Any) -> Any:
        return [tf.reduce_sum(each) for each in tf.nest.flatten(_EXACT[name](x, w)) if each.dtype == x.dtype]

    worst, _, transport = differences(summed, _values(5), [Shard(0), REPLICATE], (3, 2), in_function=True)
    assert worst <= 1e-12
    assert (transport.rounds, transport.gathers) == _SENT[name]


def _types(graph: Any) -> Iterator[str]:
    for operation in graph.get_operations():
        yield operation.type
    for function in graph._functions.values():
        yield from _types(function.graph)


def test_every_rule_of_control_flow_has_a_case() -> None:
    specs = [tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([4, 4], tf.float64)]
    found: set[str] = set()
    for function in [*map(_with_gradients, _EXACT.values()), _raw_lists]:
        found |= set(_types(trace("step", function, specs, {})))
    rooms = {module.__name__ for module in (control_flow, lists, control_flow)}
    missing = {kind for kind, rule in planner.RULES.items() if rule.__module__ in rooms} - found
    assert {kind for kind in missing if not kind.startswith("Stateless") and kind not in ("If", "Case", "While")} == set()


_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "a sum is taken for a whole": lambda p: REPLICATE if p == PARTIAL else p,
    "rows are taken for a whole": lambda p: REPLICATE if isinstance(p, (Items, Shard)) else p,
    "an axis is off by one": lambda p: Shard(p.axis + 1, p.per_row) if isinstance(p, Shard) else p,
    "a whole is taken for a sum": lambda p: PARTIAL if p == REPLICATE else p,
}
_ROOMS = {module.__name__ for module in (control_flow, lists, control_flow)}
_KINDS = sorted(kind for kind, found in planner.RULES.items() if found.__module__ in _ROOMS)


_PLACED = (_ROWS, PARTIAL)
"""How the first argument of programs is placed, so that wrong placements are found."""


def _compare(name: str, placement: Any) -> float:
    """Returns how far replicas are from one device."""
    function = _raw_lists if name == "raw_lists" else _with_gradients(_EXACT[name])
    return differences(function, _values(5), [placement, REPLICATE], (3, 2))[0]


def _is_found(name: str, placement: Any = _ROWS) -> bool:
    """Returns whether replicas give something else than one device, or an error."""
    try:
        return _compare(name, placement) > 1e-9
    except Exception:
        return True


@functools.cache
def _results() -> dict[tuple[str, Any], dict[str, set[Any]]]:
    """Returns, for each program and placement of its argument, how results of control flow are placed, by their types."""
    found: dict[tuple[str, Any], dict[str, set[Any]]] = {}
    original = planner.Planner.put

    def put(plan: Any, tensor: Any, placement: Any, *args: Any, **details: Any) -> None:
        if _is_meant(tensor):
            of_program.setdefault(tensor.op.type, set()).add(placement)
        original(plan, tensor, placement, *args, **details)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.Planner, "put", put)
        for name in ["raw_lists", *_EXACT]:
            for placement in _PLACED:
                of_program = found.setdefault((name, placement), {})
                _compare(name, placement)
    return found


def _is_meant(tensor: Any) -> bool:
    return tensor.op.type in _KINDS and (tensor.dtype.is_floating or tensor.dtype == tf.variant)


@pytest.mark.lane("rows")
@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_wrong_placements_are_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one type of operation gives is placed wrongly: some program that has it finds that."""
    programs = _results()
    original, change = planner.Planner.put, _MUTATIONS[mutation]

    def put(plan: Any, tensor: Any, placement: Any, *args: Any, **details: Any) -> None:
        is_changed = tensor.op.type == kind and _is_meant(tensor)
        original(plan, tensor, change(placement) if is_changed else placement, *args, **details)

    monkeypatch.setattr(planner.Planner, "put", put)
    monkeypatch.setattr(planner.Planner, "_from_whole_inputs", lambda *_: None)  # To compute it again would mend it.
    missed = []
    for kind in _KINDS:
        tries = [each for each, placed in programs.items() if any(change(p) != p for p in placed.get(kind, ()))]
        if tries and not any(_is_found(*each) for each in tries):
            missed.append(kind)
    assert not missed


def _all_rounds(patch: pytest.MonkeyPatch) -> None:
    original = row_loops.RowLoop.put

    def put(loop: Any, operation: Any) -> None:
        rows = loop._plan.rows
        loop._plan.rows = dataclasses.replace(rows, count=rows.total)
        original(loop, operation)
        loop._plan.rows = rows

    patch.setattr(row_loops.RowLoop, "put", put)


def _numbers_of_rows(patch: pytest.MonkeyPatch) -> None:
    original = row_loops.RowLoop._follow

    def follow(loop: Any, operation: Any) -> None:
        try:
            original(loop, operation)
        except row_loops.NotOverRowsError:
            loop._labels.update((x.name, "row") for x in operation.outputs)

    patch.setattr(row_loops.RowLoop, "_follow", follow)


def _first_size(patch: pytest.MonkeyPatch) -> None:
    original = control_flow._Loop._next
    patch.setattr(
        control_flow._Loop,
        "_next",
        lambda loop, i, each, test: dataclasses.replace(original(loop, i, each, test), sizes=each.sizes),
    )


def _of_one_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control_flow, "_either", lambda bodies, outs: control_flow.entry(bodies[0], outs[0]))


_BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str]]] = {
    "rows are not brought to what is carried": (
        lambda patch: patch.setattr(planner.Planner, "to", lambda plan, tensor, placement: plan.local(tensor)),
        ["until_it_stands", "grows_to_rows", "branches", "list_over_time"],
    ),
    "anything has any placement": (
        lambda patch: patch.setattr(planner.Planner, "can_be", lambda plan, tensor, placement: True),
        ["grows_to_rows"],
    ),
    "a row loop makes all rounds": (_all_rounds, ["list_of_rows", "maps_two", "folds_to_a_sum"]),
    "a row loop may use all": (_numbers_of_rows, ["maps_with_numbers", "maps_backwards"]),
    "what is added up is a whole": (lambda patch: patch.setattr(row_loops, "PARTIAL", REPLICATE), ["folds_to_a_sum"]),
    "a row loop has places for all rows": (
        lambda patch: patch.setattr(row_loops.RowLoop, "_is_new", lambda loop, place, kind: True),
        ["maps_into_more"],
    ),
    "a loop keeps the size that comes in": (_first_size, ["carries_sizes"]),
    "a loop keeps the shape that comes in": (
        lambda patch: patch.setattr(control_flow, "common_dims", lambda a, b: a),
        ["grows_to_rows"],
    ),
    "branches give what one of them gives": (_of_one_branch, ["carries_sizes"]),
    "the axis of elements is off by one": (
        lambda patch: patch.setattr(lists, "Shard", lambda axis, per_row=1: Shard(axis + 1, per_row)),
        ["list_over_time"],
    ),
    "a list has the length of own rows": (
        lambda patch: patch.setitem(planner.RULES, "TensorListLength", lambda plan, x: plan.emit(x, plan.locals(x), REPLICATE)),
        ["lengths_of_lists"],
    ),
}
"""What breaks a mechanism, and programs each of which finds it."""


@pytest.mark.lane("rows")
@pytest.mark.parametrize("name", _BROKEN)
def test_broken_mechanisms_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, programs = _BROKEN[name]
    breaks(monkeypatch)
    assert [program for program in programs if not _is_found(program)] == []
