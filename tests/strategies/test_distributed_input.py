"""Distributed data: which replica gets what, on which device, until when; eagerly and in functions."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from input_programs import Steps, local_parts, read
from lanes import in_lane
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

_Options = tf.distribute.InputOptions
_PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA


@pytest.fixture(params=["mirrored", *in_lane("input", "tf", "horovod")])
def on_two_replicas(request: pytest.FixtureRequest, worker_pool: Any) -> Callable[..., Any]:
    """Gives `run(program, *args)`, which calls `program(strategy, *args)` and returns what it returned, by process."""
    if request.param == "mirrored":
        return lambda program, *args: [program(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), *args)]
    return worker_pool(request.param, 2).run


def joined(processes: list[Steps]) -> Steps:
    """Puts the replicas of all processes side by side."""
    assert len({len(steps) for steps in processes}) == 1, "the processes have done different numbers of steps"
    return [[part for parts in step for part in parts] for step in zip(*processes, strict=True)]


# Who gets what, until when.


_OWN_PIPELINES: dict[str, Steps] = {
    "scalars": [[0, 1], [2, 3], [4, 0]],
    "unknown rank": [[[0, 1], [2, 3]], [[4], []]],
    "static": [[[0, 1], [2, 3]], [[4, 5], []]],
    "uneven": [[[0, 1], [2, 3]], [[4], []]],
    "zero rows": [[[0], []], [[], []], [[1, 2], [3]]],
}


def read_own_pipelines(strategy: Any, kinds: list[str]) -> dict[str, tuple[Steps, int, int]]:
    import input_programs

    return input_programs.read_own_pipelines(strategy, kinds)


def test_pipelines_of_ones_own_are_read_to_their_end(on_two_replicas: Any) -> None:
    """Their end is that of the data, also where an element tells nothing of how many examples it has."""
    results = on_two_replicas(read_own_pipelines, list(_OWN_PIPELINES))
    for kind, expected in _OWN_PIPELINES.items():
        assert joined([result[kind][0] for result in results]) == expected, kind
        assert {result[kind][1:] for result in results} == {(len(expected),) * 2}, kind


def fit_on_five_batches(strategy: Any, steps_per_epoch: int | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trains on batches of which one replica has one less; and on one device, on the same examples in the same steps."""
    x = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))

    def trained(data: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(data, epochs=2, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0).history
        return [np.array(history["loss"]), np.array(history["mae"]), *model.get_weights()]

    repeated = examples.batch(2).repeat(2 if steps_per_epoch else 1)
    with strategy.scope():
        own = trained(
            strategy.distribute_datasets_from_function(
                lambda context: repeated.shard(context.num_input_pipelines, context.input_pipeline_id)
            )
        )
    return own, trained(examples.repeat(2 if steps_per_epoch else 1).batch(4))


@pytest.mark.parametrize("steps_per_epoch", [None, 2])
def test_every_example_counts_where_one_replica_has_less(steps_per_epoch: int | None, on_two_replicas: Any) -> None:
    for own, one_device in on_two_replicas(fit_on_five_batches, steps_per_epoch):
        for ours, expected in zip(own, one_device, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


Pair = collections.namedtuple("Pair", ["x", "y"])


def read_nests(strategy: Any) -> tuple[Steps, Steps, str]:
    rows = tf.ragged.constant([[[1, 2], []], [], [[3]]], dtype=tf.int64)
    nest = {"ragged": rows, "sparse": tf.sparse.eye(3), "dense": (tf.eye(3), tf.constant(["a", "b", "c"]))}
    data = tf.data.Dataset.from_tensor_slices(nest).batch(2)
    whole = read(strategy, strategy.experimental_distribute_dataset(data))
    own = read(
        strategy,
        strategy.distribute_datasets_from_function(lambda c: data.shard(c.num_input_pipelines, c.input_pipeline_id)),
    )
    pairs = tf.data.Dataset.range(2).batch(2).map(lambda v: Pair(v, -v))
    (pair,) = strategy.experimental_distribute_dataset(pairs)
    return whole, own, type(pair).__name__


def test_nests(on_two_replicas: Any) -> None:
    results = on_two_replicas(read_nests)
    row = [{"ragged": ragged, "sparse": [line], "dense": ([line], [text])} for ragged, line, text in zip(
        [[[[1, 2], []]], [[]], [[[3]]]], np.eye(3).tolist(), [b"a", b"b", b"c"], strict=True
    )]  # fmt: skip
    nothing = {"ragged": [], "sparse": [], "dense": ([], [])}
    assert joined([whole for whole, _, _ in results]) == [[row[0], row[1]], [row[2], nothing]]
    lines = np.eye(3)[:2].tolist()
    both = {"ragged": [[[1, 2], []], []], "sparse": lines, "dense": (lines, [b"a", b"b"])}
    assert joined([own for _, own, _ in results]) == [[both, row[2]]]
    assert {name for _, _, name in results} == {"Pair"}


def read_in_order(strategy: Any) -> tuple[list[Steps], list[list[int]], int]:
    """Reads what is computed in parallel, now fast and now slowly; twice, and once more than there is."""

    def computed(v: tf.Tensor) -> tf.Tensor:
        slow = lambda: v + tf.reduce_sum(tf.cast(tf.random.normal([100_000]) > 100.0, tf.int64))  # noqa: E731
        return tf.cond(v % 7 == 0, slow, lambda: v)

    numbers = lambda: tf.data.Dataset.range(100).map(computed, num_parallel_calls=4).shuffle(50, seed=3)  # noqa: E731
    data = strategy.experimental_distribute_dataset(numbers().batch(6).prefetch(2))
    one_device = numbers()
    iterator = iter(data)
    epochs = [read(strategy, iterator), read(strategy, data)]
    return epochs, [[int(v) for v in one_device] for _ in epochs], len(read(strategy, iterator))


def test_the_order_is_that_of_one_device(on_two_replicas: Any) -> None:
    results = on_two_replicas(read_in_order)
    for epoch in (0, 1):
        steps = joined([epochs[epoch] for epochs, _, _ in results])
        assert len(steps) == 17
        assert [v for step in steps for part in step for v in part] == results[0][1][epoch]
    assert {after_the_end for _, _, after_the_end in results} == {0}


# Loops in functions.


def loop_in_functions(strategy: Any) -> list[list[int]]:
    import input_programs

    return input_programs.loop_in_functions(strategy)


@pytest.mark.lane("input")
def test_loops_in_functions(on_two_replicas: Any) -> None:
    """`enumerate` and `zip` are loops of the graph, with `break`, as `for` alone is."""
    whole, own = 6 * 10 + 15 * 11 + 7 * 12, 3 * 10 + 7 * 11 + 11 * 12 + 7 * 13
    for result in on_two_replicas(loop_in_functions):
        assert result == [
            [whole, own],
            [whole, own, whole, own],
            [6, 3],
            [6, 7],  # The second batch was read, and left.
            [15 * 7 + 2 * 7 * 11] * 2,
            [6000 + 1500 + 28, 3000 + 700 + 28],
        ]


def trace_functions(strategy: Any) -> tuple[int, int, list[Any]]:
    traces = {"same": 0, "relaxed": 0}

    def first_rows(kind: str) -> Any:
        def count(iterator: Any) -> tf.Tensor:
            traces[kind] += 1
            return tf.shape(strategy.experimental_local_results(next(iterator))[0])

        return tf.function(count, reduce_retracing=kind == "relaxed")

    same = first_rows("same")
    for data in (tf.data.Dataset.range(9).batch(3), tf.data.Dataset.range(4).batch(2)):
        for _ in range(2):
            same(iter(strategy.experimental_distribute_dataset(data)))
            same(iter(strategy.distribute_datasets_from_function(lambda _, data=data: data)))
    relaxed = first_rows("relaxed")
    for width in (2, 3, 4, 5):
        relaxed(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.zeros([4, width])))))
    signed = []
    for drop in (True, False):
        whole = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(3, drop_remainder=drop))
        own = strategy.distribute_datasets_from_function(
            lambda c, drop=drop: (
                tf.data.Dataset.range(6).batch(2, drop_remainder=drop).shard(c.num_input_pipelines, c.input_pipeline_id)
            )
        )
        for data in (whole, own):
            for spec in (data.element_spec, iter(data).element_spec):
                run = tf.function(lambda batch: strategy.run(tf.square, args=(batch,)), input_signature=[spec])
                signed.append([local_parts(strategy, run(batch)) for batch in data])
    return traces["same"], traces["relaxed"], signed


