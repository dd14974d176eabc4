"""What TensorFlow promises of every strategy: values, reductions, gathers, contexts, saving.

The subjects are those of its own tests of strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checks import Checks, both_ways, first, of_each, own_replicas, shared_folder
from lanes import in_lane
from raising import refuses

import tfrep_strategy as tfrep

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
check = Checks()


@check
def values_of_replicas(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    contexts: list[Any] = []

    def value_of(context: Any) -> tf.Tensor:
        contexts.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return tf.constant([context.replica_id_in_sync_group])

    values = strategy.experimental_distribute_values_from_function(value_of)
    assert contexts == [(r, n) for r in own_replicas(strategy)]
    assert [int(v[0]) for v in strategy.experimental_local_results(values)] == list(own_replicas(strategy))
    assert strategy.experimental_local_results(None) == (None,)
    assert strategy.experimental_local_results("text") == ("text",)
    nested = {"values": values, "same": 5.0, "none": None, "deep": [(values, tf.constant(2))]}

    def replica(nest: Any, *, scale: int) -> Any:
        assert nest["none"] is None
        (values, two), x = nest["deep"][0], nest["values"] * scale
        return {"x": x + values, "none": None, "same": nest["same"], "deep": (two,)}

    for result in both_ways(lambda: strategy.run(replica, args=(nested,), kwargs={"scale": 10})):
        assert result["none"] is None or strategy.experimental_local_results(result["none"])[0] is None
        found = strategy.experimental_local_results(result["x"])
        assert [int(v[0]) for v in found] == [11 * r for r in own_replicas(strategy)]
        assert int(strategy.experimental_local_results(result["deep"][0])[0]) == 2
    assert strategy.run(lambda: None) is None or strategy.experimental_local_results(strategy.run(lambda: None))[0] is None


@check
def replica_id_in_functions_that_are_traced_twice(strategy: Any) -> None:
    made: list[Any] = []

    @tf.function
    def replica_id() -> Any:
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    @tf.function
    def step() -> Any:
        if not made:
            made.append(tf.Variable(0.0))  # A function that makes a variable is traced twice.
        return strategy.run(replica_id)

    for _ in range(2):
        assert [int(r) for r in strategy.experimental_local_results(step())] == list(own_replicas(strategy))


@check
def reductions(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    ranks = np.arange(n)
    rows = [np.arange(3.0 * (r + 1)).reshape(r + 1, 3) for r in ranks]
    uneven = of_each(strategy, lambda r: tf.constant(rows[r], tf.float32))
    ones = of_each(strategy, lambda r: tf.ones([]))

    def reduced() -> list[Any]:
        return [
            strategy.reduce(SUM, ones, axis=None),
            strategy.reduce("mean", ones),
            strategy.reduce("SUM", uneven, axis=0),
            strategy.reduce(MEAN, uneven, axis=0),
            strategy.reduce("MEAN", uneven, axis=(0, 1)),
            strategy.reduce("SUM", uneven, axis=(0, -1)),
        ]

    every = np.concatenate(rows)
    wanted = [n, 1.0, every.sum(0), every.mean(0), every.mean(), every.sum()]
    for found in both_ways(reduced):
        for value, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-6)
    with strategy.scope():
        np.testing.assert_allclose(reduced()[2], wanted[2], rtol=1e-6)
    for bad in ({"axis": 7}, {"axis": -7}):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            strategy.reduce(MEAN, of_each(strategy, lambda r: tf.ones([2])), **bad)
    with pytest.raises((ValueError, TypeError)):
        strategy.reduce("MEDIAN", ones, axis=None)


@check
def reductions_of_one_value(strategy: Any) -> None:
    """A process brings its own value. Replicas of one process have none each: a mean, and no sum."""
    n = strategy.num_replicas_in_sync
    several = strategy.extended.num_local_replicas > 1
    for value in (1.0, 1, np.float32(1.0), np.ones(3), tf.ones([]), tf.ones([2, 2])):
        np.testing.assert_allclose(strategy.reduce("MEAN", value), np.ones(np.shape(value)))
        if several:
            with refuses(told=["no sum"], value=...):
                strategy.reduce("SUM", value)
        else:
            np.testing.assert_allclose(strategy.reduce("SUM", value), n * np.ones(np.shape(value)))
            reduced = strategy.extended.reduce_to(SUM, value, "/device:CPU:0")
            np.testing.assert_allclose(reduced, n * np.ones(np.shape(value)))
    for zero in (0, 0.0, np.zeros(2)):
        np.testing.assert_allclose(strategy.reduce("SUM", zero), np.zeros(np.shape(zero)))
    for value in (tf.constant([1.0, 3.0]), np.array([1.0, 3.0])):
        np.testing.assert_allclose(strategy.reduce("SUM", value, axis=0), 4.0 * n)
        np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=0), 2.0)


@check
def reductions_to_places(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2]))
    made = tf.constant([1.0, 2.0])
    for value in (strategy.run(lambda: tf.identity(made)), of_each(strategy, lambda r: tf.identity(made))):
        for place in (variable, "/device:CPU:0", value):
            reduced = strategy.extended.reduce_to(SUM, value, place)
            np.testing.assert_allclose(first(strategy, reduced), [n, 2.0 * n])
            pair = strategy.extended.batch_reduce_to(MEAN, [(value, place), (value, place)])
            for each in pair:
                np.testing.assert_allclose(first(strategy, each), [1.0, 2.0])


@check
def reductions_in_replicas(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    ranks = np.arange(n)

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        r = tf.cast(context.replica_id_in_sync_group, tf.float32)
        index = tf.fill([1], context.replica_id_in_sync_group)
        slices = tf.IndexedSlices(tf.fill([1, 2], r + 1.0), index, tf.constant([n, 2]))
        nest = {"a": (r, [2.0 * r]), "b": tf.stack([r, 1.0])}
        total = context.all_reduce("SUM", nest)
        dense = tf.convert_to_tensor(context.all_reduce(SUM, slices))
        mixed = context.all_reduce(MEAN, [slices, r])
        empty = context.all_reduce(SUM, tf.zeros([0, 3]))
        whole = context.all_reduce(SUM, tf.ones([2], tf.int64))
        with tf.GradientTape() as tape:
            tape.watch(r)
            y = context.all_reduce(SUM, r * r) * (r + 1.0)
        return total, dense, tf.convert_to_tensor(mixed[0]), mixed[1], tf.shape(empty), whole, tape.gradient(y, r)

    for result in both_ways(lambda: strategy.run(replica)):
        total, dense, mean_slices, mean, empty, whole, _ = first(strategy, result)
        np.testing.assert_allclose(total["a"][0], ranks.sum())
        np.testing.assert_allclose(total["a"][1][0], 2.0 * ranks.sum())
        np.testing.assert_allclose(total["b"], [ranks.sum(), n])
        np.testing.assert_allclose(dense, np.repeat(ranks + 1.0, 2).reshape(n, 2))
        np.testing.assert_allclose(mean_slices, np.repeat(ranks + 1.0, 2).reshape(n, 2) / n)
        np.testing.assert_allclose(mean, ranks.mean())
        assert empty.tolist() == [0, 3]
        assert whole.tolist() == [n, n]
        for r, gradient in zip(own_replicas(strategy), strategy.experimental_local_results(result[-1]), strict=True):
            # The sum over replicas s of (sum of squares)(s + 1), by r, where the factor's own part is replica r's alone.
            want = 2.0 * r * (ranks + 1.0).sum() + (ranks**2.0).sum()
            np.testing.assert_allclose(gradient, want, rtol=1e-6)


@check
def gathers(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    shapes: list[tuple[int, Callable[[int], list[int]]]] = [
        (0, lambda r: [3]),
        (0, lambda r: [r + 1, 2]),
        (1, lambda r: [2, r + 1]),
        (2, lambda r: [1, 2, 2 * r + 1]),
        (0, lambda r: [r, 2]),  # Replica 0 has nothing.
    ]
    for dtype in ("float32", "int32", "S"):
        for axis, shape in shapes:
            made = [np.full(shape(r), r).astype(dtype) for r in range(n)]
            want = np.concatenate(made, axis)
            values = of_each(strategy, lambda r, made=made: tf.constant(made[r]))
            for found in both_ways(lambda values=values, axis=axis: strategy.gather(values, axis=axis)):
                np.testing.assert_array_equal(found, want)

            def replica(value: tf.Tensor, axis: int = axis) -> Any:
                context = tf.distribute.get_replica_context()
                return context.all_gather({"x": [value, value]}, axis=axis)["x"][1]

            for found in both_ways(lambda values=values, replica=replica: strategy.run(replica, args=(values,))):
                np.testing.assert_array_equal(first(strategy, found), want)
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        strategy.gather(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), tf.constant([5, 2])), axis=0)


@check
def gradients_of_gathers(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        r = tf.cast(context.replica_id_in_sync_group, tf.float32)
        x = tf.fill([2, 1], r)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context.all_gather(x, axis=0) * (r + 1.0)
        return tape.gradient(y, x)

    for result in both_ways(lambda: strategy.run(replica)):
        for gradient in strategy.experimental_local_results(result):
            np.testing.assert_allclose(gradient, np.full([2, 1], np.arange(1, n + 1).sum()))


@check
def contexts(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    seen: list[Any] = []

    def replica(x: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == n
        assert len(context.devices) == 1
        assert not tf.distribute.in_cross_replica_context()
        assert tf.distribute.has_strategy()
        with pytest.raises(RuntimeError):
            strategy.reduce("SUM", x, axis=None)
        with pytest.raises(RuntimeError):
            strategy.run(lambda: None)

        def merge(merged: Any, value: Any, *, scale: float) -> Any:
            assert merged is strategy
            assert tf.distribute.in_cross_replica_context()
            assert tf.distribute.get_replica_context() is None
            seen.append("merged")
            return strategy.reduce("SUM", value, axis=None) * scale

        return context.merge_call(merge, args=(x,), kwargs={"scale": 3.0})

    x = of_each(strategy, lambda r: tf.constant(r + 1.0))
    for result in both_ways(lambda: strategy.run(replica, args=(x,))):
        np.testing.assert_allclose(first(strategy, result), 3.0 * np.arange(1, n + 1).sum())
    assert len(seen) >= 2
    assert not tf.distribute.has_strategy()
    assert tf.distribute.get_replica_context() is not None
    with strategy.scope() as entered:
        assert entered is strategy
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
        with pytest.raises(RuntimeError), tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            pass
    assert not tf.distribute.has_strategy()


@check
def variables_of_another_strategy(strategy: Any) -> None:
    with strategy.scope():
        variable = tf.Variable(2.0)
        assert strategy.extended.variable_created_in_scope(variable)
        with strategy.extended.colocate_vars_with(variable):
            beside = tf.Variable([1.0])
    assert beside.device == variable.device
    outside = tf.Variable(3.0)
    assert not strategy.extended.variable_created_in_scope(outside)
    doubled = strategy.run(lambda: variable * outside)
    np.testing.assert_allclose(first(strategy, doubled), 6.0)
    np.testing.assert_allclose(variable + 1.0, 3.0)
    np.testing.assert_allclose(tf.reduce_sum([variable, variable]), 4.0)
    np.testing.assert_allclose(float(variable.numpy()) ** 2, 4.0)
    with strategy.scope():
        updated = strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(5.0,))
        assert updated is not None
    np.testing.assert_allclose(variable, 7.0)


class Counter(tf.Module):
    """Something to save: a weight, a count over replicas, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0], name="weight")
        self.count = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
        )

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def apply(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.weight


@check
def saving(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        module = Counter()
        module.weight.assign([3.0, 4.0])
    strategy.run(lambda: module.count.assign_add(2.0))
    x = tf.constant([[1.0, 1.0]])
    folder = shared_folder(strategy)
    path = tf.train.Checkpoint(module=module).write(str(folder / "checkpoint"))
    strategy.extended.barrier()

    plain = Counter()
    tf.train.Checkpoint(module=plain).read(path).assert_consumed()
    np.testing.assert_allclose(plain.weight, [3.0, 4.0])
    np.testing.assert_allclose(plain.count, 2.0 * n)
    with strategy.scope():
        again = Counter()
        tf.train.Checkpoint(module=again).read(path).assert_consumed()
        np.testing.assert_allclose(again.count.read_value(), 2.0 * n)
    np.testing.assert_allclose(first(strategy, strategy.run(lambda: again.apply(x))), [[3.0, 4.0]])

    own = folder / f"model{strategy.extended.first_local_replica}"
    with strategy.scope():
        tf.saved_model.save(module, str(own))
    outside = tf.saved_model.load(str(own))
    np.testing.assert_allclose(outside.apply(x), [[3.0, 4.0]])
    with strategy.scope():
        loaded = tf.saved_model.load(str(own))
        np.testing.assert_allclose(loaded.apply(x), [[3.0, 4.0]])
        assert strategy.extended.variable_created_in_scope(loaded.weight)
        loaded.weight.assign([5.0, 6.0])
    np.testing.assert_allclose(first(strategy, strategy.run(lambda: loaded.apply(x))), [[5.0, 6.0]])
    for value in strategy.experimental_local_results(loaded.weight):
        np.testing.assert_allclose(value, [5.0, 6.0])
    strategy.extended.barrier()


@pytest.mark.parametrize("size", [*in_lane("quick", 2), 1])
def test_replicas_of_one_process(size: int) -> None:
    failed = check.failures(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)]))
    assert not failed, failed


@pytest.mark.parametrize("communicator", ["tf", *in_lane("wires", "horovod")])
def test_processes(worker_pool: Any, communicator: str) -> None:
    failed = check.failures_in(worker_pool(communicator, 2))
    assert not failed, failed
