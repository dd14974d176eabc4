"""Variables of TensorFlow that were made outside the scope, such as a script's own counter, in a step that Keras drives.

A process has one for all of its replicas. The first replica assigns it, once, what one device would: if the value was computed from
rows, and the graph tells how, what comes of the rows of all replicas. In a loop of the user's own each replica assigns.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import ResourceVariable
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is, of_all_replicas


def _as_one_device(assign: Any) -> Any:
    @functools.wraps(assign)
    def assign_once(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if current_step() is None or assigns_as_is.value or not _is_foreign(self):
            return assign(self, value, *args, **kwargs)
        of_all = of_all_replicas(value)  # The replicas may talk, so all ask.
        context: Any = tf.distribute.get_replica_context()
        is_first = context.strategy.extended.num_local_replicas == 1 or tf.get_static_value(context.replica_id_in_sync_group) == 0
        return assign(self, value if of_all is None else of_all, *args, **kwargs) if is_first else self

    return assign_once


def _is_foreign(variable: Any) -> bool:
    """Whether a variable is neither one of this package's nor the copy of a replica, as TensorFlow marks it or its handle."""
    is_copy = any(hasattr(each, "_distributed_container") for each in (variable, variable.handle))
    return type(variable) is ResourceVariable and not is_copy


for _name in ("assign", "assign_add", "assign_sub"):
    setattr(ResourceVariable, _name, _as_one_device(getattr(ResourceVariable, _name)))