def test_functions_are_not_traced_again(on_two_replicas: Any) -> None:
    """One trace serves all data of one kind; an `element_spec` fits as a signature, whatever the parts' sizes are."""
    results = on_two_replicas(trace_functions)
    assert {(same, relaxed) for same, relaxed, _ in results} == {(2, 2)}
    whole, own = [[[0, 1], [4]], [[9, 16], [25]]], [[[0, 1], [4, 9]], [[16, 25], []]]
    for i, expected in enumerate([whole, whole, own, own] * 2):
        assert joined([signed[i] for _, _, signed in results]) == expected


def read_in_replicas(strategy: Any) -> tuple[list[str], list[Steps]]:
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(2))
    own = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(8).batch(1))
    said, left = [], []
    for iterator in (iter(data), iter(own)):

        def take(iterator: Any = iterator) -> Any:
            return next(iterator)

        def take_given(given: Any) -> Any:
            return given.get_next()

        def take_optional(given: Any) -> Any:
            return given.get_next_as_optional().has_value()

        def loop(given: Any) -> Any:
            total = tf.constant(0, tf.int64)
            for batch in given:
                total += tf.reduce_sum(batch)
            return total

        for fn, args in ((take, ()), (take_given, (iterator,)), (take_optional, (iterator,)), (loop, (iterator,))):
            for run in (strategy.run, tf.function(strategy.run)):
                for called in (fn, tf.function(fn)):
                    with pytest.raises(tfrep.errors.ConfigurationError) as error:
                        run(called, args=args)
                    said.append(str(error.value))
        left.append(local_parts(strategy, next(iterator)))
    return said, left


