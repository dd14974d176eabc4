"""Steps that are traced for any number of rows, also where all batches have one size.

The graph of a step tells sums over rows from means by the dimension that is not known (`batch_sums.py`). In batches of one size
(`drop_remainder=True`, `train_on_batch`) it is known, so it is hidden here. A step that needs it while it is traced, as in
`tf.zeros([x.shape[0], 8])`, cannot be traced so, and is traced for the one size.

What runs knows the size again, and costs no more. Most steps never ask what is a sum, and are traced sooner for a known size: they
are traced for it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import set_shape_attribute
from tfrep_strategy.errors import TfrepError, message, warn
from tfrep_strategy.keras_integration.protocol import current_step


class TraceAgainError(BaseException):
    """What was found out about a step while it was traced. It is none of the errors that a step may catch."""


class NobodyRepeatsError(TraceAgainError):
    """A step mixes rows, and what comes after cannot be repeated with those of all replicas.

    Args:
        operation: What cannot be.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.operation = operation


class RowsAreFixedError(TraceAgainError):
    """A step that is traced for one number of rows asks what is a sum over them."""


def traced_for_any_rows(
    build: Callable[[Any], Callable[[Any], Any]],
    step_function: Callable[[Any], Any],
    keeps_rows: bool = False,
    of_whole_batch: Callable[[], Callable[[Any], Any]] | None = None,
) -> Callable[[Any], Any]:
    """Builds a function of steps.

    Args:
        build: Makes the function of a step function that gets a replica's part of a batch.
        step_function: What a replica does in a step.
        keeps_rows: Whether the step is likely not to ask what is a sum over rows.
        of_whole_batch: Makes the function for a step that raises `NobodyRepeatsError`.

    Returns:
        What `build` makes, of a step whose part has an open number of rows. If that cannot be traced, of `step_function`. If
        rows are kept, of `step_function` until it asks.
    """
    hides, is_traced = False, False

    def noted_step(part: Any) -> Any:
        if (step := current_step()) is not None:
            step.may_take_whole_batch = of_whole_batch is not None
        return step_function(part)

    def open_step(part: Any) -> Any:
        nonlocal hides
        opened = with_open_rows(part)
        hidden = [(new, old) for new, old in zip(tf.nest.flatten(opened), tf.nest.flatten(part), strict=True) if new is not old]
        hides = hides or bool(hidden)
        result = noted_step(opened)
        for new, old in hidden:
            set_shape_attribute(new.op, old.shape)
        return result

    def fixed_step(part: Any) -> Any:
        nonlocal hides
        if not _has_fixed_rows(part):
            return open_step(part)
        step: Any = current_step()
        hides = step.rows_are_fixed = True
        return noted_step(part)

    ways = [fixed_step, open_step, noted_step] if keeps_rows else [open_step, noted_step]
    way = ways.pop(0)
    run = build(way)

    def function(batches: Any) -> Any:
        nonlocal run, way, is_traced
        while True:
            try:
                result = run(batches)
            except TraceAgainError as found:
                is_traced = False
                if isinstance(found, NobodyRepeatsError):
                    assert of_whole_batch is not None
                    _warn_of_whole_batches(found.operation)
                    run = of_whole_batch()
                    ways.clear()
                    continue
                if isinstance(found, RowsAreFixedError):
                    way = ways.pop(0)
            except (TfrepError, tf.errors.OpError, StopIteration):
                raise
            except Exception:
                if is_traced or not hides or not ways:
                    raise
                way = ways.pop(0)
            else:
                is_traced = True
                return result
            run = build(way)  # A new function: what has failed may have left its variables half made.

    return function


def _warn_of_whole_batches(operation: str) -> None:
    warn(
        message(
            "A step mixes the rows of a batch, and what comes after cannot be repeated with those of all replicas. So each process"
            " runs it with all rows: that is right, but no faster than one device.",
            hint="mix rows as late as you can, or gather them with tfrep.all_gather. See docs/exactness.md.",
            operation=operation,
        ),
    )


def _has_fixed_rows(part: Any) -> bool:
    """Returns whether all tensors of a part that have rows have a known number of them, and more than one: see `empty_parts.py`."""
    rows = [leaf.shape[0] for leaf in tf.nest.flatten(part, expand_composites=True) if leaf is not None and leaf.shape.rank != 0]
    return bool(rows) and all(number is not None and number > 1 for number in rows)


def with_open_rows(part: Any) -> Any:
    """Returns a nest of tensors that hide how many rows they have."""
    return tf.nest.map_structure(_with_open_rows, part)


def _with_open_rows(tensor: Any) -> Any:
    if not isinstance(tensor, tf.Tensor) or not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape([None, *tensor.shape[1:]]))
