"""A word by which the tests find their processes."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator

import pytest
from observing import alive, wait_until

from tfrep_strategy.processes import signs_of_life


@pytest.fixture(autouse=True)
def has_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that another test of this process has given signs to a launcher."""
    monkeypatch.setattr(signs_of_life, "_is_watched", threading.Event())


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
