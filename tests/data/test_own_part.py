"""Parts of batches that are computed alone equal those that are cut from whole batches, bit by bit."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import in_lane

from tfrep_strategy.core.tf import dataset_kinds, parts_of_dataset
from tfrep_strategy.data.agreement import Agreement, Fingerprint, FirstBatch
from tfrep_strategy.data.batches import shard
from tfrep_strategy.data.distribution import LocalReplicas, distribute
from tfrep_strategy.data.own_part import CutDataset, OwnReplicas, cut_low, seed_generator
from tfrep_strategy.data.step_clock import StepClock
from tfrep_strategy.keras_integration.internals import array_data_adapter

Dataset = tf.data.Dataset
_X = np.random.RandomState(0).rand(23, 4).astype("float32")
_Y = np.arange(23) % 3


@tf.autograph.experimental.do_not_convert
def halves(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float32) * 0.5


@tf.autograph.experimental.do_not_convert
def draws(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float32) + tf.random.uniform([], seed=1)


@tf.autograph.experimental.do_not_convert
def centres(batch: tf.Tensor) -> tf.Tensor:
    return batch - tf.reduce_mean(batch)


@tf.autograph.experimental.do_not_convert
def doubles(batch: tf.Tensor) -> tf.Tensor:
    return batch * 2


@tf.autograph.experimental.do_not_convert
def ragged(value: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_tensor(tf.range(value)[tf.newaxis])


@tf.autograph.experimental.do_not_convert
def sparse(value: tf.Tensor) -> tf.SparseTensor:
    return tf.sparse.from_dense(tf.one_hot(value, 30))


@tf.autograph.experimental.do_not_convert
def named(value: tf.Tensor) -> dict[str, tf.Tensor]:
    return {"a": halves(value), "b": tf.fill([3], value)}


@tf.autograph.experimental.do_not_convert
def doubles_first(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x * 2, y


@tf.autograph.experimental.do_not_convert
def of_open_length(value: tf.Tensor) -> tf.Tensor:
    return tf.fill([value * 0 + 3], value)


@tf.autograph.experimental.do_not_convert
def of_open_rank(value: tf.Tensor) -> tf.Tensor:
    return tf.io.parse_tensor(tf.io.serialize_tensor(tf.fill([2, 3], value)), tf.int64)


@tf.autograph.experimental.do_not_convert
def sparse_of_open_size(value: tf.Tensor) -> tf.SparseTensor:
    return tf.sparse.from_dense(tf.range(value % 5 + 1))


@tf.autograph.experimental.do_not_convert
def beside_nothing(value: tf.Tensor) -> tuple[tf.Tensor, None]:
    return value * 2, None


@tf.autograph.experimental.do_not_convert
def draws_beside_nothing(value: tf.Tensor) -> tuple[tf.Tensor, None]:
    return draws(value), None


@tf.autograph.experimental.do_not_convert
def still_beside_nothing(value: tf.Tensor, _: None) -> tuple[tf.Tensor, None]:
    return value * 2, None


@tf.autograph.experimental.do_not_convert
def beside_its_mean(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return batch, tf.reduce_mean(batch, 0, keepdims=True)


@tf.autograph.experimental.do_not_convert
def swapped(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return y, x


@tf.autograph.experimental.do_not_convert
def divides_by_size(batch: tf.Tensor) -> tf.Tensor:
    return batch / tf.cast(tf.shape(batch)[0], tf.float32)


@tf.autograph.experimental.do_not_convert
def expects_a_size(batch: tf.Tensor) -> tf.Tensor:
    if batch.shape[0] != 4:
        raise ValueError
    return batch * 2


@tf.autograph.experimental.do_not_convert
def draws_in_python(batch: tf.Tensor) -> tf.Tensor:
    return batch * int(np.random.randint(1 << 30))


def scaled_in_a_loop(drop_remainder: bool) -> tf.data.Dataset:
    data = numbers().map(halves).batch(4, drop_remainder=drop_remainder)
    for scale in (2.0, 3.0):
        data = data.map(lambda batch: batch * scale)  # noqa: B023 Both functions were traced with their own scale.
    return data


def counted_by_a_table() -> tf.data.Dataset:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    @tf.autograph.experimental.do_not_convert
    def inserted(value: tf.Tensor) -> tf.Tensor:
        table.insert(value, value * 2)
        return value

    def looked_up(value: tf.Tensor) -> tf.Tensor:
        return table.lookup(value + 1)

    return numbers().map(inserted).map(tf.autograph.experimental.do_not_convert(looked_up)).batch(4)


def beside_a_constant(data: tf.data.Dataset, constant: Any) -> tf.data.Dataset:
    return Dataset.zip((data, Dataset.from_tensors(constant).repeat()))


def of_keras(**options: Any) -> tf.data.Dataset:
    """The pipeline that `fit` makes of arrays."""
    tf.random.set_seed(1)
    return array_data_adapter.ArrayDataAdapter(_X, _Y, batch_size=5, **options).get_tf_dataset()


def numbers() -> tf.data.Dataset:
    return Dataset.range(23)


PIPELINES: dict[str, tuple[Callable[[], tf.data.Dataset], tuple[str, ...], str]] = {
    "shuffle, map, batch": (lambda: numbers().shuffle(9, seed=1).map(halves, 4).batch(5).prefetch(2), ("batch", "map(halves)"), ""),
    "drop_remainder": (lambda: numbers().map(halves).batch(5, drop_remainder=True), ("batch", "map(halves)"), ""),
    "fewer rows than replicas": (lambda: numbers().map(halves).batch(2, True), ("batch", "map(halves)"), ""),
    "maps on both sides": (lambda: numbers().map(halves).batch(6).map(doubles), ("map(doubles)", "batch", "map(halves)"), ""),
    "side by side": (
        lambda: Dataset.zip((numbers().map(halves), {"n": Dataset.range(30).map(doubles)})).batch(4),
        ("batch", "map(halves) and map(doubles)"),
        "",
    ),
    "a last batch of three rows": (lambda: Dataset.range(23).map(halves, 2).batch(10), ("batch", "map(halves)"), ""),
    "a last batch of one row, of an open length": (
        lambda: numbers().map(of_open_length).batch(11),
        ("batch", "map(of_open_length)"),
        "",
    ),
    "a last batch of one row, of an open number of dimensions": (
        lambda: numbers().map(of_open_rank).batch(11),
        ("batch", "map(of_open_rank)"),
        "",
    ),
    "sparse examples of open sizes": (
        lambda: numbers().map(sparse_of_open_size).batch(5),
        (),
        "the size of a batch of sparse examples is that of its largest",
    ),
    "None": (lambda: numbers().map(beside_nothing).batch(11), ("batch", "map(beside_nothing)"), ""),
    "None in what is drawn": (
        lambda: numbers().map(draws_beside_nothing).map(still_beside_nothing).batch(4),
        (),
        "the results of `map(draws_beside_nothing)` may depend on the order of its calls (RandomUniform)",
    ),
    "tensors of different numbers of rows": (
        lambda: Dataset.from_tensors((_X, _X[:1])).map(lambda x, row: x + row),
        (),
        "",
    ),
    "a function of the batch's size": (
        lambda: numbers().map(halves).batch(4, drop_remainder=True).map(divides_by_size),
        (),
        "`map(divides_by_size)` gets whole batches, and may mix their rows or draw numbers (it knows the size of its batches)",
    ),
    "a function of one size": (
        lambda: numbers().map(halves).batch(4, drop_remainder=True).map(expects_a_size),
        (),
        "`map(expects_a_size)` gets whole batches, and may mix their rows or draw numbers (it knows the size of its batches)",
    ),
    "a function of no size": (
        lambda: numbers().map(halves).batch(4, drop_remainder=True).map(doubles),
        ("map(doubles)", "batch", "map(halves)"),
        "",
    ),
    "a variable of Python's": (lambda: scaled_in_a_loop(False), ("map", "map", "batch", "map(halves)"), ""),
    "a variable of Python's, and one size": (
        lambda: scaled_in_a_loop(True),
        ("map",),
        "`map` gets whole batches, and may mix their rows or draw numbers (it knows the size of its batches)",
    ),
    "a table that is changed": (
        counted_by_a_table,
        (),
        "the results of `map(looked_up)` may depend on the order of its calls (LookupTableInsertV2)",
    ),
    "beside a constant": (
        lambda: beside_a_constant(numbers().map(halves).batch(4, drop_remainder=True), tf.range(4)),
        ("batch", "map(halves)"),
        "",
    ),
    "behind numbers": (
        lambda: Dataset.zip((Dataset.range(9), numbers().map(halves).batch(4))),
        ("batch", "map(halves)"),
        "",
    ),
    "with a constant": (
        lambda: beside_a_constant(numbers().map(halves).batch(4), 2.0).map(lambda batch, constant: batch * constant),
        ("map", "batch", "map(halves)"),
        "",
    ),
    "no rows": (lambda: numbers().skip(23).map(halves).batch(4), ("batch", "map(halves)"), ""),
    "no end": (lambda: numbers().repeat().map(halves).batch(5).take(7), ("batch", "map(halves)"), ""),
    "counted": (lambda: numbers().map(halves).repeat(2).skip(3).batch(4).repeat(2).take(9), ("batch", "map(halves)"), ""),
    "one order": (
        lambda: numbers().map(halves).shuffle(23, seed=2, reshuffle_each_iteration=False).batch(4),
        ("batch", "map(halves)"),
        "",
    ),
    "one order for None": (
        lambda: numbers().map(halves).shuffle(23, seed=2, reshuffle_each_iteration=None).batch(4),
        ("batch", "map(halves)"),
        "",
    ),
    "taken in turn, one without an end": (
        lambda: (
            Dataset.choose_from_datasets([Dataset.range(9).repeat(), Dataset.range(100, 107).repeat()], Dataset.range(2).repeat(10))
            .map(halves)
            .batch(8)
        ),
        ("batch", "map(halves)"),
        "",
    ),
    "a mean beside its batch": (
        lambda: Dataset.from_tensor_slices(_X).map(halves).batch(8).map(beside_its_mean).map(tf.subtract),
        (),
        "`map(subtract)` gets whole batches, and may mix their rows or draw numbers (tensors that may have different numbers",
    ),
    "streams of other sizes, swapped": (
        lambda: Dataset.zip((numbers().map(halves).batch(6), Dataset.range(8).batch(2))).map(swapped),
        (),
        "`map(swapped)` gets whole batches, and may mix their rows or draw numbers (tensors that may have different numbers",
    ),
    "streams of one size, swapped": (
        lambda: Dataset.zip((numbers().map(halves).batch(6), Dataset.range(23).map(doubles).batch(6))).map(swapped),
        ("map(swapped)", "batch", "map(halves)", "batch", "map(doubles)"),
        "",
    ),
    "nests": (lambda: numbers().map(named).batch(4), ("batch", "map(named)"), ""),
    "ragged": (lambda: numbers().map(ragged).batch(2), ("batch", "map(ragged)"), ""),
    "sparse": (lambda: numbers().map(sparse).batch(4), ("batch", "map(sparse)"), ""),
    "text": (lambda: numbers().map(tf.strings.as_string).batch(4), ("batch", "map(as_string)"), ""),
    "unknown length": (lambda: numbers().filter(lambda v: v % 5 > 0).map(halves).batch(4), ("batch", "map(halves)"), ""),
    "slices": (
        lambda: Dataset.from_tensor_slices((_X, _Y)).batch(4).map(doubles_first),
        ("map(doubles_first)",),
        "",
    ),
    "arrays": (of_keras, ("map(grab_batch)",), ""),
    "arrays without a batch's shuffle": (lambda: of_keras(shuffle="batch"), ("map(grab_batch)",), ""),
    "shuffle after map": (
        lambda: numbers().map(halves).shuffle(9, seed=2).map(doubles).shuffle(9, seed=3).repeat(2).batch(4),
        ("batch", "map(doubles)", "map(halves)"),
        "",
    ),
    "filter after map": (
        lambda: numbers().map(halves).filter(lambda v: v > 2).batch(4),
        (),
        "`filter` comes after `map`",
    ),
    "interleave before map": (
        lambda: numbers().shuffle(9, seed=1).interleave(lambda v: Dataset.from_tensors(v).repeat(2), 3).map(halves).batch(4),
        ("batch", "map(halves)"),
        "",
    ),
    "flat_map after map": (
        lambda: numbers().map(halves).flat_map(lambda v: Dataset.from_tensors(v).repeat(2)).batch(4),
        (),
        "`flat_map` comes after `map`",
    ),
    "interleave after map": (
        lambda: numbers().map(halves).interleave(lambda v: Dataset.from_tensors(v).repeat(2), 3, num_parallel_calls=2).batch(4),
        (),
        "`interleave` comes after `map`",
    ),
    "interleave that maps": (
        lambda: numbers().shuffle(9, seed=1).interleave(lambda v: Dataset.from_tensors(v).map(halves).repeat(2), 3).batch(4),
        (),
        "`interleave` maps in its function; write `map` after it",
    ),
    "maps of TensorFlow's own": (lambda: numbers().batch(3).unbatch().filter(lambda n: n >= 0).batch(4), (), ""),
    "cache after map": (lambda: numbers().map(halves).cache().batch(4), (), "`cache` comes after `map`"),
    "cache after batch": (lambda: numbers().map(halves).batch(4).cache(), (), "`cache` comes after `batch`"),
    "random numbers": (
        lambda: numbers().map(draws).batch(4),
        (),
        "the results of `map(draws)` may depend on the order of its calls (RandomUniform)",
    ),
    "rows that are mixed": (
        lambda: numbers().map(halves).batch(4).map(centres),
        (),
        "`map(centres)` gets whole batches, and may mix their rows or draw numbers (Mean)",
    ),
}


def assert_parts_equal(make: Callable[[], tf.data.Dataset], place: OwnReplicas) -> CutDataset:
    """Compares the steps of `make()` with those of a cut at its end, over three epochs."""
    whole, read = make(), make()
    cut, noted = cut_low(read, place, None), cut_low(read, place, FirstBatch(lambda fingerprint: None))
    assert noted.dataset.element_spec == cut.dataset.element_spec or "map(grab_batch)" in cut.above
    for data in (noted.dataset, cut.dataset, cut.dataset):  # As epochs follow each other: the first batch is noted once.
        expected = [shard(batch, *place) for batch in whole]
        steps = list(data)
        assert len(steps) == len(expected)
        for step, other in zip(steps, expected, strict=True):
            for own, wanted in zip(*(tf.nest.flatten(each, expand_composites=True) for each in (step, other)), strict=True):
                np.testing.assert_array_equal(own, wanted)
    return cut


@pytest.mark.parametrize("name", PIPELINES)
def test_parts_are_those_of_whole_batches(name: str) -> None:
    make, above, reason = PIPELINES[name]
    for place in (OwnReplicas(3, 0, 1), OwnReplicas(3, 2, 1), OwnReplicas(5, 1, 2)):
        cut = assert_parts_equal(make, place)
        assert cut.above == above
        assert cut.reason.startswith(reason)
        assert bool(cut.reason) == (";" in cut.reason) == bool(reason), "what would change it"


def test_the_pipelines_of_guides(tmp_path: Path) -> None:
    for i in range(12):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        image = np.random.RandomState(i).randint(0, 255, (16, 16, 3)).astype("uint8")
        (folder / f"{i}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())
    options = {"image_size": (8, 8), "batch_size": 5, "seed": 3, "verbose": False}
    scale = keras.layers.Rescaling(1 / 255)

    def from_directory() -> tf.data.Dataset:
        images = keras.utils.image_dataset_from_directory(str(tmp_path), **options)
        return images.map(lambda x, y: (scale(x), y), num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def from_files() -> tf.data.Dataset:
        files = Dataset.list_files(str(tmp_path / "*/*.jpg"), seed=4)
        return files.map(tf.io.read_file, tf.data.AUTOTUNE).map(lambda b: tf.io.decode_jpeg(b, 3)).batch(5)

    for make in (from_directory, from_files):
        assert "batch" in assert_parts_equal(make, OwnReplicas(2, 1, 1)).above


def test_an_order_that_was_drawn_before_goes_on() -> None:
    whole, read = (numbers().map(halves).shuffle(5, seed=2).batch(6) for _ in range(2))
    cut = cut_low(read, OwnReplicas(2, 1, 1), None).dataset
    for epoch, of_part in enumerate((False, True, False, True, True)):  # The user reads the data set now and then, too.
        expected = [np.array_split(batch, 2)[1] if of_part else batch for batch in whole.as_numpy_iterator()]
        found = [step.parts[0] if of_part else step for step in (cut if of_part else read)]
        assert np.concatenate(found).tolist() == np.concatenate(expected).tolist(), epoch


def test_maps_that_run_ahead_draw_no_order_that_nobody_asks_for() -> None:
    shuffled = [Dataset.range(24).shuffle(24, seed=2) for _ in range(2)]
    whole, read = shuffled[0].map(halves).repeat().batch(6), shuffled[1].map(halves, num_parallel_calls=8).repeat().batch(6)
    cut = cut_low(read, OwnReplicas(2, 1, 1), None, most=4).dataset
    for _ in range(3):
        expected = [np.array_split(batch, 2)[1] for batch in whole.take(4).as_numpy_iterator()]
        found = [step.parts[0] for step in cut.take(5).prefetch(5)]
        assert np.concatenate(found).tolist() == np.concatenate(expected).tolist()


def test_an_order_goes_on_when_the_data_set_is_gone() -> None:
    whole = numbers().map(halves).shuffle(5, seed=2).batch(6)
    cut = cut_low(numbers().map(halves).shuffle(5, seed=2).batch(6), OwnReplicas(2, 0, 1), None).dataset
    gc.collect()
    for _ in range(3):
        expected = [np.array_split(batch, 2)[0] for batch in whole.as_numpy_iterator()]
        assert np.concatenate([step.parts[0] for step in cut]).tolist() == np.concatenate(expected).tolist()


def test_an_order_that_is_not_known_is_left() -> None:
    large = Dataset.from_tensor_slices(np.zeros((2, 33 * 2**20), "uint8"))
    on_device = numbers().apply(tf.data.experimental.copy_to_device("CPU:0"))
    for data in (large, on_device):
        cut = cut_low(data.map(doubles).shuffle(2, seed=1).batch(2), OwnReplicas(2, 0, 1), None)
        assert cut.above == ()
        assert cut.reason.startswith("`shuffle` comes after `map(doubles)`, and its order is not known")
        assert cut.reason.endswith("; write `shuffle` before `map`")
        assert list(cut.dataset.take(1))
        one_order = data.map(doubles).shuffle(2, seed=1, reshuffle_each_iteration=False).batch(2)
        assert cut_low(one_order, OwnReplicas(2, 0, 1), None).above == ("batch", "map(doubles)")


def test_text_counts_by_its_length() -> None:
    texts = Dataset.from_tensor_slices(tf.fill([65], tf.constant("x" * 2**20)))
    assert seed_generator(texts.map(tf.strings.length).shuffle(2)) is None
    assert seed_generator(texts.take(1).map(tf.strings.length).shuffle(2)) is None, "the data set has all of them"
    assert seed_generator(numbers().map(halves).shuffle(2)).dtype == tf.resource


def test_each_process_computes_its_own_examples_only() -> None:
    for rank in range(3):
        own = [n for start in range(0, 23, 6) for n in np.array_split(np.arange(start, min(start + 6, 23)), 3)[rank]]

        def refuses(value: tf.Tensor, own: list[int] = own) -> tf.Tensor:
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_any(value == own), ["not this process's:", value])]):
                return tf.identity(value)

        list(cut_low(numbers().map(refuses).batch(6), OwnReplicas(3, rank, 1), None).dataset)


def rows_gathered(dataset: tf.data.Dataset) -> int:
    """Counts the rows that the map by which Keras reads arrays takes out of them."""
    maps = [part for part in parts_of_dataset(dataset) if isinstance(part, (dataset_kinds.Map, dataset_kinds.ParallelMap))]
    gathers = {"GatherV2": 1, "PartitionedCall": 0}  # Which input has the numbers of the rows.
    reading, rows = next(
        (each, op.inputs[gathers[op.type]])
        for each in maps
        for op in each._map_func.function.graph.get_operations()
        if op.type in gathers
    )
    graph, names = rows.graph, [tensor.name for tensor in rows.graph.inputs]
    batches = [tf.nest.flatten(batch) for batch in reading._input_dataset.as_numpy_iterator()]
    with tf.compat.v1.Session(graph=graph) as session:
        return sum(len(session.run(rows.name, dict(zip(names, batch, strict=True)))) for batch in batches)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "batch"}])
def test_a_process_takes_its_own_rows_of_arrays_only(options: dict[str, Any]) -> None:
    assert rows_gathered(of_keras(**options)) == 23
    each = [rows_gathered(cut_low(of_keras(**options), OwnReplicas(3, rank, 1), None).dataset) for rank in range(3)]
    assert each == [9, 9, 5], "of batches of 5, 5, 5, 5 and 3 rows"


@pytest.mark.parametrize("changed", [0, 3])
def test_the_first_batch_is_noted_where_it_is_cut(changed: int) -> None:
    noted: list[Fingerprint] = []
    for source in (np.arange(8), np.where(np.arange(8) == changed, 9, np.arange(8))):
        first_batch = FirstBatch(noted.append)
        list(cut_low(Dataset.from_tensor_slices(source).map(halves).batch(4), OwnReplicas(2, 0, 1), first_batch).dataset)
        first_batch.check()
    assert noted[0].digest != noted[1].digest
    names = [leaf.name for leaf in noted[0].leaves]
    assert names == [f"row {row} of the first batch" for row in range(4)]


def test_an_iterator_that_is_timed_compares_the_first_batch() -> None:
    """Rank 0 alone times its steps. Every rank compares at its first batch."""
    noted: list[Fingerprint] = []
    replicas = LocalReplicas(0, ("/cpu:0",), Agreement(0, 1, lambda counts: counts, stop_together=False))
    data = distribute(Dataset.range(8).batch(4), replicas, first_batch=FirstBatch(noted.append))
    timed = StepClock().watching(iter(data))
    assert not noted
    assert sum(1 for _ in timed) == 2
    assert len(noted) == 1


_OF_EXAMPLES = ["map", "late", "parallel", "shuffle", "repeat", "take", "zip", "cache", "interleave"]
_OF_BATCHES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "doubled": doubles,
    "divided": lambda batch: batch // tf.cast(tf.shape(batch)[0], batch.dtype),
    "divided by what Python knows": lambda batch: batch // (batch.shape[0] or 3),
    "drawn": draws_in_python,
    "without the last": lambda batch: batch - batch[-1:],
    "reversed": lambda batch: batch[..., ::-1],
    "paired": lambda batch: tf.stack([batch, batch], -1),
}


@st.composite
def pipelines(draw: Any) -> Callable[[], tf.data.Dataset]:
    """Draws a pipeline, as a function that makes it."""
    size = draw(st.integers(1, 20))
    of_examples = draw(st.lists(st.sampled_from(_OF_EXAMPLES), max_size=4))
    batch = draw(st.integers(1, 7)), draw(st.booleans())
    of_batches = draw(st.lists(st.sampled_from(["late", "repeat", "take", "prefetch", "constant", *_OF_BATCHES]), max_size=2))
    seed = draw(st.integers(0, 9))

    def on_each(function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        return lambda *values: tuple(map(function, values)) if len(values) > 1 else function(values[0])

    def together(*values: tf.Tensor) -> Any:
        return values if len(values) > 1 else values[0]

    def late(data: tf.data.Dataset) -> tf.data.Dataset:
        for scale in (2, 3):
            data = data.map(on_each(lambda value: value * scale))  # noqa: B023 Both functions were traced with their own scale.
        return data

    apply: dict[str, Callable[[Any], tf.data.Dataset]] = {
        "map": lambda data: data.map(on_each(doubles)),
        "late": late,
        "parallel": lambda data: data.map(on_each(doubles), 2),
        "shuffle": lambda data: data.shuffle(5, seed=seed),
        "repeat": lambda data: data.repeat(2),
        "take": lambda data: data.take(13),
        "zip": lambda data: data if isinstance(data.element_spec, tuple) else Dataset.zip((data, Dataset.range(100).map(doubles))),
        "cache": lambda data: data.cache(),
        "interleave": lambda data: data.interleave(lambda *each: Dataset.from_tensors(each).map(together).repeat(2), 3),
        "prefetch": lambda data: data.prefetch(1),
        "constant": lambda data: data if isinstance(data.element_spec, tuple) else beside_a_constant(data, tf.range(batch[0])),
        **{name: lambda data, function=function: data.map(on_each(function)) for name, function in _OF_BATCHES.items()},
    }

    def make() -> tf.data.Dataset:
        np.random.seed(seed)
        data = Dataset.range(size)
        for name in of_examples:
            data = apply[name](data)
        data = data.batch(*batch)
        for name in of_batches:
            data = apply[name](data)
        return data

    return make


@pytest.mark.parametrize("draws", [40, *in_lane("drawn", 400)])
def test_drawn_pipelines(draws: int) -> None:
    @settings(
        max_examples=draws,
        deadline=None,
        derandomize=not os.environ.get("TFREP_RANDOM_DRAWS"),
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(make=pipelines(), size=st.integers(1, 5), rank=st.integers(0, 4))
    def run(make: Callable[[], tf.data.Dataset], size: int, rank: int) -> None:
        assert_parts_equal(make, OwnReplicas(size, rank % size, 1))

    run()