def test_replicas_do_not_read_on_their_own(on_two_replicas: Any) -> None:
    results = on_two_replicas(read_in_replicas)
    for said, _ in results:
        assert len(said) == 32
        for text in said:
            assert "A replica has read from a distributed iterator" in text
            assert "args=(next(iterator),)" in text
    whole, own = ([part for _, left in results for part in left[i]] for i in (0, 1))
    assert whole == [[0], [1]], "nothing was read"
    assert own == ([[0], [1]] if len(results) == 1 else [[0], [0]])


def test_the_only_replica_does_not_read_on_its_own() -> None:
    said, left = read_in_replicas(tfrep.MultiWorkerStrategy())
    assert len(said) == 32
    assert left == [[[0, 1]], [[0]]]


@pytest.mark.lane("input")
def test_a_loop_that_python_would_unroll_for_ever() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))

    @tf.function
    def sums() -> list[tf.Tensor]:
        return [strategy.reduce("SUM", batch, axis=0) for batch in data]

    with refuses(steps=...):
        sums()
    unrolled = tf.function(lambda iterator: [strategy.reduce("SUM", next(iterator), axis=0) for _ in range(2)])
    assert [int(v) for v in unrolled(iter(data))] == [1, 5]


def broken_data(strategy: Any) -> list[int]:
    """Reads data whose third batch is an error; returns how many batches came before it."""

    def checked(v: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(v < 4, ["broken", v])]):
            return tf.identity(v)

    numbers = tf.data.Dataset.range(8).map(checked).batch(2)
    own = numbers.repeat(strategy.extended.num_local_replicas)
    found = []
    for data in (
        strategy.experimental_distribute_dataset(numbers),
        strategy.distribute_datasets_from_function(lambda _: own),
    ):
        seen: list[Any] = []
        with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
            seen.extend(data)
        found.append(len(seen))
    return found


