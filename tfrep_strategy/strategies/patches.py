"""The list of everything that this package replaces in Keras and TensorFlow, and the way to undo it."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Column, Table

from tfrep_strategy import keras_integration
from tfrep_strategy.core.replacements import Row
from tfrep_strategy.strategies import REPLACED, packages


def describe() -> list[Row]:
    """Lists all replacements.

    Example:
        >>> "the same" in {row.why for row in describe()}
        True
    """
    of_packages = [row for table in packages.tables() for row in table.describe()]
    return [*keras_integration.describe(), *REPLACED.describe(), *of_packages]


def uninstall() -> None:
    """Restores the original attributes of Keras, TensorFlow and other packages. Existing strategies must not be used afterwards."""
    for table in packages.tables():
        table.uninstall()
    REPLACED.uninstall()
    keras_integration.uninstall()


def show(as_json: bool) -> None:
    """Prints the list.

    Args:
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps([vars(row) for row in describe()]))
        return
    table = Table(Column("what", overflow="fold"), "why", title="What tfrep_strategy replaces in Keras and TensorFlow")
    for row in describe():
        table.add_row(row.target, row.why)
    Console().print(table)
