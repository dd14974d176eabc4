"""Files: one process writes, everybody may read, and the number of replicas may change in between."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from lanes import in_lane

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("callbacks")


def build(optimizer: Any = None) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, "tanh", kernel_initializer=keras.initializers.RandomUniform(seed=1)),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(1, kernel_initializer=keras.initializers.RandomUniform(seed=2)),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse")
    return model


def rows(n: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    return rng.randn(n, 4).astype("float32"), rng.randn(n, 1).astype("float32")


def fit(model: Any, epochs: int, **kwargs: Any) -> Any:
    return model.fit(*rows(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, **kwargs)


def state(model: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in model.weights + model.optimizer.variables]


def plain() -> keras.Model:
    """A model without statistics that depend on how a batch is cut, which collects gradients over three steps."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=3), "mse")
    return model


def save_all(strategy: Any, folder: str) -> list[np.ndarray]:
    """Trains on all replicas and saves in every way there is, to the same paths on all ranks."""
    with strategy.scope():
        model = build()
    fit(model, 1)
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    model.export(f"{folder}/exported", verbose=False)
    keras.saving.save_model(model, f"{folder}/by_function.keras")
    tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")
    # Every rank may read at once: the file is complete when `save` returns.
    loaded = keras.models.load_model(f"{folder}/model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    found = state(model)
    # Writing Keras's old format changes how a clone is compiled, so that ranks which do not write would come apart.
    model.save(f"{folder}/legacy.h5")
    with strategy.scope():
        fit(keras.models.model_from_json(model.to_json()), 1)
    return found


def check_loaded(folder: str, expected: list[np.ndarray], scope: Any) -> None:
    x, _ = rows()
    with scope:
        model = keras.models.load_model(f"{folder}/model.keras")
        weights_only, from_checkpoint = build(), build()
        weights_only.load_weights(f"{folder}/model.weights.h5")
        tf.train.Checkpoint(model=from_checkpoint).restore(f"{folder}/checkpoint").expect_partial()
    for found, want in zip(state(model), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)
    num_weights = len(model.weights)
    for other in (weights_only, from_checkpoint):
        for found, want in zip(other.get_weights(), expected[:num_weights], strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-6)
    predicted = model.predict(x, verbose=0)
    exported = tf.saved_model.load(f"{folder}/exported")
    np.testing.assert_allclose(exported.serve(tf.constant(x)), predicted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [*in_lane("quick", 2), 3])
def test_mirrored_files_load_anywhere(num_replicas: int, tmp_path: pathlib.Path) -> None:
    strategy = tfrep.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    expected = save_all(strategy, str(tmp_path))
    check_loaded(str(tmp_path), expected, tf.distribute.get_strategy().scope())
    check_loaded(str(tmp_path), expected, tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope())


@pytest.mark.parametrize("communicator", ["horovod", "tf"])
def test_process_files_load_anywhere(communicator: str, tmp_path: pathlib.Path, worker_pool: Any) -> None:
    first, second = worker_pool(communicator, 2).run(save_all, str(tmp_path), limit=120)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    check_loaded(str(tmp_path), first, tf.distribute.get_strategy().scope())
    check_loaded(str(tmp_path), first, tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope())
    assert not [name for name in os.listdir(tmp_path) if "temp" in name]


def serve_in_scope(strategy: Any, folder: str) -> list[np.ndarray]:
    """Answers of an exported model that was loaded in scope: outside replicas, in them, and as a layer."""
    x = rows(6)[0]
    with strategy.scope():
        loaded = tf.saved_model.load(folder)
        answers = [loaded.serve(x), tf.function(loaded.serve)(tf.constant(x))]
        answers += strategy.experimental_local_results(strategy.run(loaded.serve, (tf.constant(x),)))
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.TFSMLayer(folder, call_endpoint="serve")(inputs))
        answers += [model.predict(x, verbose=0), model(x)]
    return [np.asarray(answer) for answer in answers]


