"""What custom training loops, written for stock strategies, ask of a strategy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("loops")

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def everywhere(check: Any, worker_pool: Any, size: int = 2) -> None:
    """Runs `check(strategy)` on mirrored replicas and on processes over both communicators."""
    check(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)]))
    check(tfrep.MirroredStrategy(["CPU:0"]))
    for communicator in ("tf", "horovod"):
        worker_pool(communicator, size).run(check)


def check_reductions(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 2.0]) * (context.replica_id_in_sync_group + 1)
    )
    ranks = np.arange(1, n + 1)
    np.testing.assert_allclose(strategy.reduce(SUM, values, axis=None), np.array([1.0, 2.0]) * ranks.sum())
    np.testing.assert_allclose(strategy.reduce("MEAN", values, axis=None), np.array([1.0, 2.0]) * ranks.mean())
    np.testing.assert_allclose(strategy.reduce(SUM, values, axis=0), 3.0 * ranks.sum())
    np.testing.assert_allclose(strategy.reduce(MEAN, values, axis=0), 1.5 * ranks.mean())
    gathered = strategy.gather(values, axis=0)
    np.testing.assert_allclose(gathered, np.concatenate([np.array([1.0, 2.0]) * r for r in ranks]))
    local = strategy.experimental_local_results(values)
    assert len(local) == strategy.extended.num_local_replicas


def test_reductions(worker_pool: Any) -> None:
    everywhere(check_reductions, worker_pool)


def check_replica_context(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def step() -> Any:
        context = tf.distribute.get_replica_context()
        r = tf.cast(context.replica_id_in_sync_group, tf.float32)
        total, mean = context.all_reduce(SUM, [r, 2.0 * r]), context.all_reduce("MEAN", r)
        gathered = context.all_gather(tf.reshape(r, [1, 1]), axis=0)
        ragged = context.all_gather(tf.fill([context.replica_id_in_sync_group + 1], r), axis=0)
        merged = context.merge_call(lambda s, v: s.reduce(SUM, v, axis=None), args=(r,))
        return total, mean, gathered, ragged, merged

    for run in (strategy.run, tf.function(strategy.run)):
        total, mean, gathered, ragged, merged = (
            tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0].numpy(), part) for part in run(step)
        )
        all_ranks = np.arange(n)
        np.testing.assert_allclose(total, [all_ranks.sum(), 2 * all_ranks.sum()])
        np.testing.assert_allclose(mean, all_ranks.mean())
        np.testing.assert_allclose(gathered[:, 0], all_ranks)
        np.testing.assert_allclose(ragged, np.repeat(all_ranks, all_ranks + 1))
        np.testing.assert_allclose(merged, all_ranks.sum())


def test_replica_context(worker_pool: Any) -> None:
    everywhere(check_replica_context, worker_pool)


def check_variables(strategy: Any) -> None:
    """Every synchronization with every aggregation: assigned inside replicas, read outside."""
    n = strategy.num_replicas_in_sync
    S, A = tf.VariableSynchronization, tf.VariableAggregation
    expected = {
        A.SUM: np.arange(1, n + 1).sum(),
        A.MEAN: np.arange(1, n + 1).mean(),
        A.ONLY_FIRST_REPLICA: 1.0,
    }
    for synchronization in (S.ON_WRITE, S.ON_READ):
        for aggregation, want in expected.items():
            with strategy.scope():
                variable = tf.Variable(0.0, synchronization=synchronization, aggregation=aggregation)

            @tf.function
            def step(variable: Any = variable) -> None:
                def replica() -> None:
                    context = tf.distribute.get_replica_context()
                    variable.assign(tf.cast(context.replica_id_in_sync_group + 1, tf.float32))

                strategy.run(replica)

            step()
            with strategy.scope():
                found = variable.read_value().numpy()
            np.testing.assert_allclose(found, want, err_msg=f"{synchronization} {aggregation}")
    with strategy.scope():
        counter = tf.Variable(7, synchronization=S.ON_READ, aggregation=A.SUM, dtype=tf.int64)
        assert int(counter.read_value()) == 7
        counter.assign(5)
        assert int(counter.read_value()) == 5, "an integer total must survive being assigned"
        none = tf.Variable([1.0, 2.0], aggregation=A.NONE)
        assert none.numpy().tolist() == [1.0, 2.0]


def test_variables(worker_pool: Any) -> None:
    everywhere(check_variables, worker_pool)


def check_sparse_gradients(strategy: Any) -> None:
    """`tf.IndexedSlices` with another number of rows on each replica."""
    n = strategy.num_replicas_in_sync

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            r = context.replica_id_in_sync_group
            slices = tf.IndexedSlices(tf.ones([r + 1, 2]), tf.range(r + 1), tf.constant([4, 2]))
            return tf.convert_to_tensor(context.all_reduce(SUM, slices))

        return strategy.run(replica)

    dense = strategy.experimental_local_results(step())[0]
    np.testing.assert_allclose(dense[:, 0], [max(0, n - row) for row in range(4)])


def test_sparse_gradients(worker_pool: Any) -> None:
    everywhere(check_sparse_gradients, worker_pool)


def check_datasets(strategy: Any) -> None:
    """Every example is read once, in order, also where sizes do not divide."""
    n, first = strategy.num_replicas_in_sync, strategy.extended.first_local_replica
    local = range(first, first + strategy.extended.num_local_replicas)

    def batches_of(distributed: Any) -> list[list[list[int]]]:
        return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in distributed]

    whole = strategy.experimental_distribute_dataset(tf.data.Dataset.range(7).batch(4))
    wanted = [[np.array_split(batch, n)[r].tolist() for r in local] for batch in (np.arange(4), np.arange(4, 7))]
    assert batches_of(whole) == wanted
    assert len(list(whole)) == 2, "a second iteration starts again"

    @tf.function
    def total(distributed_iterator: Any) -> Any:
        result = tf.constant(0, tf.int64)
        for _ in range(2):
            part = strategy.run(tf.reduce_sum, args=(next(distributed_iterator),))
            result += strategy.reduce(SUM, part, axis=None)
        return result

    assert int(total(iter(whole))) == 21

    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        assert context.num_replicas_in_sync == n
        batch = context.get_per_replica_batch_size(2 * n)
        return tf.data.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(batch)

    seen = batches_of(strategy.distribute_datasets_from_function(own))
    mine = sorted(value for step in seen for part in step for value in part)
    pipelines = n // strategy.extended.num_local_replicas
    assert mine == list(range(first if pipelines > 1 else 0, 8, pipelines))


def test_datasets(worker_pool: Any) -> None:
    everywhere(check_datasets, worker_pool)


def check_loops_in_functions(strategy: Any) -> None:
    import loops_in_functions  # AutoGraph needs functions of a module that can be imported.

    loops_in_functions.check(strategy)


def test_loops_in_functions(worker_pool: Any) -> None:
    everywhere(check_loops_in_functions, worker_pool)


def check_moving_statistics(strategy: Any) -> None:
    """What each replica keeps for itself is the mean whenever it is read, also after steps that Python does not see."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    step = tf.function(lambda batch: strategy.run(lambda part: tf.reduce_sum(layer(part, training=True)), args=(batch,)))
    want = np.zeros(2)
    for shift in range(3):
        rows = np.arange(16, dtype="float32").reshape(8, 2) ** 2 + shift
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.constant(rows))):
            step(batch)
        want = (want + rows.mean(0)) / 2
        np.testing.assert_allclose(layer.moving_mean.numpy(), want, rtol=1e-5)
        strategy.extended.merge_replica_state()
        np.testing.assert_allclose(layer.moving_mean.numpy(), want, rtol=1e-5)


