"""What a rank that fails is told about files that several ranks use."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfrep_strategy.running import notes
from tfrep_strategy.running.script import _run_file

pytestmark = pytest.mark.lane("quick")


def _read_half(folder: Path) -> None:
    half = folder / "half.json"
    half.write_text('{"trial": ', "utf-8")
    with open(half, encoding="utf-8") as file:
        json.load(file)


def _insert_twice(folder: Path) -> None:
    database = folder / "study.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE studies (name TEXT UNIQUE)")
        for _ in range(2):
            connection.execute("INSERT INTO studies VALUES ('a')")


def _prepare(folder: Path) -> None:
    """As TensorFlow Datasets does."""
    try:
        (folder / "gone.txt").read_text()
    except OSError as error:
        raise RuntimeError("Failed to finalize") from error


@pytest.mark.parametrize(
    ("fails", "ranks", "named"),
    [
        (lambda folder: folder.mkdir(), (0, 1), ""),
        (lambda folder: (folder / "gone.txt").read_text(), (1,), "gone.txt"),
        (lambda folder: tf.io.gfile.GFile(str(folder / "gone.txt")).read(), (1,), ""),
        (_read_half, (1,), "half.json"),
        (_insert_twice, (1,), "study.db"),
        (_prepare, (1,), "gone.txt"),
        (lambda folder: int("seven"), (), ""),
    ],
    ids=["exists", "not there", "not there for TensorFlow", "half a file", "a row that is there", "told in other words", "no file"],
)
def test_who_comes_second_to_a_file_is_told_how_to_take_turns(
    fails: Callable[[Path], None], ranks: tuple[int, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for rank in (0, 1):
        environment = SimpleNamespace(rank=rank, size=2)
        monkeypatch.setattr(notes, "detect_environment", lambda environment=environment: environment)
        folder = tmp_path / f"notes{rank}"
        folder.mkdir()
        with pytest.raises(Exception), notes.noted_failure(folder, rank):  # noqa: B017, PT011
            fails(folder)
        told = notes.read_notes(folder)[rank].traceback
        assert ("`with tfrep.chief_first():`" in told) == (rank in ranks)
        if rank in ranks:
            assert f"{named} at the same moment" in told


@pytest.mark.parametrize("debugs", ["0", "1"])
@pytest.mark.parametrize(("text", "error"), [("import json\njson.loads('{')", "JSONDecodeError"), ("def f(:", "SyntaxError")])
def test_of_what_lies_between_only_the_script_is_shown(
    text: str, error: str, debugs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text, "utf-8")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("TFREP_DEBUG", debugs)
    with pytest.raises(Exception) as raised, notes.noted_failure(tmp_path, 0):  # noqa: PT011
        _run_file(str(script))
    sys.excepthook(raised.type, raised.value, raised.tb)
    note = notes.read_notes(tmp_path)[0]
    assert note.error == error
    assert note.traceback == capsys.readouterr().err
    assert f'File "{script}", line {len(text.splitlines())}' in note.traceback
    assert ("tfrep_strategy" in note.traceback) == (debugs == "1")
