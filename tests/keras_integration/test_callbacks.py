"""Callbacks that not every rank was given, and decisions that not every rank takes."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.keras_integration.synchronous.callbacks import Given, LocalCallback, find_local

pytestmark = pytest.mark.lane("callbacks")


def _model() -> Any:
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2), "mse", metrics=["mae"])
    return model


def _fit(model: Any, callbacks: list[Any]) -> Any:
    x = np.random.RandomState(0).rand(37, 4).astype("float32")
    y = x.sum(1, keepdims=True)
    return model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


class _Noting(keras.callbacks.Callback):
    """Notes the logs of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


class _SavingAtTheEnd(keras.callbacks.Callback):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self, logs: Any = None) -> None:
        self.model.save(self.path)


def _only_on_rank_0(strategy: Any, folder: str) -> tuple[list[Any], list[float]]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, noting = _model(), _Noting()
    if strategy.rank == 0:
        callbacks = [
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}-{{batch}}.keras", save_freq=3),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            noting,
            _SavingAtTheEnd(f"{folder}/end.keras"),
        ]
    else:
        callbacks = []
    _fit(model, callbacks)
    return model.get_weights(), noting.losses


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_callbacks_of_rank_0_alone(communicator: str, tmp_path: Path, worker_pool: Any) -> None:
    (weights, losses), (other, none) = worker_pool(communicator, 2).run(_only_on_rank_0, str(tmp_path))
    assert none == []
    expected = _Noting()
    keras.utils.set_random_seed(3)
    model = _model()
    _fit(model, [expected])
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    saved = keras.models.load_model(tmp_path / "end.keras")
    for mine, theirs, in_file in zip(weights, other, saved.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(mine, in_file)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"1-3.keras", "2-1.keras", "2-4.keras", "log.csv", "end.keras"}
    # Between updates: the file holds what all ranks have accumulated, not the part of the first.
    in_between = keras.models.load_model(tmp_path / "1-3.keras")
    sums = [v.numpy() for v in in_between.optimizer.variables if "gradient_accumulator" in v.path]
    keras.utils.set_random_seed(3)
    model = _model()
    _fit(model, [keras.callbacks.ModelCheckpoint(tmp_path / "one-{epoch}-{batch}.keras", save_freq=3)])
    on_one_device = keras.models.load_model(tmp_path / "one-1-3.keras")
    wanted = [v.numpy() for v in on_one_device.optimizer.variables if "gradient_accumulator" in v.path]
    assert len(sums) == len(wanted) > 0
    for found, expected_sum in zip(sums, wanted, strict=True):
        np.testing.assert_allclose(found, expected_sum, rtol=1e-4, atol=1e-5)


def _more_checkpoints_on_rank_0(strategy: Any, folder: str) -> int:
    callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/{name}.keras") for name in ("a", "b")[: 2 - strategy.rank]]
    with strategy.scope():
        model = _model()
    _fit(model, callbacks)
    return model.count_params()


def test_checkpoints_of_which_rank_0_has_more(tmp_path: Path, worker_pool: Any) -> None:
    (size, _) = worker_pool("tf", 2).run(_more_checkpoints_on_rank_0, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"a.keras", "b.keras"}
    assert keras.models.load_model(tmp_path / "a.keras").count_params() == size


def _schedule_on_rank_0(strategy: Any) -> str:
    callbacks = [keras.callbacks.ReduceLROnPlateau("loss")] if strategy.rank == 0 else []
    with strategy.scope():
        model = _model()
    try:
        _fit(model, callbacks)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_what_changes_training_has_to_be_everywhere(worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(_schedule_on_rank_0)
    assert first == second
    assert "Only some ranks were given a ReduceLROnPlateau" in first
    assert "ranks_with_it=[0]" in first


class _Draws(keras.callbacks.Callback):
    """Shows some pictures, which it draws by lot."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        random.random()
        np.random.rand(3)
        tf.random.uniform([])


class _Shuffled(keras.utils.PyDataset):
    """Is shuffled by Keras, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.x = np.random.RandomState(0).randn(24, 4).astype("float32")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = self.x[4 * index : 4 * index + 4]
        return rows, rows[:, :1]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.x)


