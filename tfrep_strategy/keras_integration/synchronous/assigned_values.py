"""How what assigns to variables does it, and what they were before a callback of one process has assigned to them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.settings import Setting

assigns_as_is = Setting(False)
"""Whether what assigns to variables now, such as an optimizer, does it as each replica is to do it."""

before_changes: Setting[dict[int, tuple[Any, Any]] | None] = Setting(None)
"""By the id of a variable that a callback of this process alone has assigned to: the variable, and its value before."""


def note_change(variable: Any) -> None:
    """Notes what a variable is before it is assigned to, if a callback that not all processes have does that."""
    noted = before_changes.value
    if noted is not None and tf.executing_eagerly():
        noted.setdefault(id(variable), (variable, variable.numpy()))
