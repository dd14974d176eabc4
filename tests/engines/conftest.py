"""What one device learns, to which the engines are compared."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from starting import GOES_ON, done, found_in


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The two fits of `goes_on.py` on one device."""
    (found,) = found_in(done([sys.executable, GOES_ON], tmp_path_factory.mktemp("one_device"))[0])
    return found["fits"]  # type: ignore[no-any-return]