def _drawing_on_rank_0(strategy: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [_Draws()] if strategy is not None and strategy.rank == 0 else []
    model.fit(_Shuffled(), epochs=3, shuffle=True, verbose=0, callbacks=callbacks)
    return model.get_weights()


def test_what_a_callback_of_rank_0_draws_changes_nothing(worker_pool: Any) -> None:
    expected = _drawing_on_rank_0(None)
    for found in worker_pool("tf", 2).run(_drawing_on_rank_0):
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


class _SetsTheRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.model.optimizer.learning_rate = 0.5


@pytest.mark.lane("quick")
def test_a_callback_of_some_ranks_that_sets_the_learning_rate() -> None:
    strategy = tfrep.MultiWorkerStrategy()
    with strategy.scope():
        model = _model()
    local = LocalCallback(_SetsTheRate(), strategy)
    local.set_model(model)
    local.on_epoch_end(0)
    with refuses(told=["_SetsTheRate"], hint="give it", learning_rate=0.5):
        local.on_epoch_end(1)


class _Changes(keras.callbacks.Callback):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.change(self.model)


def _halve(model: Any) -> None:
    model.set_weights([weight / 2 for weight in model.get_weights()])


def _forget(model: Any) -> None:
    for variable in model.optimizer.variables[2:]:
        variable.assign(variable * 0)


def _swap_and_swap_back(model: Any) -> None:
    weights = model.get_weights()
    _halve(model)
    model.set_weights(weights)


@pytest.mark.lane("quick")
def test_a_callback_of_some_ranks_that_changes_the_model() -> None:
    strategy = tfrep.MultiWorkerStrategy()
    with strategy.scope():
        model = _model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    _fit(model, [])
    for change, name in ((_halve, "kernel"), (_forget, "momentum")):
        local = LocalCallback(_Changes(change), strategy)
        local.set_model(model)
        with refuses(told=["_Changes", name], hint="give", variables=...):
            local.on_epoch_end(1)
    local = LocalCallback(_Changes(_swap_and_swap_back), strategy)
    local.set_model(model)
    local.on_epoch_end(1)


def _evaluating(strategy: Any) -> tuple[list[float], list[float]]:
    """Rank 0 has one callback more, of the same class."""
    with strategy.scope():
        model = _model()
    x, y = np.random.RandomState(0).randn(2, 22, 4).astype("float32")
    seen: list[Any] = []

    def evaluate(epoch: int, logs: Any) -> None:
        seen.append(model.evaluate(x, y[:, :1], batch_size=8, verbose=0))

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=evaluate)]
    if strategy.rank == 0:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_end=lambda logs: None))
    _fit(model, callbacks)
    return np.ravel(seen[-1]).tolist(), np.ravel(model.evaluate(x, y[:, :1], batch_size=8, verbose=0)).tolist()


def test_one_more_callback_of_a_rank_leaves_those_of_all_together(worker_pool: Any) -> None:
    for within, after in worker_pool("tf", 2).run(_evaluating):
        np.testing.assert_allclose(within, after, rtol=1e-5)


class _Stopping(keras.callbacks.Callback):
    """Stops at the fourth batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 3


def _stop_on_rank_1(strategy: Any, everywhere: bool) -> tuple[int, list[Any]]:
    with strategy.scope():
        model = _model()
    stopping = _Stopping() if strategy.rank == 1 else keras.callbacks.Callback()
    callbacks = [stopping] if everywhere or strategy.rank == 1 else []
    _fit(model, callbacks)
    return int(model.optimizer.iterations), model.get_weights()


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_rank_that_stops_within_an_epoch_stops_all(communicator: str, everywhere: bool, worker_pool: Any) -> None:
    (steps, weights), (other_steps, other) = worker_pool(communicator, 2).run(_stop_on_rank_1, everywhere)
    assert steps == other_steps == 2
    for mine, theirs in zip(weights, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


class _Watching(keras.callbacks.Callback):
    """Notes what it is shown of batches that are no training, and ends both phases early."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops
        self.losses: list[float] = []
        self.rows: list[int] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))
        self.model.stop_evaluating = self.stops and batch == 2

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rows.append(len(logs["outputs"]))
        self.model.stop_predicting = self.stops and batch == 1


def _watched(model: Any, stops: bool) -> tuple[list[float], list[int], float, int]:
    watching = _Watching(stops)
    x = np.random.RandomState(0).rand(37, 4).astype("float32")
    loss, _ = model.evaluate(x, x.sum(1, keepdims=True), batch_size=8, verbose=0, callbacks=[watching])
    rows = len(model.predict(x, batch_size=8, verbose=0, callbacks=[watching]))
    return watching.losses, watching.rows, loss, rows


