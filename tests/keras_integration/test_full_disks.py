"""A disk without space, and a limit on the size of files, are errors that cost nothing which was there."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from file_states import contents, hidden, in_copy, limit_files
from raising import refuses
from small_training import fit, make_model, mirrored, num_bytes, state

from tfrep_strategy.keras_integration.whole_files import written_whole

pytestmark = pytest.mark.lane("callbacks")

_WIDTH = 20_000


@pytest.fixture(scope="module")
def large_model() -> Any:
    with mirrored().scope():
        model = make_model(_WIDTH)
    fit(model, 1)
    return model


def _checkpoint(model: Any, folder: Path) -> None:
    callback = keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss", save_best_only=True)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {"loss": 1.0})


def _back_up(model: Any, folder: Path) -> None:
    callback = keras.callbacks.BackupAndRestore(folder / "backup")
    callback.set_model(model)
    callback._save_model()


_SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "weights": lambda model, folder: model.save_weights(folder / "model.weights.h5"),
    "model": lambda model, folder: model.save(folder / "model.keras"),
    "folder": lambda model, folder: model.save(folder / "unzipped", zipped=False),
    "old format": lambda model, folder: model.save(folder / "model.h5"),
    "checkpoint": _checkpoint,
    "backup": _back_up,
}


def _check(model: Any, folder: Path, scratch: Path, limit: Callable[[], None], code: int, text: str) -> None:
    """Saves in every way, each in a copy of this process: HDF5 must not end it."""
    for what, save in _SAVES.items():
        before = contents(folder)

        def work(save: Callable[[Any, Path], Any] = save) -> None:
            limit()
            save(model, folder)

        ended, error = in_copy(work, scratch)
        assert ended == 0, f"{what}: signal {ended}"
        assert isinstance(error, OSError), (what, error)
        assert error.errno == code, what
        assert text in str(error), what
        assert "\nHint: " in str(error), what
        assert ".tfrep-" not in str(error), what
        assert contents(folder) == before, what
        assert not hidden(folder), what


def test_a_file_size_limit_is_an_error_and_costs_nothing(large_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for save in _SAVES.values():
        save(large_model, folder)
    size = num_bytes(large_model)
    text = "larger than this process may write, and nothing was written. Received: path="
    _check(large_model, folder, tmp_path, lambda: limit_files(size // 2), errno.EFBIG, text)
    text = "The file that was there is unchanged. Received: path="  # Only HDF5 knows how large the file becomes.
    _check(large_model, folder, tmp_path, lambda: limit_files(size + 100), errno.EFBIG, text)


def test_more_than_a_disk_has_is_not_begun(tmp_path: Path) -> None:
    with (
        refuses(OSError, told=["nothing was written"], path=..., num_bytes=2**60, free=...) as error,
        written_whole(tmp_path / "file", 2**60),
    ):
        raise AssertionError
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"A small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_costs_nothing(large_model: Any, small_disk: Path, tmp_path: Path) -> None:
    for save in _SAVES.values():
        save(large_model, small_disk)
    size = num_bytes(large_model)
    system = os.statvfs(small_disk)
    page, free = system.f_frsize, system.f_bfree * system.f_frsize
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (free - size // 2))
    _check(large_model, small_disk, tmp_path, lambda: None, errno.ENOSPC, "not enough free space, and nothing was written.")
    filler.write_bytes(b"0" * (free // page * page - (size // page + 1) * page))
    _check(large_model, small_disk, tmp_path, lambda: None, errno.ENOSPC, "The disk")


class _Tolerant(keras.callbacks.ModelCheckpoint):
    """Notes that the disk is full, and trains on."""

    def __init__(self, path: str, limit_on: int) -> None:
        super().__init__(path, monitor="badness", mode="min", save_best_only=True)
        self.errors: list[tuple[Any, ...]] = []
        self._limit_on = limit_on

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_full = epoch == 1 and self.model.distribute_strategy.rank == self._limit_on
        if is_full:
            limit_files(100_000)
        try:
            super().on_epoch_end(epoch, {"badness": [3.0, 1.0, 2.0][epoch]})
        except OSError as error:
            self.errors.append((epoch, type(error).__name__, *error.args))
        finally:
            if is_full:
                limit_files(resource.RLIM_INFINITY)


def _with_a_full_disk_in_between(strategy: Any, path: str) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model(_WIDTH)
    checkpoint = _Tolerant(path, limit_on=0)
    bests = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: best.append(checkpoint.best))
    best: list[float] = []
    fit(model, 3, checkpoint, bests)
    return {"errors": checkpoint.errors, "best": best, "weights": state(model)}


@pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
def test_a_full_disk_is_the_same_error_on_all_ranks_and_training_goes_on(
    communicator: str, tmp_path: Path, worker_pool: Any
) -> None:
    first, second = worker_pool(communicator, 2).run(_with_a_full_disk_in_between, str(tmp_path / "best.keras"))
    assert first["errors"] == second["errors"]
    ((epoch, kind, code, text),) = first["errors"]
    assert (epoch, kind, code) == (1, "OSError", errno.EFBIG)
    assert "nothing was written" in text
    assert first["weights"] == second["weights"]
    # What could not be saved is not the best.
    assert first["best"] == second["best"] == [3.0, 3.0, 2.0]
    saved = keras.models.load_model(tmp_path / "best.keras")
    assert [w.tobytes() for w in saved.get_weights()] == first["weights"][: len(saved.weights)]


def test_a_checkpoint_of_tensorflow_that_cannot_be_written_leaves_the_one_before(large_model: Any, tmp_path: Path) -> None:
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=large_model), str(tmp_path), max_to_keep=1)
    good = manager.save()
    saved = large_model.get_weights()
    fit(large_model, 1)
    limit_files(100_000)
    try:
        with pytest.raises((tf.errors.OpError, OSError)):
            manager.save()
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert tf.train.latest_checkpoint(str(tmp_path)) == good
    tf.train.Checkpoint(model=large_model).restore(good).expect_partial()
    assert all(map(np.array_equal, large_model.get_weights(), saved))
    assert manager.save() != good
