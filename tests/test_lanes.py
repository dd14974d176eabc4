"""The table of lanes names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes import LANES, MANY_PROCESSES, NOT_QUICK, QUICK

_TESTS = Path(__file__).parent


@pytest.mark.parametrize("lane", [*LANES, "quick", "not quick", "many processes"])
def test_entries_name_tests(lane: str) -> None:
    for entry in {**LANES, "quick": QUICK, "not quick": NOT_QUICK, "many processes": MANY_PROCESSES}[lane]:
        beginning, _, name = entry.partition("::")
        files = [path for path in _TESTS.rglob("test_*.py") if path.relative_to(_TESTS).as_posix().startswith(beginning)]
        assert files, entry
        assert any(f"def {name.partition('[')[0]}" in path.read_text("utf-8") for path in files), entry
