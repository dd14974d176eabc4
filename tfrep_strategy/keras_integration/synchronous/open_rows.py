"""Steps that are traced for any number of rows, also where all batches have one size.

The graph of a step tells sums over rows from means by the dimension that is not known (`batch_sums.py`). In batches of one size
(`drop_remainder=True`, `train_on_batch`) it is known, so it is hidden here. A step that needs it while it is traced, as in
`tf.zeros([x.shape[0], 8])`, cannot be traced so, and is traced for the one size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import TfrepError


def traced_for_any_rows(build: Callable[[Any], Callable[[Any], Any]], step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Builds a function of steps.

    Args:
        build: Makes the function of a step function that gets a replica's part of a batch.
        step_function: What a replica does in a step.

    Returns:
        What `build` makes, of a step whose part has an open number of rows. If that cannot be traced, of `step_function`.
    """
    hides, is_traced = False, False

    def open_step(part: Any) -> Any:
        nonlocal hides
        opened = tf.nest.map_structure(_with_open_rows, part)
        hides = hides or any(map(lambda new, old: new is not old, tf.nest.flatten(opened), tf.nest.flatten(part)))
        return step_function(opened)

    run = build(open_step)

    def function(batches: Any) -> Any:
        nonlocal run, is_traced
        if is_traced:
            return run(batches)
        try:
            result = run(batches)
        except (TfrepError, tf.errors.OpError, StopIteration):
            raise
        except Exception:
            if not hides:
                raise
            run = build(step_function)  # A new function: what has failed may have left its variables half made.
            result = run(batches)
        is_traced = True
        return result

    return function


def _with_open_rows(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape([None, *tensor.shape[1:]]))
