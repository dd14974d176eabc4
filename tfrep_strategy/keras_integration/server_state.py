"""State that many workers change at once: nothing that one of them adds is lost, and metrics do not leave the worker."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import (
    AggregatingVariable,
    BaseResourceVariable,
    CachingVariable,
    anonymous_name,
    variable_handle,
)
from tfrep_strategy.errors import ConfigurationError, message
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
        self.pushed: set[tuple[Any, int]] = set()
        """Which optimizer has handed in a gradient for which Keras variable."""


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
        make_exact(self)
    return variable


def make_exact(metric: Any) -> None:
    """Makes the updates of a metric's class atomic on the servers, and has its state be a sum, on workers too."""
    owner: Any
    for owner in type(metric).__mro__:
        update = vars(owner).get("update_state")
        if update is not None and owner is not keras.metrics.Metric and not hasattr(update, "adds_atomically"):
            owner.update_state = _adding_atomically(update)


def _adding_atomically(update: Any) -> Any:
    @functools.wraps(update)
    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = [variable for variable in self.variables if variable._value is not None]
        if tf.executing_eagerly() or _in_stateless_scope() or not variables:
            return update(self, *args, **kwargs)
        result = None
        if all(map(is_on_servers, variables)):
            with kept_on_worker(variables) as locals_:
                update(self, *args, **kwargs)
            for variable, local in zip(variables, locals_, strict=True):
                variable._value.assign_add(local.read_value())
        else:
            result = update(self, *args, **kwargs)
            if _steps.current is None:
                return result
        if not update.__module__.startswith("keras."):  # Those of Keras are sums.
            _refuse_what_is_no_sum(self, functools.partial(update, self), args, kwargs)
        return result

    update_state.adds_atomically = True  # type: ignore[attr-defined]
    return update_state


_known_as_sums: Any = weakref.WeakSet()
_PROBE_ROWS = 4


def _refuse_what_is_no_sum(metric: Any, update: Any, args: Any, kwargs: Any) -> None:
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
