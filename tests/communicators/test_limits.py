"""`TFREP_TIMEOUT`."""

import pytest

from tfrep_strategy.communicators.limits import timeout_seconds
from tfrep_strategy.errors import ConfigurationError


def test_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_TIMEOUT", raising=False)
    assert timeout_seconds() == 600.0


def test_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "2.5")
    assert timeout_seconds() == 2.5


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "inf"])
def test_what_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", value)
    with pytest.raises(ConfigurationError, match=f"TFREP_TIMEOUT='{value}'"):
        timeout_seconds()
