"""Who reads what: the parts of one pipeline, pipelines of one's own, their order and their end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.data.agreement import Agreement
from tfrep_strategy.data.distribution import LocalReplicas, _destinations

pytestmark = pytest.mark.lane("input")


def saying(log: str, work: Callable[[], Any]) -> str:
    """Returns what `work()` writes to the process's own stderr, as TensorFlow does; `log` is a file for it."""
    before = os.dup(2)
    with open(log, "w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            work()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read()


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


def short_on_one_rank(strategy: Any) -> list[list[int]]:
    data = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(8 if context.input_pipeline_id == 0 else 4).batch(2)
    )
    return [batch.numpy().tolist() for batch in data]


def test_a_rank_whose_data_has_ended_takes_part_with_empty_batches(worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(short_on_one_rank)
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second == [[0, 1], [2, 3], [], []]


def sequences_short_on_one_rank(strategy: Any) -> tuple[list[Any], list[float]]:
    def sequences(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = tf.data.Dataset.range(8 if context.input_pipeline_id == 0 else 4)
        return rows.map(lambda row: (tf.zeros([row % 3 + 3, 2]), 1.0)).padded_batch(2)

    shapes = [images.shape.as_list() for images, _ in strategy.distribute_datasets_from_function(sequences)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((None, 2)), keras.layers.Conv1D(3, 3), keras.layers.LSTM(1)])
        model.compile("sgd", "mse")
    history = model.fit(strategy.distribute_datasets_from_function(sequences), epochs=2, verbose=0)
    return shapes, history.history["loss"]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_empty_batches_are_as_long_as_those_of_others(communicator: str, worker_pool: Any) -> None:
    (first, losses), (second, same_losses) = worker_pool(communicator, 2).run(sequences_short_on_one_rank)
    assert first == [[2, 4, 2], [2, 5, 2], [2, 5, 2], [2, 4, 2]]
    assert second == [[2, 4, 2], [2, 5, 2], [0, 5, 2], [0, 4, 2]]
    assert losses == same_losses
    assert np.isfinite(losses).all()


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


def unordered(strategy: Any) -> tuple[str, list[int]]:
    read = lambda v: tf.data.Dataset.range(4 * v, 4 * v + 4)  # noqa: E731
    refused = tf.data.Dataset.range(8).map(lambda v: v, num_parallel_calls=4, deterministic=False).batch(4)
    options = tf.data.Options()
    options.deterministic = False
    taken = tf.data.Dataset.range(8).interleave(read, cycle_length=4, num_parallel_calls=4).batch(8).with_options(options)
    seen = [int(v) for batch in strategy.experimental_distribute_dataset(taken) for v in batch]
    try:
        strategy.experimental_distribute_dataset(refused)
    except tfrep.errors.ConfigurationError as error:
        return str(error), seen
    return "", seen


def test_data_without_an_order(worker_pool: Any) -> None:
    """Where nothing in particular is said about one operation, the ranks read in one order; else they say what it is."""
    (text, first), (_, second) = worker_pool("tf", 2).run(unordered)
    assert "ParallelMapDataset" in text
    assert "deterministic=False" in text
    assert sorted(first + second) == list(range(32))


def shorter_on_one_rank(strategy: Any) -> tuple[int, list[str]]:
    rows = 16 if strategy.rank == 0 else 8
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = tf.data.Dataset.from_tensor_slices((np.ones((rows, 2)), np.ones((rows, 1)))).batch(4)
        model.fit(data, verbose=0, callbacks=[count])
    return len(steps), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_fit_ends_for_all_with_the_shortest_data(communicator: str, worker_pool: Any) -> None:
    for steps, said in worker_pool(communicator, 2).run(shorter_on_one_rank):
        assert steps == 2
        assert any("Ranks [1] have fewer batches than the others" in text for text in said)


def shuffled_without_seed(strategy: Any) -> list[list[int]]:
    data = tf.data.Dataset.range(32).shuffle(32).batch(8)
    return [[int(v) for v in batch] for batch in strategy.experimental_distribute_dataset(data)]


@pytest.mark.lane("quick")
def test_one_process_shuffles_as_it_likes() -> None:
    assert sorted(sum(shuffled_without_seed(tfrep.MultiWorkerStrategy()), [])) == list(range(32))


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_unseeded_shuffle_has_one_order(communicator: str, worker_pool: Any) -> None:
    first, second = worker_pool(communicator, 2).run(shuffled_without_seed)
    order = [row for halves in zip(first, second, strict=True) for half in halves for row in half]
    assert sorted(order) == list(range(32))
    assert order != list(range(32))


_SHUFFLES = Path(__file__).with_name("scripts") / "shuffles.py"


def drawn_without_a_global_seed() -> tuple[list[int], list[float]]:
    strategy = tfrep.auto_strategy()
    draw = tf.function(lambda: strategy.run(lambda: tf.random.uniform([])))
    order = [int(v) for v in tf.data.Dataset.range(32).shuffle(32, seed=7)]
    return order, [float(v) for v in strategy.extended.all_gather_object(float(strategy.experimental_local_results(draw())[0]))]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_shuffle_with_a_seed_of_its_own_has_the_order_of_one_device(communicator: str) -> None:
    expected = json.loads(subprocess.run([sys.executable, _SHUFFLES], capture_output=True, check=True, timeout=60).stdout)
    runs = [tfrep.launch(drawn_without_a_global_seed, num_replicas=2, communicator=communicator) for _ in range(2)]
    assert [order for run in runs for order, _ in run] == 4 * [expected]
    assert len({number for run in runs for number in run[0][1]}) == 4, "what has no seed differs between ranks and runs"


def cached_in_a_file(strategy: Any, folder: str) -> list[list[int]]:
    data = tf.data.Dataset.range(10).map(lambda v: 2 * v).cache(os.path.join(folder, "rows")).batch(4)
    distributed = strategy.experimental_distribute_dataset(data)
    return [[int(v) for batch in distributed for v in batch] for _ in range(2)]


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_data_cached_in_a_file(communicator: str, worker_pool: Any, tmp_path: Any) -> None:
    first, second = worker_pool(communicator, 2).run(cached_in_a_file, str(tmp_path))
    for a, b in zip(first, second, strict=True):
        assert sorted(a + b) == list(range(0, 20, 2))
    assert sorted(path.name for path in tmp_path.glob("rows*.index")) == ["rows.index", "rows.rank-1.index"]


def unequal_data(kind: str, rank: int) -> Any:
    """Global batches of rows (x, y): four on rank 0, two on rank 1, of which not every rank can tell how many there are."""
    steps = 4 if rank == 0 else 2
    rows = [(np.full((4, 2), i, np.float32), np.full((4, 1), i, np.float32)) for i in range(steps)]
    if kind == "generator" or (kind == "known on one rank" and rank == 0):
        return (row for row in rows)
    data = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(v) for v in zip(*rows, strict=True))).batch(4)
    return data.filter(lambda *_: True) if kind == "filtered" else data


