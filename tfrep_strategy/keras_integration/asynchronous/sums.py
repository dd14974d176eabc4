"""Metrics whose state is no sum: what workers have counted from zero cannot be added up."""

from __future__ import annotations

import concurrent.futures
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.asynchronous.local_variables import kept_on_worker

_known_as_sums: Any = weakref.WeakSet()
_PROBE_ROWS = 4


def refuse_what_is_no_sum(metric: Any, update: Any, args: Any, kwargs: Any) -> None:
    """Tries, once for each metric, whether what an update adds to its state depends on the state: a maximum, say.

    Workers count from zero, and what they have counted is added up. Only where the update says on the same made-up batch
    that it does not add is a metric refused: one that cannot be tried is believed.
    """
    if metric in _known_as_sums:
        return
    _known_as_sums.add(metric)  # First: an update may call that of its base class.
    try:
        # What is traced here, and under which strategy, does not hold in another thread.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            variable = thread.submit(_first_that_is_no_sum, metric, update, args, kwargs).result()
    except Exception:  # Whatever a stranger's code does not like about made-up numbers.
        return
    if variable is not None:
        _known_as_sums.discard(metric)
        raise ConfigurationError(
            message(
                f"The state of {type(metric).__name__} is no sum: its update does more than add to `{variable.name}`. Workers"
                " each count from zero, and what they have counted is added up.",
                hint="keep sums and counts (assign_add), and compute what is wanted of them in result().",
                metric=metric.name,
            )
        )


def _first_that_is_no_sum(metric: Any, update: Any, args: Any, kwargs: Any) -> Any:
    variables = [v for v in metric.variables if tf.as_dtype(v._dtype).is_floating or tf.as_dtype(v._dtype).is_integer]
    random = np.random.RandomState(0)

    def numbers(shape: Any, dtype: Any) -> tf.Tensor:
        """Makes numbers between 0 and 1; ones where they have to be whole."""
        return tf.cast(tf.constant(random.uniform(size=shape) if tf.as_dtype(dtype).is_floating else np.ones(shape)), dtype)

    def made_up(value: Any) -> Any:
        if not tf.is_tensor(value):
            return value
        return numbers([_PROBE_ROWS if size is None else size for size in value.shape], value.dtype)

    @tf.function(autograph=False)
    def end(starts: list[tf.Tensor]) -> list[tf.Tensor]:
        with kept_on_worker(metric.variables):
            for variable, start in zip(variables, starts, strict=True):
                variable._value.assign(start)
            update(*batch[0], **batch[1])
            return [tf.cast(variable._value.read_value(), tf.float64) for variable in variables]

    batch = tf.nest.map_structure(made_up, (args, kwargs))
    zeros = [tf.zeros(variable.shape, variable._dtype) for variable in variables]
    starts = [1 + numbers(variable.shape, variable._dtype) for variable in variables]
    from_zero, again, moved = ([value.numpy() for value in end(values)] for values in (zeros, zeros, starts))
    for variable, start, one, two, other in zip(variables, starts, from_zero, again, moved, strict=True):
        tolerance = (0.05 if variable._dtype in ("float16", "bfloat16") else 1e-5) * np.abs(other).max(initial=1.0)
        is_random = not np.array_equal(one, two, equal_nan=True)
        added = other - tf.cast(start, tf.float64).numpy()
        if not is_random and not np.allclose(added, one, rtol=0.0, atol=tolerance, equal_nan=True):
            return variable
    return None
