"""The example programs on every strategy, unchanged, with the answer of one replica; and what `Replicator` refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import replicator_programs
import tensorflow as tf
from lanes import in_lane
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")


@pytest.fixture(params=["one", "mirrored", *in_lane("loops", "tf", "horovod")])
def everywhere(request, worker_pool):
    """Gives `everywhere(name, mode)`, which runs a program in every process of a strategy of two replicas."""
    if request.param in ("tf", "horovod"):
        return lambda *args: worker_pool(request.param, 2).run(replicator_programs.run, *args, limit=240)
    devices = ["CPU:0", "CPU:1"][: 1 if request.param == "one" else 2]
    return lambda *args: [replicator_programs.run(tfrep.MirroredStrategy(devices), *args)]


@pytest.fixture(scope="module")
def one_replica():
    known = {}

    def answer(name):
        if name not in known:
            known[name] = replicator_programs.run(tfrep.MirroredStrategy(["CPU:3"]), name, "SINGLE")
        return known[name]

    return answer


@pytest.mark.parametrize("name", ["classification", "gan", "global_batch_norm"])
def test_programs_give_the_answer_of_one_replica(everywhere, one_replica, name):
    losses, weights = one_replica(name)
    for found_losses, found_weights in everywhere(name, "SINGLE"):
        np.testing.assert_allclose(tf.nest.flatten(found_losses), tf.nest.flatten(losses), rtol=1e-4)
        for found, wanted in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "mode"), [("sonnet", "PER_REPLICA"), ("numbered_queue", "SINGLE")])
def test_programs_of_their_own_answer(everywhere, name, mode):
    everywhere(name, mode)


def test_queues_of_the_same_examples(everywhere, one_replica):
    """The mean of gradients is the gradient of each replica."""
    for weights in everywhere("reinforcement_learning", "PER_REPLICA"):
        for found, wanted in zip(weights, one_replica("reinforcement_learning"), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.lane("loops")
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_classification_with_sharded_pipelines(everywhere, one_replica, mode):
    """Each pipeline has every other row, so that all batches together are the batch of one replica."""
    wanted_losses, wanted_weights = one_replica("classification")
    results = everywhere("classification", mode)
    for losses, weights in results:
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
        for found, same, wanted in zip(weights, results[0][1], wanted_weights, strict=True):
            np.testing.assert_array_equal(found, same)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def _pair():
    return tfrep.Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))


@pytest.mark.parametrize("make_strategy", [tfrep.MirroredStrategy, tf.distribute.MirroredStrategy])
def test_input_modes_call_as_often_as_they_say(make_strategy):
    for mode, expected in (("SINGLE", [(1, 0)]), ("PER_WORKER", [(1, 0)]), ("PER_REPLICA", [(2, 0), (2, 1)])):
        calls = []

        def input_fn(ctx, calls=calls):
            calls.append((ctx.num_input_pipelines, ctx.input_pipeline_id))
            return tf.data.Dataset.range(8).batch(1)

        modes = tfrep.InputReplicationMode
        repl = tfrep.Replicator(make_strategy(["CPU:0", "CPU:1"]), input_replication_mode=modes[mode])
        step = tf.reduce_sum
        seen = [[int(v) for v in repl.local_results(repl.run(step, input_fn))] for _ in range(2)]
        assert calls == expected
        assert seen == ([[0, 0], [1, 1]] if mode == "PER_REPLICA" else [[0, 1], [2, 3]])


@pytest.mark.parametrize("steps", [1, 2])
def test_data_that_ends_in_the_middle_of_a_step(capfd, steps):
    """A replica without a batch would make every mean NaN."""
    repl = _pair()

    def input_fn():
        return tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0]).batch(1)

    if steps == 1:
        assert float(repl.reduce(repl.run(tf.reduce_mean, input_fn))) == 1.5
        assert "left out" not in capfd.readouterr().err
    with pytest.raises(tf.errors.OutOfRangeError):
        repl.run(tf.reduce_mean, input_fn, steps=steps)
    assert "the middle of a step. The step is left out. Replicas without a batch: [1]" in capfd.readouterr().err


def test_scalars_that_end_in_the_middle_of_a_step(capfd):
    repl = _pair()

    def input_fn():
        return tf.data.Dataset.range(5)

    found = [[int(v) for v in repl.local_results(repl.run(tf.identity, input_fn))] for _ in range(2)]
    assert found == [[0, 1], [2, 3]]
    with pytest.raises(tf.errors.OutOfRangeError):
        repl.run(tf.identity, input_fn)
    assert "Replicas without a batch: [1]" in capfd.readouterr().err


def test_compiles_once_and_keeps_the_iterator():
    repl, traces = _pair(), []

    def step(batch):
        traces.append(tfrep.replica_id())
        return tf.reduce_sum(batch)

    def input_fn():
        return tf.data.Dataset.range(12).batch(1)

    results = [[int(v) for v in repl.local_results(repl.run(step, input_fn))] for _ in range(3)]
    assert results == [[0, 1], [2, 3], [4, 5]]
    assert traces == [0, 1]
    assert [int(v) for v in repl.local_results(repl.run(step, input_fn, steps=3))] == [10, 11]
    with pytest.raises(tf.errors.OutOfRangeError):
        repl.run(step, input_fn)


def test_refuses():
    repl = _pair()
    with refuses(told=["replica 0"], returned="loss"):
        repl.run(lambda: {"a": tf.ones([]), "b": "loss"})
    with refuses(global_batch_size=7, num_replicas_in_sync=2, input_pipeline_id=0):
        repl.run(tf.reduce_sum, lambda ctx: tf.data.Dataset.range(9).batch(ctx.get_per_replica_batch_size(7)))
    with refuses(told=["tf.data.Dataset"], returned=...):
        repl.run(tf.reduce_sum, lambda: [1, 2])
    with refuses(steps=0):
        repl.run(lambda: tf.ones([]), steps=0)
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD())
    with refuses(optimizer=...):
        repl.wrap_optimizer(optimizer)
    with refuses(type="str"):
        repl.wrap_optimizer("sgd")
    repl.shutdown()
    with refuses(hint="make a new one."):
        repl.run(lambda: tf.ones([]))
    with refuses(input_replication_mode="single"):
        tfrep.Replicator(tfrep.MirroredStrategy(["CPU:0"]), input_replication_mode="single")


@pytest.mark.lane("loops")
def test_replicators_of_another_strategy():
    servers = tf.distribute.ParameterServerStrategy
    with refuses(hint="ParameterServerReplicator", strategy=...):
        tfrep.Replicator(servers.__new__(servers))
    with refuses(type="MirroredStrategy"):
        tfrep.ParameterServerReplicator(tfrep.MirroredStrategy(["CPU:0"]))


def test_a_strategy_of_tensorflow_itself(one_replica, stock_mirrored):
    """The path that a TPU takes: `tf.distribute`'s own strategy, Keras's own aggregation, and two collectives."""
    _, weights = replicator_programs.run(stock_mirrored, "global_batch_norm", "PER_WORKER")
    for found, wanted in zip(weights, one_replica("global_batch_norm")[1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    repl = tfrep.Replicator(stock_mirrored)

    def input_fn(ctx):
        return tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(ctx.get_per_replica_batch_size(2))

    def step(x):
        return tfrep.all_reduce(x, "max"), tfrep.all_gather(x)

    largest, everyone = repl.run(step, input_fn)
    assert [v.numpy().tolist() for v in repl.local_results(largest)] == [[2.0], [2.0]]
    assert repl.local_results(everyone)[1].numpy().tolist() == [1.0, 2.0]
    with refuses(global_batch_size=3, num_replicas_in_sync=2, input_pipeline_id=...):
        repl.run(step, lambda ctx: tf.data.Dataset.range(4).batch(ctx.get_per_replica_batch_size(3)))
    with refuses(strategy="MirroredStrategy", returned=...):
        repl.run(step, lambda: lambda: tf.ones([1]))


class _Weight:
    """A step that pulls a weight towards the mean of a batch, and what a replicator makes of it."""

    def __init__(self, repl):
        self.repl = repl
        with repl.context():
            self.weight = keras.Variable(0.0)
            self.optimizer = keras.optimizers.SGD(1.0)

    def step(self, batch=None):
        target = tf.reduce_mean(tf.cast(1.0 if batch is None else batch, tf.float32))
        with tf.GradientTape() as tape:
            loss = -self.weight * target
        self.optimizer.apply(tape.gradient(loss, [self.weight]), [self.weight])
        return loss

    def after(self, *runs):
        for input_fn, steps in runs:
            self.repl.run(self.step, input_fn, steps=steps)
        return float(self.weight)


@pytest.mark.parametrize("mode", ["SINGLE", "PER_WORKER", "PER_REPLICA"])
def test_python_makes_a_batch_for_each_step(mode):
    """Each is used once and in order, also those that were made while the step was compiled, in loops too."""

    def input_fn(ctx):
        numbers = iter(range(ctx.input_pipeline_id, 1000, ctx.num_input_pipelines))
        return lambda: np.full([3], next(numbers), np.float32)

    repl = tfrep.Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), input_replication_mode=tfrep.InputReplicationMode[mode])
    assert _Weight(repl).after((input_fn, 1), (input_fn, 1), (input_fn, 1), (input_fn, 4)) == sum(range(14)) / 2


def test_constants_of_python_are_made_for_each_step():
    repl, numbers = tfrep.Replicator(tfrep.MirroredStrategy(["CPU:0"])), iter(range(10))
    values = [repl.run(lambda batch: 2 * batch, lambda: lambda: tf.constant(next(numbers))) for _ in range(3)]
    assert [int(value) for value in values] == [0, 2, 4]


def test_batches_of_python_may_have_other_numbers_of_rows_but_no_other_dtype():
    batches = iter([{"a": np.ones([2, 3]), "b": 1}, {"a": np.ones([5, 3]), "b": 2}, {"a": np.ones([5, 3]), "b": 2.5}])
    repl, taken = tfrep.Replicator(tfrep.MirroredStrategy(["CPU:0"])), lambda: lambda: next(batches)
    step = lambda batch: tf.shape(batch["a"])[0] + batch["b"]  # noqa: E731
    assert [int(repl.run(step, taken)), int(repl.run(step, taken))] == [3, 7]
    with pytest.raises(tf.errors.OpError, match="A batch has another dtype, or other rows"):
        repl.run(step, taken)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_of_steps_without_batches_are_averaged(replicas):
    repl = tfrep.Replicator(tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]))
    assert _Weight(repl).after((None, 1), (None, 2)) == pytest.approx(3.0)


def _without_batches(strategy):
    return _Weight(tfrep.Replicator(strategy)).after((None, 2))


@pytest.mark.lane("loops")
def test_gradients_of_steps_without_batches_are_averaged_over_processes(worker_pool):
    assert worker_pool("tf", 2).run(_without_batches) == pytest.approx([2.0, 2.0])
