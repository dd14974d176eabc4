"""Settings of estimators."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lambda: {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, {"hint": "leave out one of the two"}),
        (lambda: {"save_summary_steps": 0}, {"save_summary_steps": 0}),
        (lambda: {"save_checkpoints_secs": -1.0}, {"save_checkpoints_secs": -1.0}),
        (lambda: {"train_distribute": tf.distribute.get_strategy()}, {"hint": "tfrep.MirroredStrategy()"}),
    ],
)
def test_settings_that_cannot_be_used(settings: Callable[[], dict[str, Any]], said: dict[str, Any]) -> None:
    with refuses(**said):
        tfrep.estimator.RunConfig(**settings())


def _give_servers() -> None:
    with tfrep.local_cluster(workers=1, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster)
        with refuses(hint="docs/migration/parameter_server.md", train_distribute=...):
            tfrep.estimator.RunConfig(train_distribute=strategy)
        print("refused")


@pytest.mark.lane("migration")
def test_parameter_servers_are_refused_with_their_guide(tmp_path: Path) -> None:
    done = subprocess.run(command(_give_servers), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["refused"], done.stderr
    assert (Path(__file__).parents[3] / "docs/migration/parameter_server.md").exists()
