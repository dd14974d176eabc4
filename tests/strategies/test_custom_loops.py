"""What custom training loops, written for stock strategies, ask of a strategy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

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
        return [
            [part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in distributed
        ]

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


def file_examples(strategy: Any, folder: str, policy: str) -> list[str]:
    """Trains nothing; tells which lines this process reads from several files."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    lines = files.interleave(tf.data.TextLineDataset, cycle_length=1).batch(4).with_options(options)
    return [line.decode() for batch in strategy.experimental_distribute_dataset(lines) for line in batch.numpy()]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_auto_shard_policy(communicator: str, tmp_path: Any, worker_pool: Any) -> None:
    lines = [f"{file}-{line}" for file in range(3) for line in range(5)]
    for file in range(3):
        (tmp_path / f"{file}.txt").write_text("\n".join(f"{file}-{line}" for line in range(5)) + "\n")
    pool = worker_pool(communicator, 2)
    for policy in ("DATA", "AUTO"):
        first, second = pool.run(file_examples, str(tmp_path), policy)
        assert sorted(first + second) == lines
        assert {line[0] for line in first} == {"0", "1", "2"}
    first, second = pool.run(file_examples, str(tmp_path), "FILE")
    assert sorted(first + second) == lines
    assert {line[0] for line in first}.isdisjoint(line[0] for line in second)
    first, second = pool.run(file_examples, str(tmp_path), "OFF")
    assert sorted(first) == sorted(second) == lines


def short_on_one_rank(strategy: Any, log: str) -> tuple[int, str]:
    data = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(8 if context.input_pipeline_id == 0 else 4).batch(2)
    )
    # TensorFlow writes to the process's own stderr.
    before = os.dup(2)
    with open(f"{log}.{strategy.rank}", "w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            batches = len(list(data))
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return batches, file.read()


def test_data_that_ends_on_one_rank_ends_for_all(worker_pool: Any, tmp_path: Any) -> None:
    (first, said), (second, _) = worker_pool("tf", 2).run(short_on_one_rank, str(tmp_path / "log"))
    assert (first, second) == (2, 2)
    assert "the data of rank [1] ended before that of the other ranks" in said


def different_orders(strategy: Any) -> str:
    shuffled = tf.data.Dataset.range(8).shuffle(8, seed=strategy.rank).batch(4)
    try:
        strategy.experimental_distribute_dataset(shuffled)
    except tfrep.errors.ConfigurationError as error:
        return str(error)
    return ""


def test_different_orders_are_refused(worker_pool: Any) -> None:
    for text in worker_pool("tf", 2).run(different_orders):
        assert "different orders" in text
        assert "rank_1=" in text


def shuffled_without_seed(strategy: Any) -> list[int]:
    data = tf.data.Dataset.range(32).shuffle(32).batch(8)
    return [int(v) for batch in strategy.experimental_distribute_dataset(data) for v in batch]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_unseeded_shuffle_has_one_order(communicator: str, worker_pool: Any) -> None:
    first, second = worker_pool(communicator, 2).run(shuffled_without_seed)
    assert sorted(first + second) == list(range(32))
    assert first + second != list(range(32))


def test_two_strategies_at_once() -> None:
    strategies = [tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])]
    for strategy in strategies + strategies[::-1]:
        check_replica_context(strategy)


def test_unknown_device_is_named() -> None:
    with pytest.raises(tfrep.errors.ConfigurationError, match="CPU:9.*"):
        tfrep.MirroredStrategy(["CPU:0", "CPU:9"])
    with pytest.raises(tfrep.errors.ConfigurationError, match="device of its own"):
        tfrep.MirroredStrategy(["CPU:0", "CPU:0"])


def test_gradient_hooks() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.gradient_transformers.append(lambda gradients: [2.0 * g for g in gradients])
    with strategy.scope():
        variable = tf.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))
    np.testing.assert_allclose(variable.numpy(), 1.0 - 2 * 2)

    strategy.gradient_aggregator = lambda gradients, communicator: communicator.all_reduce(gradients, "mean")
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))
    np.testing.assert_allclose(variable.numpy(), -3.0 - 2.0)