def test_moving_statistics(worker_pool: Any) -> None:
    everywhere(check_moving_statistics, worker_pool)


def check_random_operations(strategy: Any) -> None:
    """Replicas draw other numbers than each other, and the first one draws those of one device."""

    def draw() -> Any:
        return tf.random.uniform([4]), tf.nn.dropout(tf.ones([64]), 0.5), tf.random.uniform([4], seed=3)

    def all_of(strategy: Any) -> list[np.ndarray]:
        tf.random.set_seed(5)
        run = tf.function(lambda: tf.nest.map_structure(lambda v: strategy.gather(v, 0), strategy.run(draw)))
        return [np.split(v.numpy(), strategy.num_replicas_in_sync) for _ in range(2) for v in run()]

    drawn = all_of(strategy)
    for replicas in drawn:
        assert len({replica.tobytes() for replica in replicas}) == strategy.num_replicas_in_sync
    assert not np.array_equal(drawn[0], drawn[3]), "the next step draws other numbers"
    np.testing.assert_equal(all_of(strategy), drawn)


def test_random_operations(worker_pool: Any) -> None:
    everywhere(check_random_operations, worker_pool)


def check_synchronization_in_inner_functions(strategy: Any) -> None:
    """A loss in a function of its own, and an update that stands in a branch, give what one device gives."""
    x = np.arange(14, dtype="float32").reshape(7, 2) / 10
    y = 2 * x.sum(1, keepdims=True)

    def train(strategy: Any) -> np.ndarray:
        with strategy.scope():
            layer, optimizer = keras.layers.Dense(1, kernel_initializer="ones"), keras.optimizers.SGD(0.1)
            layer.build((None, 2))
            optimizer.build(layer.trainable_variables)
            loss = keras.losses.MeanSquaredError()
        loss_of = tf.function(lambda x, y: loss(y, layer(x)), autograph=False)

        def step(batch: Any, updates: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss_of(*batch)
            gradients = tape.gradient(value, layer.trainable_variables)
            tf.cond(
                updates,
                lambda: optimizer.apply(gradients, layer.trainable_variables) or tf.constant(0),
                lambda: tf.constant(0),
            )

        run = tf.function(lambda batch, updates: strategy.run(step, args=(batch, updates)), autograph=False)
        for _ in range(2):
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
            for i, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
                run(batch, tf.constant(i == 0))
        return np.concatenate([w.ravel() for w in layer.get_weights()])

    # As one device does it; no strategy may be left in another one's scope.
    kernel, bias = np.ones((2, 1)), np.zeros(1)
    for _ in range(2):
        error = x[:4] @ kernel + bias - y[:4]
        kernel, bias = kernel - 0.1 * 2 * x[:4].T @ error / 4, bias - 0.1 * 2 * error.mean(0)
    np.testing.assert_allclose(train(strategy), np.append(kernel, bias), rtol=1e-5)


def test_synchronization_in_inner_functions(worker_pool: Any) -> None:
    everywhere(check_synchronization_in_inner_functions, worker_pool)


def check_functions_that_only_some_replicas_trace_again(strategy: Any) -> None:
    """A replica whose rows are as before keeps the traces of inner functions, and another replica makes new ones."""

    def total(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(SUM, tf.reduce_sum(x))

    # All have one name. The first is traced once, and the second calls the third.
    once = tf.function(lambda x: total(x), autograph=False)
    nested = tf.function(lambda x: ten_times(x) + total(2 * x), autograph=False)
    ten_times = tf.function(lambda x: 10 * total(x), autograph=False)

    def step(x: Any) -> Any:
        functions = once(tf.ones([5])), nested(x), ten_times(x)
        return *functions, tf.cond(tf.identity(True), lambda: total(x) + nested(x), lambda: 0.0), ten_times(tf.ones([3]))

    run = tf.function(lambda x: strategy.run(step, (x,)), autograph=False)
    n = strategy.num_replicas_in_sync
    for rows in ([2, 2], [2, 1], [3, 2], [1, 3], [2, 2]):
        x = strategy.experimental_distribute_values_from_function(
            lambda context, rows=rows: tf.ones([rows[context.replica_id_in_sync_group]])
        )
        rows_of_all = sum(rows[:n])
        found = [float(strategy.experimental_local_results(value)[0]) for value in run(x)]
        assert found == [5.0 * n, 12.0 * rows_of_all, 10.0 * rows_of_all, 13.0 * rows_of_all, 30.0 * n]


def test_functions_that_only_some_replicas_trace_again(worker_pool: Any) -> None:
    everywhere(check_functions_that_only_some_replicas_trace_again, worker_pool)


def stopped_on_one_rank(strategy: Any) -> int:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def stop(epoch: int, logs: Any) -> None:
        model.stop_training = strategy.rank == 1 and epoch == 1

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=stop)]
    return len(model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=5, verbose=0, callbacks=callbacks).epoch)


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_one_rank_stops_all(communicator: str, worker_pool: Any) -> None:
    assert worker_pool(communicator, 2).run(stopped_on_one_rank) == [2, 2]


