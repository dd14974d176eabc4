"""What tests of backups share: a program, and what it learns where nothing disturbs it."""

from __future__ import annotations

import pytest
from small_training import Program, fit, mirrored, state


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(mirrored())


@pytest.fixture(scope="module")
def undisturbed(program: Program) -> list[bytes]:
    fit(program.start())
    return state(program.model)
