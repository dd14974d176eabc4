"""What the tests of the launcher share."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from observing import alive, wait_until


@pytest.fixture
def marker() -> Iterator[str]:
    """A word for the command lines of a test's processes; none that carries it may outlive the test."""
    word = f"marker-{uuid.uuid4().hex}"
    yield word
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not alive(word), 10.0)
    left = alive(word)
    for process in left:
        process.kill()
    assert not left


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before, 5.0)


@pytest.fixture
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where this test, and only this test, makes temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