def place_in_cluster(strategy: Any) -> tuple[str, int, int]:
    resolver = strategy.cluster_resolver
    return resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_scripts_may_ask_for_their_place(communicator: str, worker_pool: Any) -> None:
    assert worker_pool(communicator, 2).run(place_in_cluster) == [("worker", 0, 2), ("worker", 1, 2)]


def test_two_strategies_at_once() -> None:
    strategies = [tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])]
    for strategy in strategies + strategies[::-1]:
        check_replica_context(strategy)


def test_unknown_device_is_named() -> None:
    with refuses(code="TFREP-E010", told=["CPU:9"], devices=["CPU:0", "CPU:9"]):
        tfrep.MirroredStrategy(["CPU:0", "CPU:9"])
    with refuses(hint="name each device once.", devices=["CPU:0", "CPU:0"]):
        tfrep.MirroredStrategy(["CPU:0", "CPU:0"])
    for devices in ([0, 1], [None], 2, "CPU:0", {"CPU:0": 1}, ["x" * 10_000], [["CPU:0"]]):
        with pytest.raises(tfrep.errors.ConfigurationError, match="(?s)^.{,2000}$"):
            tfrep.MirroredStrategy(devices)
    assert tfrep.MirroredStrategy({"CPU:1": 0}.keys()).devices == ["CPU:1"]


