"""Random numbers in parallel maps: all processes train on what one device draws with one call at a time."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

from tfrep_strategy.data.pipeline_functions import alike_on_all_processes
from tfrep_strategy.strategies import operations

_X = np.random.default_rng(0).normal(size=(24, 12)).astype("float32")
_PICTURES = _X.reshape(24, 3, 4, 1)


def _data(kind: str, parallel: int | None) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((_X, _X))

    def masked(row: tf.Tensor) -> tf.Tensor:
        rounds = None if parallel else 1
        return tf.map_fn(lambda v: v * tf.cast(tf.random.uniform([]) < 0.5, tf.float32), row, parallel_iterations=rounds)

    if kind == "a draw":
        return rows.batch(8).map(lambda a, b: (a + tf.random.uniform(tf.shape(a)), b), parallel)
    if kind == "draws in a loop":
        return rows.map(lambda a, b: (masked(a), b), parallel).batch(8)
    pictures = tf.data.Dataset.from_tensor_slices((_PICTURES, _X))
    if kind == "turned pictures":
        turned = pictures.map(lambda a, b: (tf.image.random_flip_left_right(a), b), parallel)
        return turned.shuffle(24, seed=3).map(lambda a, b: (tf.reshape(a, (12,)), b), parallel).batch(8).prefetch(1)
    if kind == "a file each":
        return rows.interleave(lambda a, b: tf.data.Dataset.from_tensors((a + tf.random.uniform([12]), b)), 4, 1, parallel).batch(8)
    moved = keras.layers.RandomTranslation(0.2, 0.2, seed=3)
    return pictures.batch(8).map(lambda a, b: (tf.reshape(moved(a, training=True), (-1, 12)), b), parallel)


_KINDS = ("a draw", "draws in a loop", "turned pictures", "a layer", "a file each")


def _losses(kinds: tuple[str, ...], parallel: int | None = None, strategy: Any = None) -> list[list[float]]:
    found = []
    for kind in kinds:
        with strategy.scope() if strategy is not None else tf.distribute.get_strategy().scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(12)])
            model.compile("sgd", "mse")
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found.append(model.fit(_data(kind, parallel), epochs=2, verbose=0).history["loss"])
                found.append(model.fit(_data(kind, parallel), epochs=1, verbose=0).history["loss"])
        if strategy is not None and strategy.extended.environment.rank == 0 and kind not in ("a file each", "a draw", "a layer"):
            assert any("one at a time" in str(each.message) for each in told), (kind, [str(each.message) for each in told])
    return found


def _in_process(strategy: Any, kinds: tuple[str, ...]) -> list[list[float]]:
    return _losses(kinds, 4, strategy)


@pytest.mark.parametrize("communicator", ["tf", *in_lane("input", "horovod", "shared_memory")])
def test_processes_train_on_what_one_device_draws(communicator: str, worker_pool: Any) -> None:
    wanted = _losses(_KINDS)
    for own in worker_pool(communicator, 2).run(_in_process, _KINDS):
        for kind, got, right in zip(np.repeat(_KINDS, 2), own, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, err_msg=kind)


@pytest.mark.lane("quick")
def test_maps_without_state_stay_parallel() -> None:
    rows = tf.data.Dataset.from_tensor_slices(_X)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [2, 3]), 7)
    for kept in (
        rows.map(lambda x: x + tf.random.stateless_uniform([12], [1, 2]), 4),
        rows.map(lambda x: x + tf.random.uniform([12])),  # One call at a time as it is.
        rows.map(lambda x: table.lookup(tf.cast(x[0], tf.int32)), 4),
        rows.map(lambda x: tf.numpy_function(np.sum, [x], tf.float32), 4),
    ):
        assert alike_on_all_processes(kept) is kept


@pytest.mark.lane("quick")
def test_what_is_rewritten_keeps_its_kind() -> None:
    """Nests, lengths, unknown sizes, options; and a copy of it in a function."""
    options = tf.data.Options()
    options.deterministic = True
    data = tf.data.Dataset.range(10).map(lambda i: {"x": tf.random.uniform([2]), "i": tf.range(i)}, 4).with_options(options)
    alike = alike_on_all_processes(data)
    assert alike is not data
    assert alike.element_spec == data.element_spec
    assert int(alike.cardinality()) == 10
    assert alike.options().deterministic
    assert [len(each["i"]) for each in alike] == list(range(10))

    @tf.function
    def total() -> tf.Tensor:
        return alike.reduce(tf.constant(0, tf.int64), lambda state, each: state + tf.reduce_sum(each["i"]))

    assert int(total()) == sum(i * (i - 1) // 2 for i in range(10))


@pytest.mark.lane("quick")
@pytest.mark.parametrize("size", [1, 2])
def test_loops_that_draw_run_round_by_round(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_orders", False)
    operations.order_loops_that_draw(size)

    @tf.function
    def loops(x: tf.Tensor) -> Any:
        draws = tf.map_fn(lambda v: tf.cond(v > 0, lambda: v * tf.random.uniform([]), lambda: v), x)
        return draws, tf.map_fn(lambda v: v * tf.random.stateless_uniform([], [1, 2]), x)

    graph = loops.get_concrete_function(tf.TensorSpec([None])).graph
    rounds = [op.get_attr("parallel_iterations") for op in graph.get_operations() if op.type.endswith("While")]
    assert sorted(rounds) == ([10, 10] if size == 1 else [1, 10])
