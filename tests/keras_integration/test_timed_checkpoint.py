"""Checkpoints by the clock, without a strategy; under parameter servers: `strategies/parameter_server_cases.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")


def _fit(callback: Any, epochs: int = 2) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, epochs=epochs, verbose=0, callbacks=[callback])
    return model


def test_it_saves_as_often_as_was_asked(tmp_path: Path) -> None:
    _fit(tfrep.TimedCheckpoint(tmp_path / "seldom.weights.h5", seconds=3600))
    assert not list(tmp_path.iterdir())
    model = _fit(tfrep.TimedCheckpoint(tmp_path / "new" / "often-{epoch}.weights.h5", seconds=1e-9))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["often-1.weights.h5", "often-2.weights.h5"]
    model.load_weights(tmp_path / "new" / "often-2.weights.h5")


@pytest.mark.parametrize(("path", "seconds"), [("model.h5", 1), ("model.weights.h5", 0), ("model.weights.h5", "1")])
def test_bad_settings(path: str, seconds: Any) -> None:
    with pytest.raises(ValueError, match="Received"):
        tfrep.TimedCheckpoint(path, seconds=seconds)
