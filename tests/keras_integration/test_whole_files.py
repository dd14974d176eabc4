"""A file that Keras writes is whole, or the one before is there."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf
from file_states import contents, hidden, in_copy, states_while
from small_training import fit, make_model, mirrored, state

from tfrep_strategy.keras_integration.whole_files import hidden_folder, written_whole

pytestmark = pytest.mark.lane("callbacks")

_SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "model.keras": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "model.h5": lambda model, path: model.save(path),
}


@pytest.fixture(scope="module")
def model() -> Any:
    with mirrored().scope():
        model = make_model()
    fit(model, 1)
    return model


def _loaded(path: Path) -> Any:
    if not path.name.endswith(".weights.h5"):
        return keras.models.load_model(path, compile=False)
    model = make_model()
    model.load_weights(path)
    return model


def _has(model: Any, weights: list[Any]) -> bool:
    return all(map(np.array_equal, model.get_weights(), weights))


@pytest.mark.parametrize("name", list(_SAVES))
def test_a_kill_at_any_point_of_a_save_leaves_the_old_file_or_the_new_one(name: str, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    _SAVES[name](model, folder / name)
    old = model.get_weights()
    fit(model, 1)
    new = model.get_weights()
    found = states_while(lambda: _SAVES[name](model, folder / name), folder, tmp_path)
    assert len(found) >= 2
    for case in found:
        loaded = _loaded(case / name)
        assert _has(loaded, old) or _has(loaded, new), case
    begun = next(case for case in found if hidden(case))
    _SAVES[name](model, begun / name)
    assert [path.name for path in begun.iterdir()] == [name]


def test_a_kill_leaves_what_was_there_before_the_call(model: Any, tmp_path: Path) -> None:
    """States of files are copied above; here processes are killed, and leave the same."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    before.mkdir()
    model.save_weights(before / "model.weights.h5")
    fit(model, 1)
    seen = set()
    for point in range(0, 10_000, 10):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        killed, error = in_copy(lambda: model.save_weights(folder / "model.weights.h5"), tmp_path, point)
        assert killed in (0, signal.SIGKILL), error
        left = contents(folder)
        assert left.keys() == {"model.weights.h5"}
        is_old = left == contents(before)
        assert is_old or _has(_loaded(folder / "model.weights.h5"), model.get_weights())
        seen.add((killed, is_old))
        if not killed:
            break
    assert seen >= {(signal.SIGKILL, True), (0, False)}


