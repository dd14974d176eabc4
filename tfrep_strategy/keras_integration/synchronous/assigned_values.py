"""What a step assigns to a variable, computed from the rows of the batch: a moving average, a count, a codebook of a VQ-VAE.

Each replica has its own rows. If the graph tells where they were put together, all replicas assign what they compute together
(`joint_values.py`), which is what one device assigns.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.synchronous.joint_values import JointValue
from tfrep_strategy.keras_integration.synchronous.row_growth import depends_on_rows
from tfrep_strategy.keras_integration.synchronous.row_reductions import reductions

assigns_as_is = Setting(False)
"""Whether what assigns to variables now, such as an optimizer, does it as each replica is to do it."""

before_changes: Setting[dict[int, tuple[Any, Any]] | None] = Setting(None)
"""By the id of a variable that a callback of this process alone has assigned to: the variable, and its value before."""


def note_change(variable: Any) -> None:
    """Notes what a variable is before it is assigned to, if a callback that not all processes have does that."""
    noted = before_changes.value
    if noted is not None and tf.executing_eagerly():
        noted.setdefault(id(variable), (variable, variable.numpy()))


def of_all_replicas(value: Any) -> tf.Tensor | None:
    """Returns what one device would assign where a replica assigns a value.

    Args:
        value: What is assigned, or added to a variable. Any type.

    Returns:
        A tensor that is the same on all replicas. None if the value is to be assigned as it is: it comes from no rows, or has
        rows, or nobody can tell (in eager steps, branches and functions, and where the step asks for rows of other replicas).
    """
    step = current_step()
    if step is None or assigns_as_is.value or step.gathers or step.strategy.num_replicas_in_sync == 1:
        return None
    if step.is_in_branch or not step.has_computed(value) or not depends_on_rows(step, value):
        return None
    found = reductions(step, value)
    return None if found is None else JointValue.of(step, value, found).value