def trained_on(data: Callable[[], Any], steps_per_execution: int) -> tuple[int, int, list[np.ndarray]]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model.fit(data(), verbose=0)
    return int(model.optimizer.iterations), len(model.predict(data(), verbose=0)), model.get_weights()


def fit_on_unequal_data(strategy: Any, kind: str, log: str, steps_per_execution: int) -> tuple[Any, Any, str]:
    trained = []

    def train() -> None:
        with strategy.scope():
            trained.append(trained_on(lambda: unequal_data(kind, strategy.rank), steps_per_execution))

    said = saying(f"{log}.{strategy.rank}", train)
    alone = trained_on(lambda: unequal_data(kind, 1), steps_per_execution)
    return trained[0], alone, said


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("kind", ["generator", "filtered", "known on one rank"])
def test_fit_ends_for_all_where_length_is_unknown(
    kind: str, steps_per_execution: int, communicator: str, worker_pool: Any, tmp_path: Any
) -> None:
    """What is trained is what one device trains on the shortest data."""
    # With one step per execution Keras counts the read that finds the end as a step, if the data does not tell its length.
    counted = 2 if steps_per_execution > 1 else 3
    results = worker_pool(communicator, 2).run(fit_on_unequal_data, kind, str(tmp_path / "log"), steps_per_execution)
    for (steps, predictions, weights), (_, predictions_alone, weights_alone), said in results:
        assert steps == counted
        assert predictions == predictions_alone == 8
        for ours, one_device in zip(weights, weights_alone, strict=True):
            np.testing.assert_allclose(ours, one_device, rtol=0, atol=1e-6)
        assert "the data of rank [1] ended before that of the other ranks" in said


def batches_of_different_sizes(strategy: Any) -> str:
    generator = lambda: (np.ones(6 if step == 1 and strategy.rank == 1 else 4, np.float32) for step in range(3))  # noqa: E731
    data = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([None]))
    read = []
    try:
        for batch in strategy.experimental_distribute_dataset(data):
            read.append(batch)
    except tf.errors.InvalidArgumentError as error:
        return f"{len(read)} {error}"
    return ""


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_ranks_that_read_different_data(communicator: str, worker_pool: Any) -> None:
    for said in worker_pool(communicator, 2).run(batches_of_different_sizes):
        assert said.startswith("1 ")
        assert "The ranks read different batches" in said
        assert re.search("4,? 6", said)


@pytest.mark.parametrize(
    ("spec", "is_ahead"),
    [
        ((tf.TensorSpec([None, 224, 224, 3]), tf.TensorSpec([None], tf.int64)), True),
        ((tf.TensorSpec([None, 32, 32, 3], tf.uint8), tf.TensorSpec([None], tf.int64)), False),
        (tf.TensorSpec([4096, 32, 32, 3], tf.uint8), True),
        (tf.TensorSpec([None, None]), False),
        (tf.TensorSpec([], tf.float32), False),
        ((tf.TensorSpec([None, 224, 224, 3]), tf.TensorSpec([None], tf.string)), False),
    ],
)
def test_only_large_batches_are_moved_to_gpus_ahead(spec: Any, is_ahead: bool) -> None:
    for kind, expected in (("GPU", int(is_ahead)), ("CPU", 0)):
        devices = (f"/device:{kind}:0", f"/device:{kind}:1")
        replicas = LocalReplicas(0, devices, Agreement(0, 1, tf.identity, False))
        assert _destinations(replicas, None, spec) == (devices, expected)
