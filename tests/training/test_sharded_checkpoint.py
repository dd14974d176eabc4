"""Checkpoints of all ranks: what goes on from them is what was never stopped, and a kill leaves an old one or the new one."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from file_states import states_while
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices, set_distribution
from lanes import in_lane
from raising import refuses
from workers import WorkerFailure, WorkerPool

import tfrep_strategy as tfrep
from tfrep_strategy.communicators.sharding import Along, Even, Owned
from tfrep_strategy.training import checkpoint_files

_SHARDS = {"shard_optimizer_state": True, "shard_weights": True, "shard_weights_min_bytes": 1}
_X = np.random.RandomState(0).randn(37, 6).astype("float32")
_Y = np.random.RandomState(1).randn(37, 1).astype("float32")
Checkpoint = tfrep.callbacks.ShardedCheckpoint


@functools.cache
def _mirrored(size: int) -> Any:
    return tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)], **(_SHARDS if size > 1 else {}))


def _sharded(strategy: Any) -> Any:
    """Returns a strategy like that of the pool, but one that shards."""
    from tfrep_strategy.strategies.groups import remember

    if not hasattr(strategy, "_checkpointed"):
        strategy._checkpointed = tfrep.MultiWorkerStrategy(strategy.communicator.name, **_SHARDS)
    remember(strategy._checkpointed)
    return strategy._checkpointed


def _model(optimizer: str = "Adam", width: int = 8) -> keras.Model:
    """Makes a model with random numbers, moving statistics, and shapes that replicas divide well and badly."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, "tanh", name="into"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(getattr(keras.optimizers, optimizer)(0.01), "mse")
    return model


def _fit(model: Any, *callbacks: Any, epochs: int = 3) -> list[int]:
    return model.fit(_X, _Y, batch_size=8, epochs=epochs, shuffle=True, verbose=0, callbacks=list(callbacks)).epoch


def _state(model: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in [*model.weights, *model.optimizer.variables]]