def test_where_a_file_goes_and_what_it_is(tmp_path: Path) -> None:
    def write(path: Path, text: str = "new") -> None:
        with written_whole(path) as unfinished:
            assert os.path.basename(unfinished) == path.name
            Path(unfinished).write_text(text)
            assert not path.exists() or path.read_text() != text

    mask = os.umask(0o027)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    (tmp_path / "file").chmod(0o604)
    write(tmp_path / "file", "newer")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o604
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    for text in ("first", "second"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_text() == text
    with written_whole("/dev/null") as unfinished:
        assert unfinished == "/dev/null"
    with pytest.raises(FileNotFoundError, match="nowhere/file"), written_whole(tmp_path / "nowhere" / "file"):
        pass
    with contextlib.suppress(RuntimeError), written_whole(tmp_path / "file") as unfinished:
        Path(unfinished).write_text("half")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file", "link"]


def test_folders_keep_what_is_not_replaced(tmp_path: Path) -> None:
    def write(text: str) -> list[str]:
        with written_whole(tmp_path / "folder") as unfinished:
            for name in ("saved_model.pb", "variables/a"):
                path = Path(unfinished, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    assert write("first") == ["folder/saved_model.pb", "folder/variables/a"]
    (tmp_path / "folder" / "variables" / "own").write_text("mine")
    assert write("second") == ["folder/saved_model.pb", "folder/variables/a", "folder/variables/own"]
    assert [(tmp_path / "folder" / name).read_text() for name in ("saved_model.pb", "variables/a", "variables/own")] == [
        "second",
        "second",
        "mine",
    ]


def test_what_killed_processes_have_left_is_removed(tmp_path: Path) -> None:
    host = os.uname().nodename
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    stays = [f".tfrep-{os.getppid()}-x@{host}", f".tfrep-{ended.pid}-x@another", ".tfrep-x"]
    in_container = f".tfrep-{ended.pid}-y@{host}"
    for name in [f".tfrep-{ended.pid}-x@{host}", f".tfrep-{os.getpid()}-x@{host}", in_container, *stays]:
        (tmp_path / name / "folder").mkdir(parents=True)
    descriptor = os.open(tmp_path / in_container, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # As its process holds it, whose number means nothing here.
    with written_whole(tmp_path / "outer") as outer:
        Path(outer).touch()
        with written_whole(tmp_path / "inner") as inner:  # Leaves the other one alone.
            Path(inner).touch()
    os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stays, in_container, "inner", "outer"])
    with hidden_folder(str(tmp_path)) as own:
        command = ["flock", "--nonblock", own, "true"]
        assert subprocess.run(command, check=False).returncode == 1, "others can tell that it is used"
        assert not (tmp_path / in_container).exists(), "whose process has ended by now"


def test_every_way_of_saving_is_as_in_keras(model: Any, tmp_path: Path) -> None:
    model.save_weights(tmp_path / "parts.weights.json", max_shard_size=1e-7)
    assert len(list(tmp_path.glob("parts_*.weights.h5"))) > 1
    other = make_model()
    other.load_weights(tmp_path / "parts.weights.json")
    assert state(other)[: len(other.weights)] == state(model)[: len(other.weights)]
    model.save(tmp_path / "unzipped", zipped=False)
    assert {path.name for path in (tmp_path / "unzipped").iterdir()} >= {"config.json", "metadata.json", "model.weights.h5"}
    for name in ("old.h5", "old.hdf5", "whole.weights.h5"):
        model.save(tmp_path / "new" / name, include_optimizer=False)
        assert _has(keras.models.load_model(tmp_path / "new" / name), model.get_weights())
    with open(tmp_path / "open.keras", "wb") as file:
        keras.saving.save_model(model, file, zipped=False)
    assert keras.models.load_model(tmp_path / "open.keras").count_params() == model.count_params()
    with pytest.raises(ValueError, match="weights.h5"):
        model.save_weights(tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"unzipped=|should not end") as refused:
        model.save(tmp_path / "wrong.keras", zipped=False)
    assert str(tmp_path / "wrong.keras") in str(refused.value)
    with pytest.raises(FileNotFoundError):
        model.save(tmp_path / "nowhere" / "model.keras")
    assert not hidden(tmp_path)


@pytest.mark.parametrize("name", list(_SAVES))
def test_the_user_is_asked_once_before_a_file_is_replaced(name: str, model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path, asked, answers = tmp_path / name, list[str](), ["n", "y"]

    def answer(question: str) -> str:
        asked.append(question)
        return answers[len(asked) - 1]

    monkeypatch.setattr("builtins.input", answer)
    save = model.save_weights if name.endswith(".weights.h5") else model.save
    save(path, overwrite=False)
    before = path.stat().st_ino
    save(path, overwrite=False)
    assert path.stat().st_ino == before
    save(path, overwrite=False)
    assert path.stat().st_ino != before
    assert asked == [f"[WARNING] {path} already exists - overwrite? [y/n]"] * 2


@pytest.mark.parametrize("interactive", [True, False])
def test_an_export_shows_the_path_that_was_asked_for(
    interactive: bool, model: Any, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    if not interactive:
        keras.config.disable_interactive_logging()
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.INFO)
    logging.getLogger("absl").addHandler(caplog.handler)
    try:
        model.export(tmp_path / "exported", verbose=True)
    finally:
        logging.getLogger("absl").removeHandler(caplog.handler)
        absl.logging.set_verbosity(verbosity)
        keras.config.enable_interactive_logging()
    shown = capsys.readouterr().out if interactive else caplog.text
    assert f"'{tmp_path}/exported'" in shown
    assert "(1, 4)" in shown or "(None, 4)" in shown
    assert ".tfrep-" not in shown + caplog.text
    assert tf.saved_model.load(str(tmp_path / "exported")).serve(np.zeros((1, 4), "float32")).shape == (1, 1)


def test_rows_of_a_csv_file_are_whole(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    fit(model, 2, keras.callbacks.CSVLogger(path))
    whole = path.read_text()
    path.write_text(whole[:-5])  # What a full disk leaves of the second row.
    fit(model, 2, keras.callbacks.CSVLogger(path, append=True))
    rows = path.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "0", "1"]
    assert len({len(row.split(",")) for row in rows}) == 1
    path.write_text("epo")
    fit(model, 1, keras.callbacks.CSVLogger(path, append=True))
    header, row = path.read_text().splitlines()
    assert header == whole.splitlines()[0]
    assert row.startswith("0,")