def test_an_error_in_the_data_is_not_its_end() -> None:
    assert broken_data(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])) == [2, 1]
    assert broken_data(tfrep.MultiWorkerStrategy()) == [2, 2]


# `tf.distribute.InputOptions`.


def devices_of(strategy: Any, batch: Any) -> list[str]:
    return [v.backing_device.rpartition("device:")[2] for v in strategy.experimental_local_results(batch)]


_WHERE = {
    "default": (None, ["CPU:1", "CPU:2"]),
    "ahead": (_Options(), ["CPU:1", "CPU:2"]),
    "far ahead": (_Options(experimental_per_replica_buffer_size=3), ["CPU:1", "CPU:2"]),
    "when needed": (_Options(experimental_per_replica_buffer_size=0), ["CPU:1", "CPU:2"]),
    "host": (_Options(experimental_fetch_to_device=False), ["CPU:0", "CPU:0"]),
}


@pytest.mark.parametrize("where", _WHERE)
def test_batches_are_on_the_devices_of_their_replicas(where: str) -> None:
    options, expected = _WHERE[where]
    strategy = tfrep.MirroredStrategy(["CPU:1", "CPU:2"])
    numbers = tf.data.Dataset.range(7)
    whole = strategy.experimental_distribute_dataset(numbers.batch(3), options)
    own = strategy.distribute_datasets_from_function(lambda _: numbers.batch(2), options)
    assert read(strategy, whole) == [[[0, 1], [2]], [[3, 4], [5]], [[6], []]]
    assert read(strategy, own) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    for data in (whole, own):
        assert all(devices_of(strategy, batch) == expected for batch in data)
        taken = tf.function(lambda iterator: strategy.experimental_local_results(next(iterator)))(iter(data))
        assert [v.backing_device.rpartition("device:")[2] for v in taken] == expected
    words = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.constant(["a", "b"])), options)
    assert read(strategy, words) == [[[b"a"], [b"b"]]]


@pytest.mark.parametrize("where", ["default", "ahead"])
def test_fit_on_batches_that_are_moved_ahead(where: str) -> None:
    x = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(4)

    def trained(data: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.fit(data, epochs=3, verbose=0)
        return [model.predict(x, verbose=0), *model.get_weights()]

    strategy = tfrep.MirroredStrategy(["CPU:1", "CPU:2"])
    with strategy.scope():
        ours = trained(strategy.experimental_distribute_dataset(data, _WHERE[where][0]))
    for own, one_device in zip(ours, trained(data), strict=True):
        np.testing.assert_allclose(own, one_device, rtol=1e-5, atol=1e-5)


def contexts_of_pipelines(strategy: Any, mode: tf.distribute.InputReplicationMode) -> tuple[list[Any], Steps]:
    seen = []

    def numbers(context: tf.distribute.InputContext) -> tf.data.Dataset:
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return tf.data.Dataset.range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 3).batch(2)

    options = _Options(experimental_replication_mode=mode)
    return seen, read(strategy, strategy.distribute_datasets_from_function(numbers, options))


def test_each_replica_has_a_pipeline_of_its_own(on_two_replicas: Any) -> None:
    results = on_two_replicas(contexts_of_pipelines, _PER_REPLICA)
    assert [context for seen, _ in results for context in seen] == [(2, 0, 2), (2, 1, 2)]
    assert joined([steps for _, steps in results]) == [[[0, 1], [10, 11]], [[2], [12]]]