def _same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [a.shape for a in found] == [b.shape for b in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@functools.cache
def _on_one_device(optimizer: str) -> list[np.ndarray]:
    model = _model(optimizer)
    _fit(model)
    return _state(model)


class _Interruption(Exception):
    """Ends training in the fourth batch of the second epoch."""


class _Interrupts(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, 3):
            raise _Interruption


def _interrupted(folder: str, optimizer: str, save_freq: Any) -> None:
    with contextlib.suppress(_Interruption):
        _fit(_model(optimizer), _Interrupts(), Checkpoint(folder, save_freq=save_freq))
        raise AssertionError("Training was not interrupted.")


def _until(is_true: Callable[[], bool]) -> None:
    """Waits for a write in the background."""
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _newest(folder: Any) -> Path:
    return Path(checkpoint_files.whole_ones(os.fspath(folder))[-1])


def _has(folder: Any, epoch: int, batch: int) -> bool:
    if not checkpoint_files.whole_ones(os.fspath(folder)):
        return False
    content = json.loads((_newest(folder) / "index.json").read_text("utf-8"))
    return (content["epoch"], content["batch"]) == (epoch, batch)


@pytest.mark.parametrize(
    ("size", "then", "optimizer", "save_freq"),
    [(2, 1, "Adam", 3), *in_lane("sharded_training", (2, 4, "Adam", 3), (2, 3, "Lamb", "epoch"), (4, 2, "Lamb", 3))],
)
def test_goes_on_on_other_replicas(size: int, then: int, optimizer: str, save_freq: Any, tmp_path: Path) -> None:
    with _mirrored(size).scope():
        _interrupted(str(tmp_path), optimizer, save_freq)
    _until(lambda: _has(tmp_path, *((1, 1) if save_freq == 3 else (1, 0))))
    with _mirrored(then).scope():
        model = _model(optimizer)
        assert _fit(model, Checkpoint(tmp_path, save_freq=save_freq, restore=True)) == [1, 2]
    _same(_state(model), _on_one_device(optimizer))
    assert Checkpoint.load(model, tmp_path) == (3, 0)
    _same(_state(model), _on_one_device(optimizer))


# Two processes.


def _interrupted_in_scope(strategy: Any, folder: str) -> list[int]:
    """Returns the sizes of what each rank has written. No rank gathers a variable."""
    with _sharded(strategy).scope(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(Even, "gathered", _refuse)
        _interrupted(folder, "Adam", 3)
        _until(lambda: _has(folder, 1, 1))
    return [path.stat().st_size for path in sorted(_newest(folder).glob("part-?????-of-?????"))]


def _resumed_in_scope(strategy: Any, folder: str) -> list[np.ndarray]:
    with _sharded(strategy).scope():
        model = _model()
        assert _fit(model, Checkpoint(folder, save_freq=3, restore=True)) == [1, 2]
        return _state(model)


@pytest.mark.lane("sharded_training")
@pytest.mark.parametrize("communicator", ["shared_memory", "tf", "horovod"])
def test_two_processes(communicator: str, worker_pool: Any, tmp_path: Path) -> None:
    pool = worker_pool(communicator, 2)
    for sizes in pool.run(_interrupted_in_scope, str(tmp_path)):
        assert max(sizes) < 1.3 * min(sizes)
    with _mirrored(1).scope():  # One process goes on.
        model = _model()
        assert _fit(model, Checkpoint(shutil.copytree(tmp_path, tmp_path / "copy"), save_freq=3, restore=True)) == [1, 2]
    _same(_state(model), _on_one_device("Adam"))
    for found in pool.run(_resumed_in_scope, str(tmp_path)):
        _same(found, _on_one_device("Adam"))


class _Asks(keras.callbacks.Callback):
    """Asks one rank to end, as a scheduler does."""

    def __init__(self, is_asked: bool) -> None:
        super().__init__()
        self.is_asked = is_asked

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and self.is_asked:
            os.kill(os.getpid(), signal.SIGTERM)


def _ended(strategy: Any, folder: str, is_asked: bool) -> None:
    with strategy.scope(), pytest.raises(SystemExit) as ended:
        _fit(_model(), _Asks(is_asked), Checkpoint(folder, restore=True), epochs=10_000)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_request_to_end(tmp_path: Path) -> None:
    """SIGTERM is answered by a checkpoint, in the middle of an epoch, too."""
    _ended(_mirrored(2), str(tmp_path), is_asked=True)
    with _mirrored(3).scope():
        model = _model()
        epoch, _ = Checkpoint.load(model, tmp_path)
        assert _fit(model, Checkpoint(tmp_path, restore=True), epochs=epoch + 1) == [epoch]
    alone = _model()
    _fit(alone, epochs=epoch + 1)
    _same(_state(model), _state(alone))


def _ended_in_scope(strategy: Any, folder: str) -> tuple[int, int]:
    _ended(_sharded(strategy), folder, is_asked=strategy.rank == 1)
    with _sharded(strategy).scope():
        return tuple(Checkpoint.load(_model(), folder))


@pytest.mark.lane("sharded_training")
def test_one_of_two_processes_is_asked_to_end(worker_pool: Any, tmp_path: Path) -> None:
    first, second = worker_pool("shared_memory", 2).run(_ended_in_scope, str(tmp_path))
    assert first == second >= (1, 0)


def _errors_in_scope(strategy: Any, folder: str) -> list[str]:
    """Returns the errors of a rank: of a damaged checkpoint, and of one that rank 1 cannot write."""
    errors = []
    with _sharded(strategy).scope():
        model = _model()
        begun = time.monotonic()
        for work in (lambda: Checkpoint.load(model, folder), lambda: _fit(model, Checkpoint(f"{folder}/new"))):
            if strategy.rank == 1 and errors:
                checkpoint_files.require_space = _fails
            try:
                work()
            except OSError as error:
                errors.append(str(error))
        if strategy.rank == 1:
            callbacks: list[Any] = []
        else:
            callbacks = [Checkpoint(f"{folder}/new")]
        try:
            _fit(model, *callbacks)
        except ValueError as error:
            errors.append(str(error))
        assert time.monotonic() - begun < 60
    return errors


def _fails(*args: Any) -> None:
    raise OSError("the disk is full")


@pytest.mark.lane("sharded_training")
def test_all_ranks_raise_the_error_of_one(tmp_path: Path) -> None:
    with WorkerPool("shared_memory", 2) as pool:
        pool.run(_interrupted_in_scope, str(tmp_path))
        (_newest(tmp_path) / "part-00001-of-00002").unlink()
        for damaged, unwritten, missing in pool.run(_errors_in_scope, str(tmp_path)):
            assert "part-00001-of-00002" in damaged
            assert "rank=1" in unwritten
            assert "the disk is full" in unwritten
            assert "Only some ranks" in missing
    assert checkpoint_files.whole_ones(str(tmp_path / "new")) == []


def _killed_in_scope(strategy: Any, folder: str) -> None:
    """Rank 1 is killed while it writes the second checkpoint, after rank 0 has written its part."""

    def kill(path: str, num_bytes: int) -> None:
        if "checkpoint-00000002" in path:
            _until(lambda: os.path.exists(os.path.join(os.path.dirname(path), "part-00000-of-00002.json")))
            os.kill(os.getpid(), signal.SIGKILL)

    if strategy.rank == 1:
        checkpoint_files.require_space = kill
    with _sharded(strategy).scope():
        _fit(_model(), Checkpoint(folder))


@pytest.mark.lane("sharded_training")
def test_a_rank_that_is_killed_leaves_the_older_one(tmp_path: Path) -> None:
    with WorkerPool("shared_memory", 2) as pool, pytest.raises(WorkerFailure):
        pool.run(_killed_in_scope, str(tmp_path))
    assert (tmp_path / "checkpoint-00000002" / "part-00000-of-00002").exists()
    model = _model()
    assert Checkpoint.load(model, tmp_path) == (1, 0)
    expected = _model()
    _fit(expected, epochs=1)
    _same(_state(model), _state(expected))
    assert _fit(model, Checkpoint(tmp_path, restore=True)) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000003", "checkpoint-00000004"]


# Without steps.


def _random(model: Any, seed: int) -> list[np.ndarray]:
    """Gives the variables random values."""
    draw = np.random.RandomState(seed)
    model.optimizer.build(model.trainable_variables)
    for variable in [*model.weights, *model.optimizer.variables]:
        variable.assign(draw.randint(0, 1000, variable.shape).astype(variable.dtype))
    return _state(model)


def _save(model: Any, folder: Any, epoch: int = 0, **options: Any) -> None:
    callback = Checkpoint(folder, **options)
    callback.set_model(model)
    callback.set_params({"epochs": 9})
    callback.on_train_begin()
    callback.on_epoch_end(epoch)
    callback.on_train_end()


@contextlib.contextmanager
def _layouts(mesh: tuple[int, int], layout: tuple[str | None, str | None]) -> Iterator[None]:
    """Splits the kernel of the first layer between devices."""
    tfrep.enable_keras_distribution()
    layouts = LayoutMap(DeviceMesh(mesh, ["batch", "model"], list_devices()[: mesh[0] * mesh[1]]))
    layouts[".*into/kernel"] = layout
    set_distribution(ModelParallel(layout_map=layouts))
    try:
        yield
    finally:
        set_distribution(None)


def _scope(size: int) -> Any:
    return _mirrored(size).scope() if size else contextlib.nullcontext()


def _refuse(*args: Any) -> Any:
    raise AssertionError("a whole was gathered")


@pytest.mark.parametrize(
    ("sizes", "optimizer"),
    [*in_lane("quick", ((0, 4), "Adam")), *in_lane("sharded_training", ((0, 2, 3, 4), "Adam"), ((0, 2, 3, 4), "Lamb"))],
)
def test_each_cut_reads_each_other(sizes: tuple[int, ...], optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in sizes:
        with _scope(size):
            model = _model(optimizer)
            expected = _random(model, size)
            with monkeypatch.context() as patched:
                for kind in (Even, Owned):
                    patched.setattr(kind, "joined", _refuse)
                _save(model, tmp_path / str(size), size)
        for other in sizes:
            with _scope(other):
                model = _model(optimizer)
                with monkeypatch.context() as patched:
                    for kind in (Even, Owned):
                        patched.setattr(kind, "joined", _refuse)
                    assert Checkpoint.load(model, tmp_path / str(size)) == (size + 1, 0)
                for a, b in zip(_state(model), expected, strict=True):
                    np.testing.assert_array_equal(a, b)


def _variable(shape: tuple[int, ...], cut: Any) -> Any:
    """Describes a variable of 16-bit numbers."""
    copies = [SimpleNamespace(shape=getattr(cut, "part_shape", shape))] * (cut.size if cut else 1)
    extended = SimpleNamespace(first_local_replica=0)
    value = SimpleNamespace(cut=cut, values=copies, distribute_strategy=SimpleNamespace(extended=extended))
    return SimpleNamespace(shape=shape, dtype="int16", value=value, path="variable")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("shape", [(8, 12), (7, 12, 4), (12,), (), (0, 4)])
def test_parts_are_found_in_the_parts_of_others(shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape), dtype="int16").reshape(shape)
    cuts: list[Any] = [None, *(Even(shape, size) for size in (2, 3, 5)), *(Owned(shape, 3, owner) for owner in (0, 2))]
    even = [axis for axis, d in enumerate(shape) if d and d % 2 == 0]
    cuts += [Along(shape, (1, size), (None, axis)) for axis in even for size in (2, 4) if shape[axis] % size == 0]
    cuts += [Along(shape, (2, 2), (across, within)) for across in (None, *even) for within in even if across != within]

    def parts(cut: Any) -> list[np.ndarray]:
        return [whole] if cut is None else [np.asarray(cut.part(tf.constant(whole), i)) for i in range(cut.size)]

    for has in cuts:
        source, written = _variable(shape, has), []
        for replica, part in enumerate(parts(has)):
            if has is None or checkpoint_files._writes(source, 1, replica):
                written += checkpoint_files._in_runs(source, replica, part)
        assert sum(values.size for _, values in written) == whole.nbytes
        for wants in cuts:
            for replica, expected in enumerate(parts(wants)):
                wanted = checkpoint_files._runs(_variable(shape, wants), replica)
                size = sum(each.size for each in wanted)
                found = np.zeros(size, np.uint8)
                copied = checkpoint_files._copy_all([(values, runs) for runs, values in written], found, wanted, whole.nbytes)
                assert copied == size
                np.testing.assert_array_equal(found.view("int16"), expected.reshape(-1)[: size // 2])


@pytest.mark.lane("sharded_training")
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [((1, 2), ("model", None)), ((1, 2), (None, "model")), ((2, 2), ("model", None)), ((2, 2), ("batch", "model"))],
)
def test_layouts_of_keras(mesh: tuple[int, int], layout: tuple[str | None, str | None], tmp_path: Path) -> None:
    with _layouts(mesh, layout):
        model = _model()
        expected = _random(model, 1)
        assert [type(getattr(v.value, "cut", None)) for v in model.weights].count(Along) == 1
        _save(model, tmp_path)
    with _mirrored(4).scope():
        model = _model()
        Checkpoint.load(model, tmp_path)
        for a, b in zip(_state(model), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        expected = _random(model, 2)
        _save(model, tmp_path)
    with _layouts(mesh, layout):
        model = _model()
        Checkpoint.load(model, tmp_path)
        for a, b in zip(_state(model), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.lane("quick")
def test_a_kill_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    model = _model()
    old = _random(model, 1)
    _save(model, folder, 0, max_to_keep=1)
    new = _random(model, 2)
    states = states_while(lambda: _save(model, folder, 1, max_to_keep=1), folder, tmp_path / "copies")
    assert len(states) > 5
    epochs = []
    for copy in states:
        found = _model()
        epochs.append(Checkpoint.load(found, copy).epoch)
        for a, b in zip(_state(found), {1: old, 2: new}[epochs[-1]], strict=True):
            np.testing.assert_array_equal(a, b)
    assert epochs == sorted(epochs)
    assert set(epochs) == {1, 2}
    assert len(list(folder.iterdir())) == 1


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [*in_lane("quick", _flip), *in_lane("sharded_training", Path.unlink, _cut_short)])
def test_a_damaged_file_changes_nothing(damage: Callable[[Path], None], tmp_path: Path) -> None:
    with _mirrored(2).scope():
        model = _model()
        _random(model, 1)
        _save(model, tmp_path)
        before = _random(model, 2)
        damage(_newest(tmp_path) / "part-00000-of-00001")
        with refuses(OSError, hint="put its files back", told=["part-00000-of-00001"], folder=...):
            Checkpoint.load(model, tmp_path)
        with refuses(OSError, hint="put its files back", folder=...):
            _fit(model, Checkpoint(tmp_path, restore=True))
        for a, b in zip(_state(model), before, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2, "parts": [{"runs": [1]}]}'])
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    model = _model()
    _save(model, tmp_path)
    (_newest(tmp_path) / "index.json").write_text(content, "utf-8")
    with refuses(OSError, told=["index.json"], folder=...):
        Checkpoint.load(model, tmp_path)
    (_newest(tmp_path) / "index.json").write_text('{"format": 7}', "utf-8")
    with refuses(format=7):
        Checkpoint.load(model, tmp_path)


@pytest.mark.lane("quick")
def test_another_model(tmp_path: Path) -> None:
    model = _model()
    expected = _random(model, 1)
    _save(model, tmp_path)
    short = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    short.compile("adam", "mse")
    for other in (_model("SGD"), _model(width=9), short):
        before = _random(other, 2)
        with refuses(hint="another folder", variables=..., of_model_and_checkpoint=...):
            Checkpoint.load(other, tmp_path)
        for a, b in zip(_state(other), before, strict=True):
            np.testing.assert_array_equal(a, b)
    predicts = keras.models.clone_model(model)  # It has no optimizer.
    Checkpoint.load(predicts, tmp_path)
    for a, b in zip(predicts.get_weights(), expected, strict=False):
        np.testing.assert_array_equal(a, b)


@pytest.mark.lane("quick")
def test_what_cannot_be_written_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    _random(model, 1)
    _save(model, tmp_path)
    monkeypatch.setattr(checkpoint_files, "require_space", _fails)
    with refuses(OSError, hint="disk is full", rank=0):
        _save(model, tmp_path, 1)
    monkeypatch.undo()
    assert Checkpoint.load(model, tmp_path) == (1, 0)
    _save(model, tmp_path, 2)
    assert Checkpoint.load(model, tmp_path) == (3, 0)


@pytest.mark.lane("sharded_training")
def test_an_epoch_of_unknown_length_ends(tmp_path: Path) -> None:
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(8).filter(lambda *batch: True)
    model = _model()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[Checkpoint(tmp_path, save_freq=5)])
    assert _has(tmp_path, 1, 0)


@pytest.mark.lane("quick")
def test_settings_and_models_that_cannot_be_saved(tmp_path: Path) -> None:
    with refuses(hint="shared disk", folder="gs://bucket/run"):
        Checkpoint("gs://bucket/run")
    for setting in ({"save_freq": 0}, {"save_freq": "batch"}, {"max_to_keep": 0}):
        with refuses(hint="whole number", **setting):
            Checkpoint(tmp_path, **setting)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with refuses(hint="keras.Input", model=...):
        _fit(model, Checkpoint(tmp_path))
    of_tensorflow = SimpleNamespace(distribute_strategy=object.__new__(tf.distribute.MultiWorkerMirroredStrategy))
    with refuses(hint="of this package", strategy=...):
        Checkpoint.load(of_tensorflow, tmp_path)
    with refuses(FileNotFoundError, hint="the path is right", folder=...):
        Checkpoint.load(_model(), tmp_path)
