"""State that many workers change at once: nothing that one of them adds is lost, and metrics do not leave the worker."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy._tensorflow import (
    AggregatingVariable,
    BaseResourceVariable,
    CachingVariable,
    anonymous_name,
    variable_handle,
)
from tfrep_strategy.keras_integration.partitioned import PartitionedVariable
from tfrep_strategy.keras_integration.patching import keras_internal, replaces

_Variable = keras_internal("backend.tensorflow.core", "Variable")
_TFOptimizer = keras_internal("backend.tensorflow.optimizer", "TFOptimizer")
_in_stateless_scope = keras_internal("backend.common.stateless_scope", "in_stateless_scope")
_GOLDEN = 0x9E3779B9


class AsyncStep:
    """What is known while a step that Keras drives is traced.

    Args:
        number: int64 scalar, different for each step of the coordinator, where the step draws random numbers.
        sync: What collects gradients where several make one update, else None.
        update: int64 scalar, the number of the update that the gradient is for.
    """

    def __init__(self, number: tf.Tensor | None = None, sync: Any = None, update: tf.Tensor | None = None) -> None:
        self.number, self.sync, self.update = number, sync, update
        self.added: dict[int, Any] = {}
        """By Keras variable: a variable of the worker that counts what this step has added to it."""


class _Steps:
    # Not for each thread: TensorFlow traces what a replica does in a thread of its own, while the one that asked waits.
    current: AsyncStep | None = None


_steps = _Steps()


def traced_step() -> AsyncStep | None:
    """Returns the step that is traced, if Keras drives it."""
    return _steps.current


@contextlib.contextmanager
def tracing_step(step: AsyncStep) -> Iterator[None]:
    """Makes a step the one that is traced."""
    _steps.current = step
    try:
        yield
    finally:
        _steps.current = None


def is_on_servers(variable: Any) -> bool:
    """Whether a Keras variable's value is on parameter servers."""
    return isinstance(variable._value, (CachingVariable, AggregatingVariable, PartitionedVariable))


def _is_shared(variable: Any) -> bool:
    """Whether several workers may change a Keras variable at once; one made outside the scope is on the coordinator."""
    if is_on_servers(variable):
        return True
    graph_of_workers = not tf.executing_eagerly() and getattr(
        tf.distribute.get_strategy(), "trains_asynchronously", False
    )
    return graph_of_workers and isinstance(variable._value, tf.Variable)


def new_local(variable: Any) -> Any:
    """Makes, in the function that is traced, a variable of zeros that lives for one call on the worker.

    Args:
        variable: The Keras variable whose shape and dtype it has.
    """
    dtype = tf.as_dtype(variable._dtype)
    handle = variable_handle(variable.shape, dtype, anonymous_name(), "local", graph_mode=True)
    local = BaseResourceVariable(
        trainable=False, shape=variable.shape, dtype=dtype, handle=handle, unique_id=f"local_{id(handle)}"
    )
    local.assign(tf.zeros(variable.shape, dtype))
    return local


@contextlib.contextmanager
def kept_on_worker(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Puts zeros on the worker in the place of Keras variables on the servers, while a step is traced.

    Args:
        variables: Keras variables that are sums.

    Yields:
        The variables on the worker, to be read at the end of the step: what it has added to each sum.
    """
    values = [variable._value for variable in variables]
    locals_ = [new_local(variable) for variable in variables]
    try:
        for variable, local in zip(variables, locals_, strict=True):
            variable._value = local
        yield locals_
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value


def _adds_atomically(name: str, sign: int) -> None:
    @replaces(_Variable, name)
    def method(original: Any, self: Any, value: Any) -> Any:
        """Adds on the server in one operation; Keras reads, adds, and writes, and loses what came in between."""
        if self._value is None or _in_stateless_scope() or not _is_shared(self):
            return original(self, value)
        value = tf.broadcast_to(self._convert_to_tensor(value, dtype=self._dtype), self.shape)
        if _steps.current is not None and id(self) in _steps.current.added:
            _steps.current.added[id(self)].assign_add(sign * value)
        return getattr(self._value, name)(value)


_adds_atomically("assign_add", 1)
_adds_atomically("assign_sub", -1)


@replaces(_TFOptimizer, "_backend_increment_gradient_accumulators")
def increment_gradient_accumulators(original: Any, self: Any, grads: Any, acc_grads: Any) -> None:
    """Adds on the servers what workers accumulate; Keras reads, adds, and writes."""
    if not all(map(is_on_servers, acc_grads)):
        return original(self, grads, acc_grads)

    def add(strategy: Any, grads: Any, accumulators: Any) -> None:
        for grad, accumulator in zip(grads, accumulators, strict=True):
            strategy.extended.update(accumulator, self.assign_add, args=(grad,), group=False)

    accumulators = [accumulator.value for accumulator in acc_grads]
    return tf.__internal__.distribute.interim.maybe_merge_call(add, self._distribution_strategy, grads, accumulators)


@replaces(keras.random.SeedGenerator, "next")
def next_seed(original: Any, self: Any, ordered: bool = True) -> Any:
    """Gives every step of every worker another seed, though two of them may read the same state."""
    if tf.executing_eagerly() or not _is_shared(self.state):
        return original(self, ordered=ordered)
    seed = self.state.value * 1
    self.state.assign_add([0, 1])
    if _steps.current is not None and _steps.current.number is not None:
        offset = _steps.current.number
    else:
        # Not `tf.random.uniform`: with a global seed it would draw the same on all workers.
        zero = tf.constant(0, tf.int64)
        offset = tf.raw_ops.RandomUniformInt(shape=tf.constant([], tf.int32), minval=zero, maxval=zero + tf.int64.max)
    offset = offset * _GOLDEN % 2**31
    return seed + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), seed.dtype)


@replaces(keras.metrics.Metric, "add_variable")
def add_variable(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the updates of a metric exact in custom loops too."""
    variable = original(self, *args, **kwargs)
    if is_on_servers(variable):
        owner: Any
        for owner in type(self).__mro__:
            update = vars(owner).get("update_state")
            if update is not None and owner is not keras.metrics.Metric and not hasattr(update, "adds_atomically"):
                owner.update_state = _adding_atomically(update)
    return variable


def _adding_atomically(update: Any) -> Any:
    @functools.wraps(update)
    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = [variable for variable in self.variables if variable._value is not None]
        if tf.executing_eagerly() or _in_stateless_scope() or not variables or not all(map(is_on_servers, variables)):
            return update(self, *args, **kwargs)
        with kept_on_worker(variables) as locals_:
            update(self, *args, **kwargs)
        for variable, local in zip(variables, locals_, strict=True):
            variable._value.assign_add(local.read_value())
        return None

    update_state.adds_atomically = True  # type: ignore[attr-defined]
    return update_state