def test_exported_models_load_in_scope(tmp_path: pathlib.Path, worker_pool: Any) -> None:
    model = build()
    model.export(tmp_path, verbose=False)
    expected = model.predict(rows(6)[0], verbose=0)
    results = [serve_in_scope(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), str(tmp_path))]
    for communicator in ("tf", "horovod"):
        results += worker_pool(communicator, 2).run(serve_in_scope, str(tmp_path))
    for result in results:
        assert len(result) >= 5
        for found in result:
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def save_on_own_paths(strategy: Any, folder: str) -> bool:
    with strategy.scope():
        model = plain()
    fit(model, 1)
    path = f"{folder}/rank{strategy.rank}.keras"
    model.save(path)
    return os.path.exists(path)


@pytest.mark.parametrize("communicator", ["horovod", "tf"])
def test_a_path_of_ones_own_is_written(communicator: str, tmp_path: pathlib.Path, worker_pool: Any) -> None:
    assert worker_pool(communicator, 2).run(save_on_own_paths, str(tmp_path)) == [True, True]


def continue_from(strategy: Any, path: str) -> list[np.ndarray]:
    with strategy.scope():
        model = keras.models.load_model(path)
    fit(model, 2)
    return state(model)


def test_training_continues_on_another_number_of_replicas(tmp_path: pathlib.Path, worker_pool: Any) -> None:
    reference = plain()
    fit(reference, 4)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        model = plain()
    fit(model, 2)
    model.save(tmp_path / "half.keras")
    for rank_state in worker_pool("tf", 2).run(continue_from, str(tmp_path / "half.keras")):
        for found, want in zip(rank_state, state(reference), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def accumulated_in_half_precision(strategy: Any) -> list[np.ndarray]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16")])
        inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    fit(model, 2)
    return state(model)


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_gradients_accumulated_inside_a_loss_scale(communicator: str, worker_pool: Any) -> None:
    reference = accumulated_in_half_precision(tf.distribute.get_strategy())
    for rank_state in worker_pool(communicator, 2).run(accumulated_in_half_precision):
        for found, want in zip(rank_state, reference, strict=True):
            np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2)


class Interrupt(keras.callbacks.Callback):
    """Ends training as a preempted machine would, after some batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class Counts(keras.callbacks.Callback):
    """Counts the batches that are trained on."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


def interrupted_and_resumed(strategy: Any, folder: str, save_freq: Any, after: int) -> list[np.ndarray]:
    callbacks = keras.callbacks
    with strategy.scope():
        model = plain()
    with pytest.raises(KeyboardInterrupt):
        fit(model, 4, callbacks=[callbacks.BackupAndRestore(folder, save_freq=save_freq), Interrupt(after)])
    with strategy.scope():
        model = plain()
    counts = Counts()
    history = fit(model, 4, callbacks=[callbacks.BackupAndRestore(folder, save_freq=save_freq), counts])
    assert history.epoch == [2, 3]
    assert counts.batches == (8 if save_freq == "epoch" else 16 - after)
    assert not os.path.exists(folder)
    return state(model)


def ordered_data(kind: str) -> tuple[Any, dict[str, Any]]:
    """Data in an order that the random seed decides, for `fit`."""
    x, y = rows()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x))
    if kind == "arrays":
        return (x, y), {"batch_size": 8, "shuffle": True}
    if kind == "data set":
        return (dataset.batch(8),), {}
    if kind == "of unknown length":
        return (dataset.batch(8).filter(lambda *_: True),), {}
    return (dataset.repeat().batch(8),), {"steps_per_epoch": 4}


