"""Loops of the graph whose rounds draw random numbers: on several processes a round begins when the one before has ended.

Rounds of a loop may run at once (`parallel_iterations`), and TensorFlow orders all that has effects but draws. Their numbers
would go to the rounds as they come, on each process otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import LEGACY_DRAWS, called_graphs, set_number
from tfrep_strategy.limits import verification

_orders = False


def order_loops_that_draw(size: int) -> None:
    """Has loops that are built from now on run round by round if they draw.

    Args:
        size: The number of processes.
    """
    global _orders
    _orders = size > 1


def in_order(build: Any) -> Any:
    """Returns what builds a loop, round by round if its rounds draw."""

    @functools.wraps(build)
    def while_loop(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs)
        operation = _loop_behind(result) if _orders or verification() is not None else None
        if operation is not None and any(map(_draws, called_graphs(operation))):
            set_number(operation, "parallel_iterations", 1)
        return result

    return while_loop


def _loop_behind(result: Any) -> Any:
    """Returns the loop that a result comes from; None if there is none."""
    found = next((x.op for x in tf.nest.flatten(result, expand_composites=True) if tf.is_symbolic_tensor(x)), None)
    while found is not None and found.type == "Identity":
        found = found.inputs[0].op
    return found if found is not None and found.type in ("While", "StatelessWhile") else None


def _draws(graph: Any) -> bool:
    operations = graph.get_operations()
    return any(x.type in LEGACY_DRAWS or any(map(_draws, called_graphs(x))) for x in operations)
