"""Packages that decide or report around training: on several processes the chief does it for all. Each has a table here."""

from __future__ import annotations

import importlib
import os
from typing import Any

import wrapt

from tfrep_strategy.core.replacements import Replacements
from tfrep_strategy.errors import UnsupportedVersionError, warn

_WITH_TABLES = ("keras_tuner", "optuna", "mlflow")
_SWITCHES = {"WANDB_MODE": "disabled"}
"""Variables by which trackers are told to report nothing."""

_made: list[Replacements] = []


def let_the_chief_decide(rank: int, size: int) -> None:
    """Prepares for packages that the program imports, or has imported.

    Trackers of other ranks report nothing, unless the user has set their variable. Each rank would make a run of its own.

    Args:
        rank: The rank of this process.
        size: How many processes there are.

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
    """Replaces what the table of a package names. A release that does not fit works as it does without this package."""
    table = importlib.import_module(f"{__name__}.{package.__name__}").TABLE
    try:
        table.install(package.__version__)
        _made.append(table)
    except UnsupportedVersionError as error:
        warn(str(error))