def _watched_on_ranks(strategy: Any) -> tuple[list[float], list[int], float, int]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = _model()
    return _watched(model, stops=strategy.rank == 1)


def test_batches_of_evaluation_and_prediction(worker_pool: Any) -> None:
    keras.utils.set_random_seed(3)
    expected = _watched(_model(), stops=True)
    assert expected[1:2] + expected[3:] == ([8, 8], 16)
    for found in worker_pool("tf", 2).run(_watched_on_ranks):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)
        assert found[1:2] + found[3:] == expected[1:2] + expected[3:]


def _loop_of_ones_own(strategy: Any, is_fitted: bool) -> tuple[bool, list[float]]:
    with strategy.scope():
        model = _model()
        if is_fitted:
            model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    seen = list[float]()
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    callbacks = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping("loss", patience=0), look], model=model)
    callbacks.on_train_begin()
    for batch in range(2):
        callbacks.on_train_batch_end(batch, {"loss": 0.5 + batch})
    callbacks.on_epoch_end(0, {"loss": 1.0})
    stops_at_once = getattr(model, "stop_training", False)
    callbacks.on_epoch_end(1, {"loss": 0.9 + strategy.rank})  # Only rank 1 sees that it has not become better.
    callbacks.on_train_end()
    return not stops_at_once and model.stop_training, seen


@pytest.mark.parametrize("is_fitted", [False, True])
def test_callbacks_in_a_loop_of_ones_own(is_fitted: bool, worker_pool: Any) -> None:
    """What the loop passes is what callbacks get, also under the names of the model's metrics."""
    assert worker_pool("tf", 2).run(_loop_of_ones_own, is_fitted) == [(True, [0.5, 1.5])] * 2


@pytest.mark.lane("quick")
def test_find_local() -> None:
    one, two = Given("a.One", False), Given("a.Two", True)
    assert find_local([[one, two], [two, one]]) == {}
    assert find_local([[one, one, two], [two, one]]) == {one: [0]}
    tracker = Given("wandb.Logger", False, tracks=True)
    assert find_local([[one, tracker], [one, tracker]]) == {tracker: [0, 1]}
    assert find_local([[one, tracker]]) == {}
    with refuses(told=["Two"], ranks_with_it=[1]):
        find_local([[one], [one, two]])
    # Of several of one class those are local that some rank does not have. Settings alone tell no difference.
    prints, saves, saves_too = (Given("a.One", False, settings=each) for each in ("print", "to file 0", "to file 1"))
    assert find_local([[one, prints], [one]]) == {prints: [0]}
    assert find_local([[one, saves], [one, saves_too]]) == {}
    assert find_local([[prints, saves], [saves_too]]) == {prints: [0], saves: [0], saves_too: [0]}


