"""Settings of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lambda: {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, "leave out one of the two"),
        (lambda: {"save_summary_steps": 0}, "save_summary_steps=0"),
        (lambda: {"save_checkpoints_secs": -1.0}, "save_checkpoints_secs=-1.0"),
        (lambda: {"train_distribute": tf.distribute.get_strategy()}, r"tfrep\.MirroredStrategy\(\)"),
        (lambda: {"session_config": "allow_growth"}, "there is no session"),
    ],
)
def test_settings_that_cannot_be_used(settings: Callable[[], dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        tfrep.estimator.RunConfig(**settings())
