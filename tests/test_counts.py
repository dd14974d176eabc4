"""The shape of messages, and which settings are counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfrep_strategy.errors import ConfigurationError, check_count, is_count

pytestmark = pytest.mark.lane("quick")


@pytest.mark.parametrize("value", [0, -1, 4, True, 2.0, np.float32(2), "2", None, [2]])
def test_what_is_no_count_is_refused(value: Any) -> None:
    assert not is_count(value, 1, 3)
    with pytest.raises(ConfigurationError) as caught:
        check_count("It has some steps.", 1, 3, steps=value)
    assert str(caught.value) == f"It has some steps. Received: steps={value!r}\nHint: use a whole number, from 1 to 3."


def test_limits_belong_to_what_is_allowed() -> None:
    for value in (1, 2, 3):
        check_count("It has some steps.", 1, 3, steps=value)
    check_count("It may have none.", 0, steps=0)
    assert is_count(10**9)
