"""`TFREP_TIMEOUT`, `TFREP_SILENCE_TIMEOUT` and `TFREP_RENDEZVOUS_TIMEOUT`."""

import math
from collections.abc import Callable

import pytest

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.limits import longest_silence, meeting_seconds, timeout_seconds

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
        with pytest.raises(ConfigurationError, match=f"{variable}='{value}'"):
            seconds()
