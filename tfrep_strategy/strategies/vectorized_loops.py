"""Loops that TensorFlow vectorizes, `tf.vectorized_map` and Jacobians, in steps that Keras drives. Replicas do not meet in them.

What a loop computes stands in the graph of the step, and belongs to one row, or to one number, of the replica. A gradient that is
taken there, such as that of a single row, stays the replica's own, as in `tf.map_fn`.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import parallel_loops
from tfrep_strategy.keras_integration.protocol import current_step, is_vectorizing
from tfrep_strategy.keras_integration.synchronous.tapes import of_all_jacobians


def _without_meeting(vectorize: Any) -> Any:
    @functools.wraps(vectorize)
    def vectorize_alone(*args: Any, **kwargs: Any) -> Any:
        with is_vectorizing.to(True):
            return vectorize(*args, **kwargs)

    return vectorize_alone


def _of_all(jacobian: Any) -> Any:
    @functools.wraps(jacobian)
    def jacobian_of_all(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found, step = jacobian(self, target, sources, *args, **kwargs), current_step()
        if step is None or step.strategy.num_replicas_in_sync == 1:
            return found
        return of_all_jacobians(step, target, sources, found)

    return jacobian_of_all


parallel_loops._pfor_impl = _without_meeting(parallel_loops._pfor_impl)
tf.GradientTape.jacobian = _of_all(tf.GradientTape.jacobian)
