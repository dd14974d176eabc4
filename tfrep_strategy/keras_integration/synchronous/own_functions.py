"""Losses and metrics that users write: whether what they say of a batch follows from what they say of its parts.

It does for nearly all of them. The others, such as the root of a mean or a maximum, need the rows of all replicas. To find out,
each is tried once, on made-up rows. One that cannot be tried is believed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.patching import keras_internal

_StatelessScope: Any = keras_internal("backend.common.stateless_scope", "StatelessScope")
_MeanMetricWrapper: Any = keras_internal("metrics.reduction_metrics", "MeanMetricWrapper")
_ROWS, _FIRST = 4, 1
_TOLERANCE = 2e-5
_answers: Any = weakref.WeakKeyDictionary()


def loss_needs_all_rows(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the value of a loss on a batch is neither the mean nor the rows of its values on the parts.

    Args:
        loss: A `keras.losses.Loss`.
        y_true: Targets, a tensor or a nest of them.
        y_pred: Predictions.
    """
    if _is_of_keras(getattr(loss, "fn", type(loss))) or not _are_rows(y_true, y_pred):
        return False
    return _tried(loss, "call", lambda: not _is_mean_or_rows(loss.call, (y_true, y_pred)))


def metric_needs_all_rows(metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether what an update with a batch does to the state of a metric is not the sum of what its parts do.

    Args:
        metric: The metric.
        update: Its `update_state`, as a function of the metric and its arguments.
        args: The arguments of the update.
        kwargs: Its keyword arguments.
    """
    if isinstance(metric, _MeanMetricWrapper) and _is_of_keras(update):
        fn = metric._fn
        return not _is_of_keras(fn) and _are_rows(args, kwargs) and _tried(metric, "fn", lambda: not _is_mean_or_rows(fn, args[:2]))
    if _is_of_keras(update) or not _are_rows(args, kwargs):
        return False
    return _tried(metric, update.__qualname__, lambda: not _is_sum(metric, update, (args, kwargs)))


def _are_rows(args: Any, kwargs: Any) -> bool:
    """Whether something is given, and all of it can be put together with the rows of other replicas."""
    given = [value for value in keras.tree.flatten((args, kwargs)) if value is not None]
    return bool(given) and all(
        isinstance(value, tf.Tensor) and bool(value.shape.rank) and value.dtype != tf.string for value in given
    )


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.")


def _tried(user: Any, what: str, try_it: Callable[[], bool]) -> bool:
    answers = _answers.setdefault(user, {})
    if what not in answers:
        answers[what] = False  # First: an update may call that of its base class.
        # What is traced here, and under which strategy, does not hold in another thread.
        with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.suppress(Exception):
            answers[what] = thread.submit(try_it).result()  # A user's code need not like made-up numbers.
    return answers[what]


def _is_mean_or_rows(function: Callable[..., Any], batch: Any) -> bool:
    with _StatelessScope():  # What is drawn at random here is not drawn.
        whole, first, rest = (keras.ops.convert_to_numpy(function(*part)) for part in _whole_and_parts(batch))
    if whole.ndim:
        return len(whole) != _ROWS or _is_close(whole, np.concatenate([first, rest]))
    return _is_close(whole, (_FIRST * first + (_ROWS - _FIRST) * rest) / _ROWS)


def _is_sum(metric: Any, update: Callable[..., Any], batch: Any) -> bool:
    def added(part: Any, starts: list[Any]) -> list[np.ndarray]:
        with _StatelessScope(state_mapping=list(zip(metric.variables, starts, strict=True))) as scope:
            update(metric, *part[0], **part[1])
            ends = [scope.get_current_value(variable) for variable in metric.variables]
        return [np.asarray(end, "float64") - np.asarray(start, "float64") for end, start in zip(ends, starts, strict=True)]

    whole, first, rest = _whole_and_parts(batch)
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
    moved = [zero + tf.cast(2, zero.dtype) for zero in zeros]
    sums = [a + b for a, b in zip(added(first, zeros), added(rest, zeros), strict=True)]
    return all(map(_is_close, added(whole, moved), sums))


def _is_close(one: Any, other: Any) -> bool:
    scale = max(1.0, float(np.max(np.abs(np.nan_to_num(one)), initial=0.0)))
    return np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _whole_and_parts(batch: Any) -> list[Any]:
    """Makes up rows that are unlike each other, of numbers between 0 and 1, or of ones where they have to be whole; cuts them."""
    random = np.random.RandomState(0)

    def made_up(value: Any) -> Any:
        if not tf.is_tensor(value):
            return value
        shape = [_ROWS, *(2 if size is None else size for size in value.shape[1:])]
        sizes = np.linspace(0.1, 1.0, _ROWS).reshape([_ROWS] + [1] * (len(shape) - 1))
        return tf.cast(tf.constant(random.uniform(size=shape) * sizes if value.dtype.is_floating else np.ones(shape)), value.dtype)

    whole = keras.tree.map_structure(made_up, batch)
    parts = [
        keras.tree.map_structure(lambda v, rows=rows: v[rows] if tf.is_tensor(v) else v, whole)
        for rows in (slice(None, _FIRST), slice(_FIRST, None))
    ]
    return [whole, *parts]
