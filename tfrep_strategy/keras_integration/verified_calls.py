"""Results of calls, and weights, which `tfrep verify` compares beside steps; and the shortening of each `fit`."""

from __future__ import annotations

import contextvars
import gc
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.core.limits import Verification, verification

_numbers = itertools.count()
_is_called = contextvars.ContextVar("is_called", default=False)
"""Whether a call is being recorded. What it calls is part of it: on one device, `partition` calls a `tf.function`."""
_times_called: dict[str, int] = {}
_random = np.random.default_rng(1)
_LAST_BIT = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}


class FewSteps(keras.callbacks.Callback):
    """Ends each epoch after some steps if asked, and changes weights in their last bit in these steps.

    It runs before the user's callbacks, which find a regular end of the epoch.

    Args:
        asked: The settings of `tfrep verify`.
        ends_fit: Whether a shortened epoch is the last one.
    """

    def __init__(self, asked: Verification, ends_fit: bool) -> None:
        super().__init__()
        self._asked, self._ends_fit = asked, ends_fit
        self._undo: Callable[[], None] = lambda: None
        self._ends_epoch = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._asked.nudge and batch < self._asked.steps:
            self._undo = nudge()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._undo()
        self._undo = lambda: None
        if self._asked.shortens and batch + 1 >= self._asked.steps and not self.model.stop_training:
            self.model.stop_training = self._ends_epoch = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._ends_epoch and not self._ends_fit:
            self.model.stop_training = self._ends_epoch = False


def callbacks_of_fit(data: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a `fit` gets before the user's, while a script is verified.

    Args:
        data: Its first argument. Keras begins no further epoch of a `PyDataset` that was not read to its end.
    """
    asked = verification()
    return [] if asked is None else [FewSteps(asked, isinstance(data, keras.utils.PyDataset))]


def nudge() -> Callable[[], None]:
    """Changes each trainable number of this process, up or down, in the last bit of its compute dtype.

    Returns:
        A function that undoes the change, and keeps changes of a step in between.
    """
    compute = tf.as_dtype(keras.config.dtype_policy().compute_dtype or "float32")
    undo = []
    for variable in [x for x in gc.get_objects() if issubclass(type(x), tf.Variable)]:
        if variable.trainable and variable.dtype.is_floating:
            last_bit = max(_LAST_BIT.get(variable.dtype, 0.0), _LAST_BIT.get(compute, 0.0))
            signs = _random.choice([-1.0, 1.0], variable.shape.as_list())
            change = tf.constant(variable.numpy() * last_bit * signs, variable.dtype)
            variable.assign_add(change)
            undo.append((variable, change))

    def take_back() -> None:
        for variable, change in undo:
            variable.assign_sub(change)

    return take_back


def note(call: str, results: Any, weights: Sequence[Any] = ()) -> None:
    """Records the results of a call if a script is verified. All ranks call it, and rank 0 writes.

    Args:
        call: Its name.
        results: A nest of tensors and numbers.
        weights: The variables of a model.
    """
    asked = verification()
    if asked is None:
        return
    leaves = {"/".join(map(str, path)) or "the result": x for path, x in keras.tree.flatten_with_path(results)}
    found = {f"result {name}": x for name, x in leaves.items()} | {f"weight {i} ({x.path})": x for i, x in enumerate(weights)}
    arrays = {name: value for name, each in found.items() if (value := _as_numbers(each)) is not None}
    if getattr(tf.distribute.get_strategy().extended, "is_chief", True):  # All ranks read sharded weights.
        (asked.folder / f"result{next(_numbers):06}.pkl").write_bytes(pickle.dumps((call, arrays)))


def _as_numbers(value: Any) -> tuple[Any, float] | None:
    """Returns an array that any process can read, and the last bit of 1 in its dtype; None if the value is not numeric."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        return None
    try:
        array = np.asarray(keras.ops.convert_to_numpy(value) if isinstance(value, keras.Variable) else value)
        last_bit = {8: 2.0**-52, 4: 2.0**-23, 2: 2.0**-8}.get(array.dtype.itemsize, 2.0**-8)
        return array.astype(np.float64), max(last_bit, 2.0**-23)  # Logs are float32 values in Python numbers.
    except (TypeError, ValueError):
        return None


def called(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function, and records the results of its first calls if a script is verified; of nested calls the outermost.

    Args:
        name: Its name.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    asked = verification()
    if asked is None or _is_called.get() or not tf.executing_eagerly() or _times_called.get(name, 0) >= asked.steps:
        return function(*args, **kwargs)
    _times_called[name] = _times_called.get(name, 0) + 1
    undo = nudge() if asked.nudge else None
    token = _is_called.set(True)
    try:
        results = function(*args, **kwargs)
    finally:
        _is_called.reset(token)
    if undo is not None:
        undo()
    note(name, results)
    return results
