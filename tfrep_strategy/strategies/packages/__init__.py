"""Packages for searches and reports around training: on several processes the chief decides and reports for all.

Each package has a table here.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import wrapt

from tfrep_strategy.core.replacements import Replacements
from tfrep_strategy.errors import UnsupportedVersionError, warn

_WITH_TABLES = ("keras_tuner", "optuna", "mlflow")
_SWITCHES = {"WANDB_MODE": "disabled", "COMET_AUTO_LOG_DISABLE": "true", "NEPTUNE_MODE": "debug"}
"""Variables that tell trackers to report nothing: those of Weights & Biases, Comet, and both clients of Neptune.

ClearML has none: its offline mode writes a session, and waits until it has looked through all packages.
"""

_made: list[Replacements] = []


def let_the_chief_decide(rank: int, size: int) -> None:
    """Prepares for packages that the program imports, or has imported.

    Trackers of other ranks report nothing, unless the user has set their variable. Otherwise each rank would make its own run.

    Args:
        rank: The rank of this process.
        size: Number of processes.

    Example:
        >>> let_the_chief_decide(rank=0, size=1)
    """
    if size == 1:
        return
    if rank:
        for variable, mode in _SWITCHES.items():
            os.environ.setdefault(variable, mode)
    for package in _WITH_TABLES:
        wrapt.register_post_import_hook(_replace, package)


def tables() -> list[Replacements]:
    """Returns the tables of packages that the program has imported."""
    return [*_made]


def _replace(package: Any) -> None:
    """Installs the table of a package. A release that does not fit is left unchanged."""
    table = importlib.import_module(f"{__name__}.{package.__name__}").TABLE
    try:
        table.install(package.__version__)
        _made.append(table)
    except UnsupportedVersionError as error:
        warn(str(error))
