"""A backup is one unit: whatever a kill or somebody else leaves of it, the resumed run ends as the undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from file_states import hidden, states_while
from raising import refuses
from small_training import Program, fit, make_model, mirrored, state

pytestmark = pytest.mark.lane("callbacks")

_TWO: dict[str, Any] = {"double_checkpoint": True, "delete_checkpoint": False}


def _resumed(program: Program, folder: Path, **settings: Any) -> tuple[list[bytes], list[int]]:
    """Goes on with what a kill has left."""
    with _warning_of_weights_alone(folder):
        history = fit(program.start(), 4, keras.callbacks.BackupAndRestore(folder, **settings))
    assert not folder.exists()
    return state(program.model), history.epoch


def _warning_of_weights_alone(folder: Path) -> Any:
    names = [path.name for path in folder.glob("[!.]*")]
    is_begun = bool(names) and all(name.startswith("latest.weights.h5") for name in names)
    return pytest.warns(UserWarning, match="A first backup was interrupted") if is_begun else contextlib.nullcontext()


class _Interrupted(keras.callbacks.BackupAndRestore):
    """Notes what a kill would leave of its folder while it writes one of its backups."""

    def __init__(self, folder: Path, copies: Path, number: int, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._copies, self._left, self.found = copies, number, list[Path]()
        folder.mkdir()

    def _save_model(self) -> None:
        self._left -= 1
        if self._left:
            super()._save_model()
        else:
            self.found = states_while(super()._save_model, Path(self.backup_dir), self._copies)


@pytest.mark.parametrize(
    ("settings", "number", "fewest"),
    [({}, 1, 3), ({}, 3, 4), ({"double_checkpoint": True}, 3, 4), ({"save_freq": 1}, 3, 4)],
    ids=["first", "epochs", "double", "batches"],
)
def test_a_kill_at_any_point_of_a_backup_changes_no_result(
    settings: dict[str, Any], number: int, fewest: int, tmp_path: Path, program: Program, undisturbed: list[bytes]
) -> None:
    callback = _Interrupted(tmp_path / "backup", tmp_path, number, **settings)
    fit(program.start(), 4, callback)
    assert state(program.model) == undisturbed
    assert len(callback.found) >= fewest
    assert any(map(hidden, callback.found))
    oldest = (number - 2) // 2 if "save_freq" in settings else number - 1  # Of two batches an epoch.
    for case in callback.found:
        result, epochs = _resumed(program, case, **settings)
        assert result == undisturbed, case
        assert epochs[0] >= oldest, case


def test_a_kill_while_a_backup_is_removed_changes_no_result(tmp_path: Path, program: Program, undisturbed: list[bytes]) -> None:
    folder = tmp_path / "watched" / "backup"
    fit(program.start(), 4, keras.callbacks.BackupAndRestore(folder, **_TWO))
    callback = keras.callbacks.BackupAndRestore(folder, double_checkpoint=True)
    callback.set_model(program.model)
    found = states_while(callback.on_train_end, folder.parent, tmp_path)
    assert len(found) > 2
    for case in found:
        result, _ = _resumed(program, case / "backup")
        assert result == undisturbed, case


def _restored_epoch(program: Program, folder: Path, **settings: Any) -> int:
    model = program.start()
    callback = keras.callbacks.BackupAndRestore(folder, **settings)
    callback.set_model(model)
    callback.on_train_begin()
    return model._initial_epoch or 0


@pytest.fixture(scope="module")
def two_backups(program: Program, tmp_path_factory: Any) -> Path:
    """A folder with a backup after the second epoch, and the one after the first."""
    folder = tmp_path_factory.mktemp("two") / "backup"
    fit(program.start(), 2, keras.callbacks.BackupAndRestore(folder, **_TWO))
    return folder


def test_weights_and_metadata_find_each_other(two_backups: Path, tmp_path: Path, program: Program) -> None:
    weights, metadata = "latest.weights.h5", "training_metadata.json"

    def after(**changes: str | None) -> int:
        """Restores what is left when files have the content of others, are half, empty or gone."""
        case = tmp_path / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(two_backups, case)
        names = {"w": weights, "m": metadata, "wb": f"{weights}.bkp", "mb": f"{metadata}.bkp"}
        for short, content in changes.items():
            target = case / names[short]
            if content is None:
                target.unlink()
            elif content in names:
                shutil.copy(two_backups / names[content], target)
            else:
                whole = target.read_bytes()
                target.write_bytes(whole[: len(whole) // 2] if content == "half" else b"")
        return _restored_epoch(program, case)

    assert after() == 2
    assert after(w="wb", wb="w") == 2
    assert after(m="mb") == after(m="empty") == after(m="half") == after(m=None) == after(w="half") == after(w=None) == 1
    assert after(m="mb", mb="m") == 2
    assert after(wb="half", mb=None) == after(wb=None) == after(mb="empty") == 2
    for lost in ({"w": "half", "wb": "half"}, {"m": "empty", "mb": "empty"}, {"w": None, "wb": None}, {"w": None, "mb": None}):
        with refuses(OSError, "TFREP-E024", hint="put back files that are whole", backup_dir=..., found=...):
            after(**lost)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Training starts from the beginning"):
        assert after(m=None, mb=None) == 0


def test_metadata_holds_the_checksum_of_its_weights(two_backups: Path) -> None:
    for ending, epoch in (("", 2), (".bkp", 1)):
        metadata = json.loads((two_backups / f"training_metadata.json{ending}").read_text())
        checksum = hashlib.sha256((two_backups / f"latest.weights.h5{ending}").read_bytes()).hexdigest()
        assert metadata == {"epoch": epoch, "batch": 0, "batches_done": 0, "weights_sha256": checksum}


def test_plain_keras_and_we_read_each_others_backups(two_backups: Path, tmp_path: Path, program: Program) -> None:
    folder = tmp_path / "keras"
    fit(make_model(), 2, keras.callbacks.BackupAndRestore(folder, **_TWO))
    assert {path.name for path in folder.iterdir()} == {path.name for path in two_backups.iterdir()}
    assert _restored_epoch(program, folder) == 2
    (folder / "latest.weights.h5").write_text("0")
    assert _restored_epoch(program, folder) == 1
    for name in ("latest.weights.h5", "latest.weights.h5.bkp"):
        (folder / name).write_text("0")
    with refuses(OSError, "TFREP-E024", hint="put back files that are whole", backup_dir=..., found=...):
        _restored_epoch(program, folder)
    ours = keras.callbacks.BackupAndRestore(two_backups, delete_checkpoint=False)
    model = make_model()
    ours.set_model(model)
    ours.on_train_begin()
    assert model._initial_epoch == 2
    fit(program.start(), 2)
    assert state(model) == state(program.model)


class _LooksFirst(keras.callbacks.Callback):
    """Evaluates, predicts, and trains another model, before training goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        x = np.random.RandomState(1).randn(20, 4).astype("float32")
        predicted = self.model.predict(x, batch_size=4, verbose=0)
        self.found = [self.model.evaluate(x, x[:, :1], batch_size=4, verbose=0), len(predicted)]
        self.wanted = [float(np.mean((self.model(x).numpy() - x[:, :1]) ** 2)), 20]
        states = random.getstate(), np.random.get_state()
        with mirrored().scope():
            other = make_model()
        assert len(fit(other, 1).epoch) == 1
        assert other.optimizer.iterations == 2
        random.setstate(states[0])
        np.random.set_state(states[1])


@pytest.mark.parametrize("save_freq", [1, "epoch"])
def test_a_callback_that_evaluates_before_training_goes_on(
    save_freq: Any, tmp_path: Path, program: Program, undisturbed: list[bytes]
) -> None:
    """What is passed over is the data of `fit`."""
    callback = _Interrupted(tmp_path / "backup", tmp_path, 3, save_freq=save_freq)
    fit(program.start(), 4, callback)
    looks = _LooksFirst()
    resumed = keras.callbacks.BackupAndRestore(callback.found[-1], save_freq=save_freq)
    fit(program.start(), 4, resumed, looks)
    assert state(program.model) == undisturbed
    np.testing.assert_allclose(looks.found, looks.wanted, rtol=1e-5)


def test_a_backup_between_epochs_is_none_of_a_batch(tmp_path: Path, program: Program, undisturbed: list[bytes]) -> None:
    """It says that no batch of the next epoch is done, whatever the resumed run saves."""
    fit(program.start(), 2, keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False))
    result, epochs = _resumed(program, tmp_path / "backup", save_freq=1)
    assert epochs == [2, 3]
    assert result == undisturbed
