"""Whole programs that are drawn at random give on replicas what they give on one device, in float64.

`TFREP_DRAWN` says how many there are, 6 by default, and `TFREP_DRAWN_SEED` which: it is the seed of the first one.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from partitioner.drawn_models import Program, drawn

import tfrep_strategy as tfrep

MANY = int(os.environ.get("TFREP_DRAWN", "6"))
SEED = int(os.environ.get("TFREP_DRAWN_SEED", "0"))
pytestmark = [pytest.mark.lane("drawn"), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)
    keras.backend.clear_session()


def _outcome(program: Program) -> dict[str, Any]:
    """Trains, evaluates and predicts; returns all numbers that come out."""
    model = program.make()
    given = {"batch_size": program.batch_size, "verbose": 0}
    history = model.fit(program.x, program.y, sample_weight=program.weights, shuffle=False, **given)
    found = {f"{name} of training": values for name, values in history.history.items()}
    evaluated = model.evaluate(program.x, program.y, sample_weight=program.weights, return_dict=True, **given)
    found |= {f"{name} of evaluation": value for name, value in evaluated.items()}
    found["predictions"] = model.predict(program.x, **given)
    for i, variable in enumerate([*model.variables, *model.optimizer.variables, *model.metrics_variables]):
        found[f"{variable.path} ({i})"] = keras.ops.convert_to_numpy(variable)
    return found


@pytest.mark.parametrize("seed", range(SEED, SEED + MANY))
def test_a_drawn_program(seed: int) -> None:
    program = drawn(seed)
    expected = _outcome(program)
    for replicas in (2, 3):
        with tfrep.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*cannot be split among replicas")
            found = _outcome(program)
        _check(expected, found, f"TFREP_DRAWN_SEED={seed} TFREP_DRAWN=1, {replicas} replicas", program)


def _check(expected: dict[str, Any], found: dict[str, Any], where: str, program: Program) -> None:
    for (name, right), (other, value) in zip(expected.items(), found.items(), strict=True):
        told = f"{where}: {name}, {other} of {program.text}"
        np.testing.assert_allclose(value, right, rtol=1e-7, atol=1e-8, err_msg=told)


class _DrawnLayouts(keras.distribution.ModelParallel):
    """Splits each variable along an axis that is drawn, if two devices divide one.

    Args:
        batch: How many of two devices share the rows of a batch.
        seed: The axes are drawn from this.
    """

    def __init__(self, axes: tuple[int, int], seed: int) -> None:
        devices = [f"cpu:{i}" for i in range(axes[0] * axes[1])]
        mesh = keras.distribution.DeviceMesh(axes, ["batch", "model"], devices)
        super().__init__(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch")
        self._draw, self._names = random.Random(seed), [name for name, size in zip(mesh.axis_names, axes, strict=True) if size > 1]

    def get_variable_layout(self, variable: Any) -> Any:
        axes = [axis for axis, size in enumerate(variable.shape) if size and size % 2 == 0]
        layout: list[str | None] = [None] * len(variable.shape)
        for name in self._names:
            if axes and (split := self._draw.choice([*axes, None])) is not None:
                layout[split] = name
                axes.remove(split)
        return getattr(variable, "_layout", None) or keras.distribution.TensorLayout(layout, self.device_mesh)


@pytest.mark.parametrize("axes", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(SEED, SEED + MANY))
def test_drawn_layouts(seed: int, axes: tuple[int, int]) -> None:
    tfrep.enable_keras_distribution()
    program = drawn(seed)
    expected = _outcome(program)
    with _DrawnLayouts(axes, seed).scope(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*cannot be split among replicas")
        found = _outcome(program)
    _check(expected, found, f"TFREP_DRAWN_SEED={seed} TFREP_DRAWN=1, layouts, mesh {axes}", program)