class _Touched:
    """Records which paths below a folder this process looks for, opens, makes, moves or removes, through Python."""

    def __init__(self, folder: str) -> None:
        self.folder, self.paths = folder, set[str]()
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and (event == "open" or event.startswith(("os.", "shutil."))):
            self._note(arguments)

    def _note(self, arguments: tuple[Any, ...]) -> None:
        paths = [os.fspath(path) for path in arguments if isinstance(path, (str, os.PathLike))]
        self.paths.update(path for path in paths if path.startswith(self.folder))

    def __enter__(self) -> _Touched:
        self._stat = stat = os.stat

        def noting(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._note((path,))
            return stat(path, *args, **kwargs)

        os.stat = noting
        return self

    def __exit__(self, *exception: object) -> None:
        os.stat, self.folder = self._stat, ""


_WRITE_NO_FILES = {
    *("Callback", "CallbackList", "History", "LambdaCallback", "LearningRateScheduler"),
    *("ProgbarLogger", "RemoteMonitor", "TerminateOnNaN"),
}
_HAS_ORBAX = hasattr(keras.callbacks, "OrbaxCheckpoint")  # Since Keras 3.13.


def _all_that_write(strategy: Any, folder: str) -> tuple[list[str], list[float], set[str]]:
    C = keras.callbacks
    orbax = [
        C.OrbaxCheckpoint(f"{folder}/orbax", max_to_keep=None),
        C.OrbaxCheckpoint(f"{folder}/steps", save_freq=3, save_on_background=False, monitor="loss", save_best_only=True),
    ] if _HAS_ORBAX else []  # fmt: skip
    callbacks = [
        C.ModelCheckpoint(f"{folder}/new/{{epoch}}/model.keras"),
        C.ModelCheckpoint(f"{folder}/best/model.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True),
        C.ModelCheckpoint(f"{folder}/batches/{{batch}}.keras", save_freq=3),
        *orbax,
        C.BackupAndRestore(f"{folder}/backup", save_freq=2),
        C.BackupAndRestore(f"{folder}/kept", delete_checkpoint=False),
        C.CSVLogger(f"{folder}/log.csv"),
        C.TensorBoard(f"{folder}/board"),
        C.SwapEMAWeights(),
        C.ReduceLROnPlateau("loss"),
        C.EarlyStopping("loss", restore_best_weights=True),
    ]
    with strategy.scope():
        model = _model()
        model.compile(keras.optimizers.SGD(0.01, use_ema=True), "mse")
    with _Touched(folder) as touched:
        _fit(model, callbacks)
        _fit(model, [C.BackupAndRestore(f"{folder}/kept")])  # Has something to restore.
        model.save(f"{folder}/saved.keras")
        model.save_weights(f"{folder}/saved.weights.h5")
        keras.saving.save_model(model, f"{folder}/function.keras")
        model.export(f"{folder}/exported", verbose=False)
    best = [float(callback.best) for callback in callbacks if getattr(callback, "save_best_only", False)]
    for callback in orbax:
        callback.wait_until_finished()
    return sorted(touched.paths), best, {type(callback).__name__ for callback in callbacks}


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_only_one_rank_touches_files(communicator: str, tmp_path: Path, worker_pool: Any) -> None:
    (touched, best, kinds), (none, other_best, _) = worker_pool(communicator, 2).run(_all_that_write, str(tmp_path))
    assert none == []
    assert best == other_best
    assert len(best) == 1 + _HAS_ORBAX
    in_orbax = ("orbax/1", "steps/3") if _HAS_ORBAX else ()
    for name in ("new/1", "best", "batches", *in_orbax, "backup", "kept", "log.csv", "saved.keras"):
        assert any(path.startswith(str(tmp_path / name)) for path in touched), name
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"new/1/model.keras", "new/2/model.keras", "best/model.weights.h5", "batches/3.keras"} <= names
    assert "exported/saved_model.pb" in names
    if _HAS_ORBAX:
        _compare_with_orbax(tmp_path)
    every_kind = {name for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    assert every_kind - _WRITE_NO_FILES == kinds, "A callback of Keras of which nobody has looked whether it writes."


def _compare_with_orbax(folder: Path) -> None:
    from orbax.checkpoint import v1 as orbax

    in_orbax = orbax.training.Checkpointer(folder / "orbax").load_checkpointables(1, {"pytree": None})["pytree"]
    in_file = keras.models.load_model(folder / "new/2/model.keras").get_state_tree("numpy_array")
    for name in ("trainable_variables", "non_trainable_variables"):
        for mine, theirs in zip(*(keras.tree.flatten(state[name]) for state in (in_orbax, in_file)), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def _own_names_in_a_new_folder(strategy: Any, folder: str) -> None:
    with strategy.scope():
        model = _model()
    _fit(model, [keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}/rank-{strategy.rank}.keras")])


def test_ranks_that_make_one_folder(tmp_path: Path, worker_pool: Any) -> None:
    worker_pool("tf", 2).run(_own_names_in_a_new_folder, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["rank-0.keras", "rank-1.keras"]


def test_a_folder_that_another_rank_makes_first(tmp_path: Path) -> None:
    """Keras looks whether a folder exists, and then makes it, when another rank may just have made it."""
    made = []

    def make_it_first(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and not made and str(arguments[0]) == str(tmp_path / "new"):
            made.append(arguments[0])
            os.mkdir(arguments[0])

    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = _model()
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "new" / "best.keras", monitor="loss", save_best_only=True)
    sys.addaudithook(make_it_first)
    _fit(model, [checkpoint])
    assert made
    assert (tmp_path / "new" / "best.keras").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        _fit(model, [keras.callbacks.ModelCheckpoint(tmp_path / "file" / "best.keras")])


class _Pictures(keras.callbacks.TensorBoard):
    """Asks the model at the end of an epoch, as those do that draw what it predicts."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.seen = self.model.predict(np.ones((4, 4), "float32"), verbose=0).tolist()


class _Stops(keras.callbacks.ModelCheckpoint):
    """Looks at batches, and ends training for a reason that only one process has."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.losses = [*getattr(self, "losses", []), logs["loss"]]
        if len(self.losses) == 3 and tfrep.auto_strategy().rank == 1:
            self.model.stop_training = True


class _Rows(keras.callbacks.CSVLogger):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, dict(logs) | {"norm": float(np.linalg.norm(self.model.get_weights()[0]))})


def _derived(strategy: Any, folder: str) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = _model()
    pictures, rows, stops = _Pictures(f"{folder}/board"), _Rows(f"{folder}/rows.csv"), _Stops(f"{folder}/best.keras")
    _fit(model, [pictures, rows, stops])
    paths = [pictures.log_dir, rows.filename]
    return {"seen": pictures.seen, "losses": stops.losses, "weights": model.get_weights(), "paths": paths}


def test_callbacks_that_are_derived_from_those_that_write(tmp_path: Path, worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(_derived, str(tmp_path))
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 3
    assert first["seen"] == second["seen"]
    assert first["paths"] == second["paths"] == [f"{tmp_path}/board", f"{tmp_path}/rows.csv"]
    for mine, theirs in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert {path.name for path in tmp_path.iterdir()} == {"board", "rows.csv", "best.keras"}
    [events] = (tmp_path / "board" / "train").glob("events.*")
    assert events.stat().st_size
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert "norm" in header
    assert len(lines) == 1


def _embeddings(strategy: Any, folder: str) -> list[float]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(folder, embeddings_freq=1)
    x, y = np.ones((8, 3), "int32"), np.ones((8, 1), "float32")
    return model.fit(x, y, epochs=3, verbose=0, callbacks=[board]).history["loss"]


def test_a_board_of_embeddings_saves_the_model_alone(tmp_path: Path, worker_pool: Any) -> None:
    pytest.importorskip("tensorboard", reason="keras.callbacks.TensorBoard needs tensorboard for embeddings")
    first, second = worker_pool("tf", 2).run(_embeddings, str(tmp_path))
    assert first == second
    assert len(first) == 3
    assert len(list((tmp_path / "train").glob("keras_embedding*"))) == 3


class _MakesAMetric(keras.callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        self.kept = keras.metrics.Mean()


def _normalized_after(strategy: Any) -> list[Any]:
    x = np.random.RandomState(0).randn(32, 3).astype("float32")
    kept = []
    with strategy.scope():
        for callbacks in ([_MakesAMetric()] if strategy.rank == 0 else [], []):
            model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
            kept.append([*callbacks, model])
        model.evaluate(x, x[:, :1], verbose=0)
        return [v.numpy() for v in model.non_trainable_variables]


def test_what_a_callback_of_rank_0_makes_leaves_the_state_of_replicas_in_order(worker_pool: Any) -> None:
    first, second = worker_pool("tf", 2).run(_normalized_after)
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs)


class _AsksAndTrains(keras.callbacks.Callback):
    """Predicts, and trains another model, in the middle of a `fit`; notes what became of what the driver knows of that one."""

    def __init__(self, strategy: Any, other: Any) -> None:
        super().__init__()
        self.extended, self.other = strategy.extended, other
        self.known: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        driver = self.extended.keras_driver
        self.extended.validations_done = 3  # As after a restart.
        before = driver.is_fitting, driver.given_to_fit, driver.steps_of_fit, driver.profile
        self.model.predict(np.ones((2, 4), "float32"), verbose=0)
        x = np.ones((8, 4), "float32")
        self.other.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0)
        after = driver.is_fitting, driver.given_to_fit, driver.steps_of_fit, driver.profile
        self.known.append((all(a is b for a, b in zip(before, after, strict=True)), self.extended.validations_done))
        self.extended.validations_done = 0


def test_a_fit_inside_of_a_fit() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model, other = _model(), _model()
    asks = _AsksAndTrains(strategy, other)
    _fit(model, [asks])
    assert asks.known == [(True, 3)] * 2
