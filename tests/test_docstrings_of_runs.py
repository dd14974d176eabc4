"""The examples in docstrings that start processes."""

from __future__ import annotations

import docstrings
import pytest

pytestmark = pytest.mark.lane("launchers")


@pytest.mark.parametrize("name", [name for name in docstrings.examples() if name.rpartition(".")[2] in docstrings.STARTS_PROCESSES])
def test_example(name, differences):
    assert not differences[name], differences[name]
