"""Variables in parts on two servers, behind `keras.Variable`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from parameter_server_support import run

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("servers")

PARTITIONERS = tf.distribute.experimental.partitioners
IDS = np.random.RandomState(0).randint(0, 50, (120, 3))
TARGETS = np.random.RandomState(1).randn(120, 1).astype("float32")


def _model(optimizer: Any, rows: int = 50) -> keras.Model:
    def init(seed: int) -> Any:
        return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)

    layers = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(rows, 8, embeddings_initializer=init(1)),
        keras.layers.Flatten(),
        keras.layers.Dense(7, "tanh", kernel_initializer=init(2)),
        keras.layers.Dense(1, kernel_initializer=init(3)),
    ]
    made = keras.Sequential(layers)
    made.compile(optimizer, "mse")
    return made


def _training_saving_and_loading() -> None:
    with tfrep.local_cluster(workers=1, servers=2) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, PARTITIONERS.FixedShardsPartitioner(2))
        for make in (lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1, momentum=0.9)):
            with strategy.scope():
                whole = _model(make())
            parts = {v.path.split("/", 1)[1]: v._value for v in whole.variables}
            assert [p.shape[0] for p in parts["embedding" + whole.layers[0].name[9:] + "/embeddings"].variables] == [25, 25]
            devices = {p.device for p in whole.layers[0].embeddings._value.variables}
            assert len(devices) == 2, devices
            single = _model(make())
            np.testing.assert_array_equal(single.get_weights()[0].shape, (50, 8))
            single.set_weights(whole.get_weights())
            whole.fit(IDS, TARGETS, batch_size=10, epochs=2, shuffle=False, verbose=0)
            single.fit(IDS, TARGETS, batch_size=10, epochs=2, shuffle=False, verbose=0)
            for a, b in zip(whole.get_weights(), single.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(whole.predict(IDS, verbose=0), single.predict(IDS, verbose=0), rtol=1e-4, atol=1e-6)

        whole.save("whole.keras")
        whole.save_weights("whole.weights.h5")
        loaded = keras.models.load_model("whole.keras")
        np.testing.assert_allclose(loaded.predict(IDS, verbose=0), whole.predict(IDS, verbose=0), rtol=1e-5, atol=1e-6)
        for a, b in zip(loaded.optimizer.variables, whole.optimizer.variables, strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-6)
        single.load_weights("whole.weights.h5")
        single.fit(IDS, TARGETS, epochs=1, verbose=0)
        single.save("single.keras")
        with strategy.scope():
            back = keras.models.load_model("single.keras")
        assert len(back.layers[0].embeddings._value.variables) == 2
        np.testing.assert_allclose(back.predict(IDS, verbose=0), single.predict(IDS, verbose=0), rtol=1e-5, atol=1e-6)


def test_training_saving_and_loading(tmp_path: Path) -> None:
    """One worker, so that the steps have the order of one device: the same weights come out."""
    run(_training_saving_and_loading, folder=tmp_path)


def _each_part_is_made_where_it_is() -> None:
    asked: list[tuple[int, ...]] = []

    class Watched(keras.initializers.Initializer):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            asked.append(tuple(shape))
            return tf.reshape(tf.range(np.prod(shape), dtype=dtype), shape)

    with tfrep.local_cluster(workers=1, servers=2) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, PARTITIONERS.FixedShardsPartitioner(2))
        initializers = keras.initializers
        drawn = initializers.RandomUniform.__call__

        def watched(self: Any, shape: Any, dtype: Any = None) -> Any:
            asked.append(tuple(shape))
            return drawn(self, shape, dtype)

        initializers.RandomUniform.__call__ = watched
        wanted = {
            "uniform": initializers.RandomUniform(0.0, 1.0, seed=3),
            "zeros": "zeros",
            "whole": Watched(),
            "rows": initializers.Constant(np.arange(4.0)),
            "glorot": initializers.GlorotUniform(seed=1),
        }
        with strategy.scope():
            made = {name: keras.Variable(initializer, shape=(51, 4)) for name, initializer in wanted.items()}
            optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
            optimizer.build([made["uniform"]])
        assert asked == [(26, 4), (25, 4), (51, 4), (51, 4)], asked
        assert all(len(variable._value.variables) == 2 for variable in made.values())
        uniform = made["uniform"].numpy()
        assert len(np.unique(uniform)) == uniform.size
        assert 0.4 < uniform.mean() < 0.6
        np.testing.assert_array_equal(made["zeros"].numpy(), 0.0)
        np.testing.assert_array_equal(made["whole"].numpy(), np.arange(204.0).reshape(51, 4))
        np.testing.assert_array_equal(made["rows"].numpy(), np.tile(np.arange(4.0), (51, 1)))
        np.testing.assert_array_equal(made["glorot"].numpy(), initializers.GlorotUniform(seed=1)((51, 4)))
        (slot,) = optimizer._accumulators
        np.testing.assert_array_equal(slot.numpy(), 0.5)
        assert [p.device for p in slot._value.variables] == [p.device for p in made["uniform"]._value.variables]


def test_each_part_is_made_where_it_is(tmp_path: Path) -> None:
    run(_each_part_is_made_where_it_is, folder=tmp_path)


def _all_optimizers_and_partitioners() -> None:
    rng, optimizers = np.random.RandomState(0), keras.optimizers
    names = ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb"]
    names += ["Adafactor", "Muon"]
    makes: dict[str, Callable[[], Any]] = {name: functools.partial(getattr(optimizers, name), 0.1) for name in names}
    makes["decay, clipping"] = lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, global_clipnorm=0.5)
    makes["accumulation, average"] = lambda: optimizers.Adam(
        0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2, clipnorm=0.1
    )
    makes["scaled"] = lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=2.0)
    start, dense = rng.randn(6, 4).astype("float32"), tf.constant(rng.randn(6, 4), tf.float32)
    sparse = tf.IndexedSlices(tf.constant(rng.randn(3, 4), tf.float32), tf.constant([1, 4, 4]), tf.constant([6, 4]))

    def updated(make: Callable[[], Any], strategy: Any) -> keras.Variable:
        with strategy.scope():
            optimizer = make()
            variable = keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype), shape=(6, 4), dtype="float32")
            optimizer.build([variable])
        variable.assign(start)

        def function_of(gradient: Any) -> Any:
            return tf.function(lambda: strategy.run(lambda: optimizer.apply([gradient], [variable])))

        apply_dense, apply_sparse = function_of(dense), function_of(sparse)
        tracing = getattr(strategy, "tracing", contextlib.nullcontext)
        with strategy.scope(), tracing():
            for function in (apply_dense, apply_sparse, apply_sparse, apply_dense):
                function()
        return variable

    with tfrep.local_cluster(workers=1, servers=2) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, PARTITIONERS.FixedShardsPartitioner(2))
        for name, make in makes.items():
            parts, whole = updated(make, strategy), updated(make, tf.distribute.get_strategy())
            assert len(parts._value.variables) == 2
            np.testing.assert_allclose(parts.numpy(), whole.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)

        counts = {}
        for partitioner in (PARTITIONERS.MinSizePartitioner(64, 2), PARTITIONERS.MaxSizePartitioner(32)):
            strategy = tfrep.ParameterServerStrategy(cluster, partitioner)
            with strategy.scope():
                made = _model(keras.optimizers.SGD(0.1), rows=8)
            made.fit(IDS % 8, TARGETS, batch_size=30, verbose=0)
            counts[type(partitioner).__name__] = len(made.layers[0].embeddings._value.variables)
        assert counts == {"MinSizePartitioner": 2, "MaxSizePartitioner": 8}, counts  # 8 rows of 32 bytes


def test_all_optimizers_and_partitioners(tmp_path: Path) -> None:
    """Dense and sparse gradients change a variable in parts as they change a whole one."""
    run(_all_optimizers_and_partitioners, folder=tmp_path)


_WIDTH, _ROW_BYTES = 256, 1024


class Bytes(keras.callbacks.Callback):
    """Counts the bytes of each epoch on the loopback interface."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before = self._sent()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(self._sent() - self.before)

    def _sent(self) -> int:
        return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def _bytes_of_tables() -> None:
    moved, rng = {}, np.random.RandomState(0)
    with tfrep.local_cluster(workers=1, servers=2) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster, PARTITIONERS.MinSizePartitioner(1 << 16, 2))
        for rows, used in ((1_000, 30), (50_000, 30), (50_000, 300)):
            with strategy.scope():
                embedding = keras.layers.Embedding(rows, _WIDTH)
                layers = [keras.Input((3,), dtype="int32"), embedding, keras.layers.GlobalAveragePooling1D()]
                made = keras.Sequential([*layers, keras.layers.Dense(1)])
                made.compile(keras.optimizers.SGD(0.1), "mse")
            distinct = rng.permutation(rows)[:used].reshape(-1, 3)
            batch = tf.data.Dataset.from_tensors((distinct, np.zeros((len(distinct), 1), "float32"))).repeat()
            counted = Bytes()
            made.fit(batch, steps_per_epoch=10, epochs=6, verbose=0, callbacks=[counted])
            assert len(embedding.embeddings._value.variables) == 2
            # Whatever else this machine sends meanwhile only adds to it.
            moved[rows, used] = min(counted.epochs[1:]) / 10

    small, large, more = moved.values()
    assert large < small + 100 * _ROW_BYTES, moved  # The table has 49,000 rows more.
    # A row comes from its server, and its gradient goes back.
    assert 1.5 < (more - large) / (270 * _ROW_BYTES) < 4.0, moved


def test_bytes_follow_the_rows_that_are_used_and_not_the_table(tmp_path: Path) -> None:
    run(_bytes_of_tables, folder=tmp_path)
