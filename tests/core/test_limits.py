"""`TFREP_TIMEOUT`, `TFREP_SILENCE_TIMEOUT` and `TFREP_RENDEZVOUS_TIMEOUT`."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import refuses

from tfrep_strategy.core.limits import (
    backup_seconds,
    check_keras_backend,
    grace_seconds,
    longest_silence,
    machine_silence,
    meeting_seconds,
    timeout_seconds,
)

pytestmark = pytest.mark.lane("quick")

LIMITS = [
    ("TFREP_TIMEOUT", timeout_seconds, 600.0, True),
    ("TFREP_SILENCE_TIMEOUT", longest_silence, 1800.0, True),
    ("TFREP_RENDEZVOUS_TIMEOUT", meeting_seconds, 300.0, False),
]


@pytest.mark.parametrize(("variable", "seconds", "default", "may_be_none"), LIMITS)
def test_a_limit(
    variable: str, seconds: Callable[[], float], default: float, may_be_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert seconds() == default
    monkeypatch.setenv(variable, "2.5")
    assert seconds() == 2.5
    if may_be_none:
        monkeypatch.setenv(variable, "0")
        assert seconds() == math.inf
    for value in ("soon", "-3", "nan", "inf", *["0"] * (not may_be_none)):
        monkeypatch.setenv(variable, value)
        with refuses(**{variable: value}):
            seconds()


@pytest.mark.parametrize(("timeout", "silence"), [("", 15.0), ("100", 15.0), ("7", 7.0), ("2", 5.0), ("0", math.inf)])
def test_a_machine_may_be_silent_for_less_time_than_a_rank(timeout: str, silence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", timeout)
    assert machine_silence() == silence


def test_seconds_between_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_BACKUP_SECONDS", raising=False)
    assert backup_seconds() is None
    for value, seconds in (("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv("TFREP_BACKUP_SECONDS", value)
        assert backup_seconds() == seconds
    for value in ("soon", "-3", "nan", "inf"):
        monkeypatch.setenv("TFREP_BACKUP_SECONDS", value)
        with refuses(TFREP_BACKUP_SECONDS=value):
            backup_seconds()


def test_a_rank_that_writes_a_backup_has_more_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_GRACE", raising=False)
    assert (grace_seconds(for_a_backup=False), grace_seconds(for_a_backup=True)) == (3.0, 25.0)
    monkeypatch.setenv("TFREP_GRACE", "1.5")
    assert grace_seconds(for_a_backup=False) == grace_seconds(for_a_backup=True) == 1.5
    for value in ("soon", "-3", "0", "nan", "inf"):
        monkeypatch.setenv("TFREP_GRACE", value)
        with refuses(TFREP_GRACE=value):
            grace_seconds(for_a_backup=True)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"backend": "tensorflow"}', '{"backend": "jax"}'])
def test_a_backend_that_keras_reads_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if content is not None:
        (tmp_path / "keras.json").write_text(content, "utf-8")
    if content is not None and "jax" in content:
        with refuses(code="TFREP-E001", hint="KERAS_BACKEND=tensorflow", file=str(tmp_path / "keras.json"), backend="jax"):
            check_keras_backend()
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow" if content and "jax" in content else "")
    check_keras_backend()
