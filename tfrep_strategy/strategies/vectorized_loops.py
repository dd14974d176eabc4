"""Loops that TensorFlow vectorizes: `tf.vectorized_map`, Jacobians. Replicas do not meet in them.

What a loop computes stands in the graph of the step, and belongs to one row, or to one number, of the replica. A gradient that is
taken there, such as that of a single row, stays the replica's own, as in `tf.map_fn`.
"""

from __future__ import annotations

import functools
from typing import Any

from tfrep_strategy._tensorflow import parallel_loops
from tfrep_strategy.keras_integration.protocol import current_step


def _without_meeting(vectorize: Any) -> Any:
    @functools.wraps(vectorize)
    def vectorize_alone(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return vectorize(*args, **kwargs)
        with step.in_vectorized_loop():
            return vectorize(*args, **kwargs)

    return vectorize_alone


parallel_loops._pfor_impl = _without_meeting(parallel_loops._pfor_impl)
