"""What the user has chosen for a run by variables of the environment, where no option says it."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

from tfrep_strategy.running.runs import STRATEGIES, Options
from tfrep_strategy.transports import wanted_communicator

_VARIABLES = {"backup_dir": "TFREP_BACKUP_DIR", "profile": "TFREP_PROFILE", "profile_dir": "TFREP_PROFILE_DIR"}


def with_user_variables(options: Options) -> Options:
    """Takes from the environment what the user has set there, where an option has its default.

    Args:
        options: What the command line, or the call, says.

    Returns:
        What is wanted all in all.

    Raises:
        ConfigurationError: A variable has a value that cannot be used.

    Example:
        >>> os.environ["TFREP_BACKUP_DIR"] = "backups"
        >>> with_user_variables(Options()).backup_dir
        'backups'
        >>> del os.environ["TFREP_BACKUP_DIR"]
    """
    if are_of_a_run():
        return options
    found: dict[str, Any] = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    found["communicator"] = wanted_communicator()
    found["strategy"] = strategy if (strategy := os.environ.get("TFREP_STRATEGY")) in STRATEGIES else None
    defaults = {each.name: each.default for each in fields(options)}
    return replace(options, **{name: value for name, value in found.items() if value and getattr(options, name) == defaults[name]})


def wanted_strategy() -> str:
    """Returns the strategy that the user has set, "auto" by default.

    Example:
        >>> wanted_strategy()
        'auto'
    """
    return "auto" if are_of_a_run() else os.environ.get("TFREP_STRATEGY") or "auto"


def are_of_a_run() -> bool:
    """Returns whether the variables are those that a run of this package has set for its ranks, from one of which this is called.

    Example:
        >>> are_of_a_run()
        False
    """
    return "TFREP_RESTARTS" in os.environ
