"""MLflow on several processes: the chief reports. Runs of other ranks go to a folder that is removed when their process ends.

MLflow has no switch that turns reports off.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
from mlflow.tracking._tracking_service import utils

from tfrep_strategy.core.replacements import Replacement, Replacements, Tested
from tfrep_strategy.strategies.packages.chief import is_chief

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that Python removes when it ends."""


def _of_chief_only(original: Callable[[Any], None]) -> Callable[[Any], None]:
    if is_chief():
        return original
    _kept.append(tempfile.TemporaryDirectory(prefix="tfrep-mlflow-"))
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # Otherwise MLflow asks for a database.
    original((Path(_kept[-1].name) / "runs").as_uri())  # In a new folder MLflow makes its first experiment.
    return lambda uri: None


# fmt: off
TABLE = Replacements(
    Tested("mlflow", "3.17", "3.17"),
    "MLflow",
    "The destination of runs is a variable of a module of MLflow.",
    (
        Replacement(
            utils, "set_tracking_uri", "(uri)", _of_chief_only, "a run is reported once, by rank 0", (mlflow, mlflow.tracking)
        ),
    ),
)
# fmt: on