@pytest.mark.parametrize("kind", ["arrays", "data set", "of unknown length", "endless"])
def test_backup_goes_on_with_the_order_of_the_data(kind: str, tmp_path: pathlib.Path) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def train(*callbacks: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)  # As a process that starts.
        with strategy.scope():
            model = plain()
        data, options = ordered_data(kind)
        model.fit(*data, epochs=4, verbose=0, callbacks=list(callbacks), **options)
        return state(model)

    reference = train()
    backup = lambda: keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)  # noqa: E731
    for batches in (9, 2):
        with pytest.raises(KeyboardInterrupt):
            train(backup(), Interrupt(batches))
    counts = Counts()
    resumed = train(backup(), counts)
    assert counts.batches == 16 - (9 + 2)
    for found, want in zip(resumed, reference, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


# 4 batches an epoch: interrupted at the end of the second epoch, and after the second batch of the third.
INTERRUPTIONS = [("epoch", 9), (1, 10)]


@pytest.mark.parametrize(("save_freq", "after"), INTERRUPTIONS)
def test_backup_resumes_where_it_stopped(save_freq: Any, after: int, tmp_path: pathlib.Path, worker_pool: Any) -> None:
    reference = plain()
    fit(reference, 4)
    results = [interrupted_and_resumed(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]), str(tmp_path / "a"), save_freq, after)]
    results += worker_pool("tf", 2).run(interrupted_and_resumed, str(tmp_path / "b"), save_freq, after)
    results += worker_pool("horovod", 2).run(interrupted_and_resumed, str(tmp_path / "c"), save_freq, after)
    for result in results:
        for found, want in zip(result, state(reference), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def keep_two(strategy: Any, folder: str, in_background: bool) -> dict[str, Any]:
    with strategy.scope():
        model = plain()
    step = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            fit(model, 1)
            step.assign_add(1)
            path = manager.save(options=tf.train.CheckpointOptions(enable_async=in_background))
            files = sorted(os.listdir(folder))
    saved = state(model)
    fit(model, 1)
    checkpoint.restore(manager.latest_checkpoint)
    return {
        "path": path,
        "latest": manager.latest_checkpoint,
        "kept": manager.checkpoints,
        "found": tf.train.latest_checkpoint(folder),
        "files": files,
        "step": int(step),
        "restored": all(np.array_equal(a, b) for a, b in zip(state(model), saved, strict=True)),
        "warned": sum("in the background" in str(w.message) for w in caught) > 0,
    }


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("communicator", ["horovod", "tf"])
def test_checkpoint_manager(communicator: str, in_background: bool, tmp_path: pathlib.Path, worker_pool: Any) -> None:
    last_two = [str(tmp_path / f"ckpt-{number}") for number in (3, 4)]
    parts = [f"{os.path.basename(path)}.{end}" for path in last_two for end in ("data-00000-of-00001", "index")]
    for found in worker_pool(communicator, 2).run(keep_two, str(tmp_path), in_background):
        assert found == {
            "path": last_two[-1],
            "latest": last_two[-1],
            "kept": last_two,
            "found": last_two[-1],
            "files": sorted([*parts, "checkpoint"]),
            "step": 4,
            "restored": True,
            "warned": in_background,
        }


def write_with_callbacks(strategy: Any, folder: str) -> dict[str, Any]:
    saves: list[Any] = []
    original = keras.Model.save
    keras.Model.save = lambda self, *args, **kwargs: (saves.append(args), original(self, *args, **kwargs))[1]
    try:
        with strategy.scope():
            model = plain()
        C = keras.callbacks
        fit(
            model,
            3,
            callbacks=[
                C.ModelCheckpoint(f"{folder}/best.keras", monitor="loss", save_best_only=True),
                C.ModelCheckpoint(f"{folder}/step.weights.h5", save_weights_only=True, save_freq=2),
                C.CSVLogger(f"{folder}/log.csv"),
                C.TensorBoard(f"{folder}/board", update_freq="batch"),
            ],
        )
    finally:
        keras.Model.save = original
    return {"saves": len(saves), "weights": model.get_weights()}


@pytest.mark.parametrize("communicator", ["horovod", "tf"])
def test_only_the_chief_writes(communicator: str, tmp_path: pathlib.Path, worker_pool: Any) -> None:
    chief, other = worker_pool(communicator, 2).run(write_with_callbacks, str(tmp_path))
    assert chief["saves"] == 3
    assert other["saves"] == 0
    best = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_allclose(best.get_weights()[0], chief["weights"][0], rtol=1e-6)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 3
    assert len(list((tmp_path / "board").rglob("events.out.tfevents*"))) == 1
