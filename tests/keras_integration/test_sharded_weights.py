"""Sharded weights: the answer and the files of one device, and a part of the memory."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from calling import command
from lanes import in_lane
from raising import refuses
from sharded_training import OPTIMIZERS, after_two_epochs, fit, go_on, made, on_one_device, rows, same, save, state, trained

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.errors import DesyncError
from tfrep_strategy.strategies.variables import ShardedWeight

_SHARDS = {"shard_optimizer_state": True, "shard_weights": True}


@functools.cache
def mirrored(size: int, min_bytes: int = 1) -> Any:
    devices = [f"CPU:{i}" for i in range(size)]
    return tfrep.MirroredStrategy(devices, shard_weights_min_bytes=min_bytes, **_SHARDS)


def sharded(strategy: Any) -> Any:
    """Returns a strategy like that of the pool, but one that shards weights, too."""
    from tfrep_strategy.strategies.groups import remember

    if not hasattr(strategy, "_sharded_weights"):
        name = strategy.communicator.name
        strategy._sharded_weights = tfrep.MultiWorkerStrategy(name, shard_weights_min_bytes=1, **_SHARDS)
    remember(strategy._sharded_weights)
    return strategy._sharded_weights


def in_scope(strategy: Any, name: str, **options: Any) -> list[np.ndarray]:
    with sharded(strategy).scope():
        model = made(OPTIMIZERS[name](), **options)
        fit(model, 2)
        assert all(isinstance(v.value, ShardedWeight) for v in model.trainable_variables)
        return state(model)


@pytest.mark.parametrize("name", ["Adam", *in_lane("sharded_training", *(name for name in OPTIMIZERS if name != "Adam"))])
def test_two_mirrored_replicas(name: str) -> None:
    with mirrored(2).scope():
        found = trained(name)
    same(found, on_one_device(name))


@pytest.mark.parametrize("communicator", ["tf", "shared_memory", *in_lane("sharded_training", "horovod")])
def test_two_processes(communicator: str, worker_pool: Any) -> None:
    for name in ("Adam", "Lamb", "accumulation_clipped", "averages"):
        for found in worker_pool(communicator, 2).run(in_scope, name):
            same(found, on_one_device(name))


@pytest.mark.lane("sharded_training")
def test_four_processes(worker_pool: Any) -> None:
    for found in worker_pool("tf", 4).run(in_scope, "global_clipnorm"):
        same(found, on_one_device("global_clipnorm"))


def deep(width: int = 64) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, "tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile("adam", "mse")
    return model


def test_a_weight_takes_its_part_of_the_memory() -> None:
    x = np.random.RandomState(0).randn(8, 64).astype("float32")
    alone = deep()
    alone.fit(x, x, batch_size=8, epochs=2, verbose=0)
    with mirrored(2, 1 << 10).scope():
        model = deep()
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    same(model.get_weights(), alone.get_weights())
    for weight in model.trainable_variables:
        copies = [copy.numpy() for copy in weight.value.values]
        whole = int(np.prod(weight.shape))
        is_large = len(weight.shape) == 2
        assert [copy.size for copy in copies] == [whole // 2 if is_large else whole] * 2
        assert isinstance(weight.value, ShardedWeight) == is_large


_LIMIT = 1400 << 20
"""Bytes of addresses that a process may take beyond what TensorFlow has taken."""


def _fit_large(limit: int | None = None) -> list[float]:
    """Trains a model whose weights and slots take 1.5 GB."""
    keras.utils.set_random_seed(1)
    x = np.ones((16, 2048), "float32")
    small = keras.Sequential([keras.layers.Dense(1)])
    small.compile("adam", "mse")
    small.fit(x, x[:, :1], batch_size=16, verbose=0)  # Starts threads.
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + limit, before[1]))
    try:
        layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(30)]
        model = keras.Sequential([keras.Input((2048,)), *layers])
        model.compile(keras.optimizers.Adam(1e-6), "mse")
        return [float(loss) for loss in model.fit(x, x, batch_size=16, epochs=2, verbose=0).history["loss"]]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fit_within_limit() -> None:
    _fit_large(_LIMIT)


def _fit_in_parts_within_limit(strategy: Any) -> list[float]:
    with sharded(strategy).scope():
        return _fit_large(_LIMIT)


@pytest.mark.lane("sharded_training")
def test_four_processes_hold_what_one_cannot(worker_pool: Any) -> None:
    alone = subprocess.run(command(_fit_within_limit), capture_output=True, text=True, timeout=300, check=False)
    assert alone.returncode != 0
    assert re.search("OOM|[Oo]ut of memory|bad_alloc|allocate", alone.stderr), alone.stderr[-3000:]
    losses = worker_pool("shared_memory", 4).run(_fit_in_parts_within_limit)
    expected = _fit_large()
    assert expected[1] < expected[0]
    for found in losses:
        np.testing.assert_allclose(found, expected, rtol=1e-5)


_STARVED = Path(__file__).parent / "scripts" / "too_little_memory.py"


@pytest.mark.lane("sharded_training")
@pytest.mark.parametrize("communicator", ["shared_memory", "tf"])
def test_a_rank_without_memory_for_a_gather(communicator: str, tmp_path: Path) -> None:
    """All ranks learn why within seconds, or of which rank: TensorFlow's own collectives end a process without memory."""
    run = [
        sys.executable,
        "-m",
        "tfrep_strategy.cli",
        "run",
        "-n",
        "2",
        "--communicator",
        communicator,
        "--log-dir",
        f"{tmp_path}/logs",
    ]
    environ = inherited_environ() | {"PYTHONPATH": ":".join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [*run, str(_STARVED), str(tmp_path)], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0
    (of_rank_0, *own), log = sorted(tmp_path.glob("error-*.txt")), (tmp_path / "logs" / "rank1.log").read_text("utf-8")
    seconds, _, told = of_rank_0.read_text("utf-8").partition("\n")
    assert float(seconds) < 30
    assert "PeerLostError: Rank 1 ended" in told
    if communicator == "shared_memory":
        assert "with ResourceExhaustedError" in told
        assert "Unable to allocate 64.0 MiB" in own[0].read_text("utf-8")
        assert "Not allocated: a tensor [67108928] uint8, 64 MiB." in log
    else:
        assert "memory ran out" in told
        assert "bad_alloc" in log
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((checkpoint / "index.json").read_text("utf-8"))["epoch"] == 1
    assert {path.name for path in checkpoint.iterdir()} == {
        "index.json",
        *(f"part-0000{i}-of-00002{end}" for i in (0, 1) for end in ("", ".json")),
    }


def test_each_layer_gathers_its_weights_again() -> None:
    x = np.ones((8, 64), "float32")
    with mirrored(2, 1 << 10).scope():
        model = deep()
    model.fit(x, x, batch_size=8, verbose=0)
    told = mirrored(2, 1 << 10).explain(model)
    rounds = [int(n) for n in re.findall(r"^train: Round .*?(\d+) equal rows of 8192 bytes", told, re.MULTILINE)]
    # Forward and backward; the last two stay from the one to the other, and the first layer passes no gradient on.
    assert rounds == [1] * (6 + 3)


class _Tied(keras.layers.Layer):
    """A last layer with the table of an embedding."""

    def __init__(self, table: keras.layers.Embedding) -> None:
        super().__init__()
        self.table = table

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def _images(layers: Any) -> Any:
    x = keras.Input((12, 12, 3))
    y = layers.Conv2D(8, 3, use_bias=False, kernel_regularizer="l2")(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.SpatialDropout2D(0.2, seed=3)(layers.DepthwiseConv2D(3)(y))
    return x, layers.GlobalAveragePooling2D()(layers.Conv2DTranspose(4, 3)(y))


def _series(layers: Any) -> Any:
    x = keras.Input((7, 5))
    return x, layers.GRU(5)(layers.Bidirectional(layers.LSTM(6, return_sequences=True))(x))


def _words(layers: Any) -> Any:
    x = keras.Input((7,), dtype="int32")
    table = layers.Embedding(20, 8)
    y = table(x)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True))
    return x, _Tied(table)(y + layers.Dense(8)(layers.Dense(16, "gelu")(y)))