def test_each_process_has_a_pipeline_of_its_own(on_two_replicas: Any) -> None:
    results = on_two_replicas(contexts_of_pipelines, tf.distribute.InputReplicationMode.PER_WORKER)
    if len(results) == 1:
        assert results == [([(1, 0, 2)], [[[0, 1], [2]]])]
    else:
        assert [context for seen, _ in results for context in seen] == [(2, 0, 2), (2, 1, 2)]
        assert joined([steps for _, steps in results]) == [[[0, 1], [10, 11]], [[2], [12]]]


@pytest.mark.parametrize(("fetch", "place"), [(True, False), (False, False), (False, True)])
def test_where_the_pipelines_of_replicas_run(fetch: bool, place: bool) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:1", "CPU:2"])
    options = _Options(fetch, _PER_REPLICA, place)
    made_on = []

    def numbers(context: tf.distribute.InputContext) -> tf.data.Dataset:
        made_on.append(tf.constant(0).device.rpartition("device:")[2])
        return tf.data.Dataset.range(3 - 2 * context.input_pipeline_id)

    data = strategy.distribute_datasets_from_function(numbers, options)
    assert made_on == (["CPU:1", "CPU:2"] if place else ["CPU:0", "CPU:0"])
    assert read(strategy, data) == [[0, 0], [1, 0], [2, 0]]
    expected = ["CPU:1", "CPU:2"] if fetch or place else ["CPU:0", "CPU:0"]
    assert all(devices_of(strategy, batch) == expected for batch in data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (_Options(experimental_place_dataset_on_device=True), {"hint": "PER_REPLICA"}),
        (_Options(True, _PER_REPLICA, True), {"hint": "experimental_fetch_to_device=False"}),
        (_Options(experimental_per_replica_buffer_size=-1), {"experimental_per_replica_buffer_size": -1}),
    ],
)
def test_options_that_cannot_be_followed(options: Any, said: dict[str, Any]) -> None:
    for strategy in (tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), tfrep.MultiWorkerStrategy()):
        with refuses(**said):
            strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(3), options)
        with refuses(**said):
            strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2), options)


def test_one_data_set_cannot_be_read_by_each_replica() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    options = _Options(experimental_replication_mode=_PER_REPLICA)
    with refuses(hint="distribute_datasets_from_function", experimental_replication_mode=...):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2), options)


def test_a_function_that_returns_no_data_set() -> None:
    with refuses(returned="list"):
        tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).distribute_datasets_from_function(lambda _: [1, 2])


@pytest.mark.parametrize("who", ["data set", "options"])
def test_nothing_is_read_before_it_is_needed_where_somebody_wants_that(who: str) -> None:
    taken = itertools.count()
    data = tf.data.Dataset.from_generator(
        lambda: (next(taken) for _ in range(50)), output_signature=tf.TensorSpec([], tf.int64)
    ).batch(2)
    options = None
    if who == "options":
        options = _Options(experimental_per_replica_buffer_size=0)
    else:
        at_once = tf.data.Options()
        at_once.experimental_optimization.inject_prefetch = False
        data = data.with_options(at_once)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = iter(strategy.experimental_distribute_dataset(data, options))
    assert local_parts(strategy, next(iterator)) == [[0], [1]]
    assert local_parts(strategy, next(iterator)) == [[2], [3]]
    assert next(taken) == 4


def test_data_without_an_end_keeps_its_shape() -> None:
    """No replica will ever lack a batch, so that the size of a batch stays known."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    endless = tf.data.Dataset.range(4).repeat().batch(2, drop_remainder=True)
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: endless))
    shapes: list[Any] = []

    @tf.function
    def step(iterator: Any) -> Any:
        batch = next(iterator)
        shapes.extend(tuple(v.shape) for v in strategy.experimental_local_results(batch))
        return batch

    assert [local_parts(strategy, step(iterator)) for _ in range(3)] == [[[0, 1], [2, 3]]] * 3
    assert shapes == [(2,), (2,)]
