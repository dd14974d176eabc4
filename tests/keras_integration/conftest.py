"""Fixtures of several modules: models in float64, and a program of backups, with what it learns where nothing disturbs it."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
from small_training import Program, fit, mirrored, state


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(mirrored())


@pytest.fixture(scope="module")
def undisturbed(program: Program) -> list[bytes]:
    fit(program.start())
    return state(program.model)


@pytest.fixture
def float64() -> Iterator[None]:
    """Models compute in float64. Adam divides a gradient by its size: where it is zero but for rounding, a step is noise."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