def _fitted(make: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    model = keras.Model(*make(keras.layers))
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
    draw = np.random.RandomState(0)
    x = draw.randint(0, 20, (22, *model.input_shape[1:])).astype(model.input.dtype)
    y = draw.randn(22, *model.output_shape[1:])
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    return [np.array(history["loss"]), model.predict(x, verbose=0, batch_size=8), *model.get_weights()]


@pytest.mark.lane("sharded_training")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("make", [_images, _series, _words])
def test_kinds_of_layers(make: Any) -> None:
    with mirrored(2).scope():
        found = _fitted(make)
    same(found, _fitted(make), 1e-12)


def test_eager_steps() -> None:
    with mirrored(2).scope(), pytest.warns(UserWarning, match="run eagerly"):
        found = trained("Adam", run_eagerly=True)
    same(found, on_one_device("Adam"))


@pytest.mark.parametrize("way", ["model", *in_lane("sharded_training", "weights", "checkpoint", "backup")])
def test_files_are_those_of_whole_weights(way: str, tmp_path: Path) -> None:
    (tmp_path / "of_parts").mkdir()
    with mirrored(2).scope():
        save(f"{tmp_path}/of_parts", way, "Adam")
    same(go_on(f"{tmp_path}/of_parts", way, "Adam"), after_two_epochs("Adam"))
    (tmp_path / "of_whole").mkdir()
    save(f"{tmp_path}/of_whole", way, "Adam")
    with mirrored(3).scope():
        found = go_on(f"{tmp_path}/of_whole", way, "Adam")
    same(found, after_two_epochs("Adam"))


def _saved(strategy: Any, folder: str) -> list[np.ndarray]:
    with sharded(strategy).scope():
        save(folder, "model", "Adam")
        return go_on(folder, "model", "Adam")


def test_files_of_processes(worker_pool: Any, tmp_path: Path) -> None:
    for found in worker_pool("tf", 2).run(_saved, str(tmp_path)):
        same(found, after_two_epochs("Adam"))
    same(go_on(str(tmp_path), "model", "Adam"), after_two_epochs("Adam"))


def test_outside_a_step_weights_are_whole() -> None:
    with mirrored(2).scope():
        model = made(OPTIMIZERS["Adam"]())
    fit(model)
    x, _ = rows()
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    weights = model.get_weights()
    model.set_weights([2.0 * weight for weight in weights])
    same(model.get_weights(), [2.0 * weight for weight in weights])
    mirrored(2).assert_in_sync(model)


def _steps(model: Any) -> list[np.ndarray]:
    x, y = rows()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [step(tf.constant(x), tf.constant(y)).numpy() for _ in range(3)]
    return [np.array(losses), *model.get_weights()]


def test_a_loop_of_ones_own() -> None:
    with mirrored(2).scope():
        found = _steps(made(OPTIMIZERS["Adam"]()))
    same(found, _steps(made(OPTIMIZERS["Adam"]())))


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    x, y = rows()
    with mirrored(2).scope():
        model = made(OPTIMIZERS["Adam"]())
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        with refuses(told=["gradient of a sharded weight"], hint="tf.function"):
            tape.gradient(loss, model.trainable_variables)
        with refuses(told=["under strategy.run"], hint="without strategy.run"):
            mirrored(2).run(lambda: model.trainable_variables[0].value.read_value())
    with refuses(told=["cannot be exported"], hint="model.save"):
        tf.saved_model.save(model, str(tmp_path))
    with refuses(hint="shard_optimizer_state=True", shard_weights=True, shard_optimizer_state=False):
        tfrep.MirroredStrategy(["CPU:0", "CPU:1"], shard_weights=True)


def _saves_in_a_thread(strategy: Any, folder: str) -> tuple[str, list[str]]:
    with sharded(strategy).scope():
        model = made(OPTIMIZERS["Adam"]())
        fit(model)
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(model.save, f"{folder}/model.keras").exception(60)
        fit(model)
    return f"{type(error).__name__}: {error}", os.listdir(folder)


def test_another_thread_cannot_save(worker_pool: Any, tmp_path: Path) -> None:
    (told, files), _ = worker_pool("tf", 2).run(_saves_in_a_thread, str(tmp_path))
    assert "ConfigurationError" in told
    assert "alone cannot read a sharded variable" in told
    assert files == []


def _others(strategy: Any) -> str:
    with sharded(strategy).scope(), pytest.raises(DesyncError) as error:
        keras.layers.Dense(3).build((None, 4 + strategy.rank))
    return str(error.value)


def test_ranks_that_make_other_weights_are_told(worker_pool: Any) -> None:
    for told in worker_pool("tf", 2).run(_others):
        assert "float32(4, 3)" in told
        assert "float32(5, 3)" in told
