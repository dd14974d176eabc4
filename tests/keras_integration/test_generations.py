"""Backups at addresses, where nothing can be renamed: TensorFlow's file system in memory, and kills between its operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from raising import refuses
from small_training import Program, fit, make_model, state

pytestmark = pytest.mark.lane("callbacks")

_BACKUP = keras.callbacks.BackupAndRestore
_CHANGES = ("makedirs", "copy", "remove", "rmtree")


@pytest.fixture
def address() -> Iterator[str]:
    address = "ram://backups/run"
    yield address
    if tf.io.gfile.exists(address):
        tf.io.gfile.rmtree(address)


class _Killed(BaseException):
    """Nothing that is done about errors is done about it."""


class _KilledWhileSaving(_BACKUP):
    """Is killed in one of its backups, before one of the changes that it makes at the address.

    Args:
        address: As of `BackupAndRestore`.
        backup: The number of the backup, from 1.
        change: The number of the change, from 0.
        is_half: Whether half of a file is written there.
    """

    def __init__(self, address: str, backup: int, change: int, is_half: bool, **settings: Any) -> None:
        super().__init__(address, **settings)
        self._backups_left, self._change, self._is_half = backup, change, is_half

    def _save_model(self) -> None:
        self._backups_left -= 1
        with pytest.MonkeyPatch.context() as patch:
            if not self._backups_left:
                count = itertools.count()
                for name in _CHANGES:
                    patch.setattr(tf.io.gfile, name, self._killed_at(count, name, getattr(tf.io.gfile, name)))
            super()._save_model()

    def _killed_at(self, count: Iterator[int], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            if next(count) < self._change:
                return original(*args, **kwargs)
            if name == "copy" and self._is_half:
                content = Path(args[0]).read_bytes()
                with tf.io.gfile.GFile(args[1], "wb") as file:
                    file.write(content[: len(content) // 2])
            raise _Killed

        return change


@pytest.mark.parametrize(
    ("number", "double", "is_half"), [(1, False, True), (3, False, False), (3, True, True)], ids=["first", "third", "double"]
)
@pytest.mark.filterwarnings("ignore:A first backup was interrupted")
def test_a_kill_between_any_two_changes_leaves_a_whole_backup(
    number: int, double: bool, is_half: bool, address: str, program: Program, undisturbed: list[bytes]
) -> None:
    """The one before is taken until the new one has its marker; then it is removed."""
    first_epochs = []
    for change in itertools.count():
        callback = _KilledWhileSaving(address, number, change, is_half, double_checkpoint=double)
        try:
            fit(program.start(), 4, callback)
        except _Killed:
            first_epochs.append(fit(program.start(), 4, _BACKUP(address, double_checkpoint=double)).epoch[0])
            assert state(program.model) == undisturbed, change
            assert not tf.io.gfile.exists(address)
        else:
            break
    # The folder, the weights, the marker; then what is older is removed.
    assert first_epochs[:3] == [number - 1] * 3
    assert set(first_epochs[3:]) <= {number}
    assert len(first_epochs) >= 3 + (number == 3)


def _interrupted(address: str, program: Program, **settings: Any) -> list[str]:
    """Trains two epochs, and returns the folders of the backups, the oldest first."""
    fit(program.start(), 2, _BACKUP(address, delete_checkpoint=False, **settings))
    return [f"{address}/{name.rstrip('/')}" for name in sorted(tf.io.gfile.listdir(address))]


def test_a_marker_with_another_checksum_is_none(address: str, program: Program, undisturbed: list[bytes]) -> None:
    folders = _interrupted(address, program, double_checkpoint=True)
    assert len(folders) == 2
    tf.io.gfile.copy(f"{folders[0]}/latest.weights.h5", f"{folders[1]}/latest.weights.h5", overwrite=True)
    assert fit(program.start(), 4, _BACKUP(address)).epoch == [1, 2, 3]
    assert state(program.model) == undisturbed


def test_nothing_that_is_whole_is_an_error(address: str, program: Program) -> None:
    (folder,) = _interrupted(address, program)
    with tf.io.gfile.GFile(f"{folder}/latest.weights.h5", "w") as file:
        file.write("no weights")
    with refuses(OSError, "TFREP-E024", told=["generation-", "latest.weights.h5"], backup_dir=address):
        fit(program.start(), 4, _BACKUP(address))


def test_a_backup_of_plain_keras_goes_on(address: str, program: Program, undisturbed: list[bytes]) -> None:
    keras.utils.set_random_seed(3)
    plain = make_model()
    fit(plain, 1, _BACKUP(address, delete_checkpoint=False))  # TensorFlow's memory appends to a file that it is to overwrite.
    assert sorted(tf.io.gfile.listdir(address)) == ["latest.weights.h5", "training_metadata.json"]
    assert fit(program.start(), 4, _BACKUP(address, delete_checkpoint=False)).epoch == [1, 2, 3]
    assert all(name.startswith("generation-") for name in tf.io.gfile.listdir(address))


def test_an_address_that_nobody_knows(program: Program) -> None:
    with refuses(told=["nfs://"], hint="use one of file, gs, ram", backup_dir="nfs://host/run"):
        fit(program.start(), 1, _BACKUP("nfs://host/run"))


def test_an_address_where_nothing_can_be_written(tmp_path: Path, program: Program) -> None:
    """A file is in the place of the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="A backup cannot be read there"):
        fit(program.start(), 1, _BACKUP(f"file://{tmp_path}/file/run"))