def check_gradient_hooks(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def updated(**options: Any) -> float:
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.SGD(1.0, **options)
            optimizer.build([variable])
        step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [variable])))
        for _ in range(optimizer.gradient_accumulation_steps or 1):
            step()
        return float(variable.numpy())

    def decayed(pairs: Any) -> Any:
        return [(gradient + 0.5 * variable, variable) for gradient, variable in pairs]

    try:
        strategy.gradient_transformers = [lambda gradients: [2.0 * g for g in gradients]]
        assert updated() == 1 - 2 * n
        strategy.gradient_transformers = [decayed, lambda gradients: [2.0 * g for g in gradients]]
        assert updated() == 1 - 2 * (n + 0.5)
        assert updated(clipvalue=2.0) == -1, "clipping comes after"
        assert updated(gradient_accumulation_steps=3) == 1 - 2 * (n + 0.5), "once in an update"
        strategy.gradient_transformers = [lambda gradients: gradients[1:]]
        with refuses(gradients=..., returned=...):
            updated()
        strategy.gradient_transformers = []
        strategy.gradient_aggregator = lambda gradients, communicator: communicator.all_reduce(gradients, "mean")
        assert updated() == 0
    finally:
        strategy.gradient_transformers, strategy.gradient_aggregator = [], None


def test_gradient_hooks(worker_pool: Any) -> None:
    everywhere(check_gradient_hooks, worker_pool)
