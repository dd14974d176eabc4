"""State that many workers change at once. No update of a worker is lost, and metrics stay on the worker.

FTRL runs as one operation on the server, because updates of other workers would interleave with several.
Variables that live on a worker for one call replace those on the servers.
Metrics whose state is not a sum are refused, because workers count from zero and their counts are added up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.tf import AggregatingVariable, BaseResourceVariable, CachingVariable, anonymous_name, variable_handle
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import PartitionedVariable
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.finding import driver_in_scope
from tfrep_strategy.keras_integration.internals import in_stateless_scope


def apply_ftrl(optimizer: Any, gradient: Any, variables: tuple[Any, Any, Any], learning_rate: Any) -> None:
    """Updates weights and both slots in one operation.

    Args:
        optimizer: A `keras.optimizers.Ftrl`.
        gradient: The gradient of the weights.
        variables: The weights, the accumulator and the linear slot.
        learning_rate: Scalar.
    """
    handles = [getattr(v, "_value", v).handle for v in variables]
    dtype = variables[0].dtype
    rate = tf.cast(learning_rate, dtype)
    tf.raw_ops.ResourceApplyFtrlV2(
        var=handles[0],
        accum=handles[1],
        linear=handles[2],
        grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        lr=rate,
        l1=tf.cast(optimizer.l1_regularization_strength, dtype),
        l2=tf.cast(optimizer.l2_regularization_strength, dtype) + tf.cast(optimizer.beta, dtype) / (2.0 * rate),
        l2_shrinkage=tf.cast(optimizer.l2_shrinkage_regularization_strength, dtype),
        lr_power=tf.cast(optimizer.learning_rate_power, dtype),
        use_locking=True,
    )


def new_local(variable: Any) -> Any:
    """Makes, in the function that is traced, a variable of zeros that lives on the worker for one call.

    Args:
        variable: The Keras variable whose shape and dtype it has.
    """
    dtype = tf.as_dtype(variable._dtype)
    handle = variable_handle(variable.shape, dtype, anonymous_name(), "local", graph_mode=True)
    local = BaseResourceVariable(trainable=False, shape=variable.shape, dtype=dtype, handle=handle, unique_id=f"local_{id(handle)}")
    local.assign(tf.zeros(variable.shape, dtype))
    return local


@contextlib.contextmanager
def kept_on_worker(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Replaces Keras variables on the servers by zeros on the worker, while a step is traced.

    Args:
        variables: Keras variables that are sums.

    Yields:
        The variables on the worker. At the end of the step they hold the amounts to add to the sums.
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


_known_as_sums: Any = weakref.WeakSet()
_PROBE_ROWS = 4


def refuse_what_is_no_sum(metric: Any, update: Any, args: Any, kwargs: Any) -> None:
    """Refuses a metric whose update does not only add to its state, such as a maximum. Each metric is tested once.

    Workers count from zero, and their counts are added up. A metric is rejected only if the test update shows that it does not
    add. If the test cannot run, the metric is accepted.
    """
    if metric in _known_as_sums:
        return
    _known_as_sums.add(metric)  # First, because an update may call the update of its base class.
    try:
        # Another thread traces under no strategy and in no graph of this one.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            variable = thread.submit(_first_that_is_no_sum, metric, update, args, kwargs).result()
    except Exception:  # The user's code may fail on made-up numbers.
        return
    if variable is not None:
        _known_as_sums.discard(metric)
        raise ConfigurationError(
            message(
                f"The state of {type(metric).__name__} is no sum: its update does more than add to `{variable.name}`. Workers"
                " each count from zero, and what they have counted is added up.",
                hint="keep sums and counts (assign_add), and compute the result from them in result().",
                metric=metric.name,
            )
        )


def _first_that_is_no_sum(metric: Any, update: Any, args: Any, kwargs: Any) -> Any:
    variables = [v for v in metric.variables if tf.as_dtype(v._dtype).is_floating or tf.as_dtype(v._dtype).is_integer]
    random = np.random.RandomState(0)

    def numbers(shape: Any, dtype: Any) -> tf.Tensor:
        """Makes numbers between 0 and 1, or ones for integers."""
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


_GOLDEN = 0x9E3779B9


class AsyncStep:
    """The state while a step that Keras drives is traced.

    Args:
        number: int64 scalar, different for each step of the coordinator, if the step draws random numbers.
        sync: Collects gradients if several make one update, else None.
        update: int64 scalar, the number of the update that the gradient belongs to.
    """

    def __init__(self, number: tf.Tensor | None = None, sync: Any = None, update: tf.Tensor | None = None) -> None:
        self.number, self.sync, self.update = number, sync, update
        self.added: dict[int, Any] = {}
        """For each Keras variable, by its id: a variable of the worker that counts the amounts that this step has added."""
        self.pushed: set[tuple[Any, int]] = set()
        """Pairs of an optimizer and the id of a Keras variable whose gradient it has pushed."""


traced_step: Setting[AsyncStep | None] = Setting(None, of_all_threads=True)
"""The step that is traced, if Keras drives it."""


class SharedState(KerasDriver):
    """Operations on state that many workers change at once."""

    def add_to_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Adds on the server in one operation. Keras reads, adds and writes, which would lose additions in between."""
        return self._add(original, variable, value, "assign_add")

    def subtract_from_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Subtracts on the server in one operation."""
        return self._add(original, variable, value, "assign_sub")

    def accumulate_gradients(self, original: Any, optimizer: Any, grads: Any, acc_grads: Any) -> Any:
        """Adds a worker's gradients to accumulators on the servers in one operation; Keras reads, adds and writes."""
        if not all(map(is_on_servers, acc_grads)):
            return original(optimizer, grads, acc_grads)

        def add(strategy: Any, grads: Any, accumulators: Any) -> None:
            for grad, accumulator in zip(grads, accumulators, strict=True):
                strategy.extended.update(accumulator, optimizer.assign_add, args=(grad,), group=False)

        values = [accumulator.value for accumulator in acc_grads]
        return tf.__internal__.distribute.interim.maybe_merge_call(add, optimizer._distribution_strategy, grads, values)

    def update_ftrl(self, original: Any, optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates weights and both slots in one operation.

        Keras reads the slots, computes, and writes them. A write of another worker in between would leave the sum of gradients and
        the sum of their squares from different updates for good, and the weights would diverge.
        """
        index = optimizer._get_variable_index(variable)
        accumulator, linear = optimizer._accumulators[index], optimizer._linears[index]
        if is_on_servers(accumulator) and is_on_servers(linear):
            apply_ftrl(optimizer, gradient, (variable, accumulator, linear), learning_rate)
        else:
            original(optimizer, gradient, variable, learning_rate)

    def next_seed(self, original: Any, generator: Any, ordered: bool = True) -> Any:
        """Gives every step of every worker a different seed, even if two of them read the same state."""
        if tf.executing_eagerly() or not self._is_shared(generator.state):
            return original(generator, ordered=ordered)
        seed = generator.state.value * 1
        generator.state.assign_add([0, 1])
        step = traced_step.value
        if step is not None and step.number is not None:
            offset = step.number
        else:
            # Not `tf.random.uniform`: with a global seed it would draw the same on all workers.
            zero = tf.constant(0, tf.int64)
            offset = tf.raw_ops.RandomUniformInt(shape=tf.constant([], tf.int32), minval=zero, maxval=zero + tf.int64.max)
        offset = offset * _GOLDEN % 2**31
        return seed + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), seed.dtype)

    def make_metric(self, original: Any, metric: Any, *args: Any, **kwargs: Any) -> None:
        """Makes the updates of a metric exact in custom loops too."""
        make_exact(metric)
        original(metric, *args, **kwargs)

    def update_metric(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Keeps the state of a metric a sum on workers, and adds it atomically on the servers."""
        variables = [variable for variable in metric.variables if variable._value is not None]
        if tf.executing_eagerly() or in_stateless_scope() or not variables:
            return original(metric, *args, **kwargs)
        result = None
        if all(map(is_on_servers, variables)):
            with kept_on_worker(variables) as locals_:
                original(metric, *args, **kwargs)
            for variable, local in zip(variables, locals_, strict=True):
                variable._value.assign_add(local.read_value())
        else:
            result = original(metric, *args, **kwargs)
            if traced_step.value is None:
                return result
        if not original.__module__.startswith("keras."):  # The state of Keras's metrics is a sum.
            refuse_what_is_no_sum(metric, functools.partial(original, metric), args, kwargs)
        return result

    update_mean = update_metric

    def _add(self, original: Any, variable: Any, value: Any, method: str) -> Any:
        if variable._value is None or in_stateless_scope() or not self._is_shared(variable):
            return original(variable, value)
        value = tf.broadcast_to(variable._convert_to_tensor(value, dtype=variable._dtype), variable.shape)
        step = traced_step.value
        if step is not None and id(variable) in step.added:
            step.added[id(variable)].assign_add(value if method == "assign_add" else -value)
        return getattr(variable._value, method)(value)

    def _is_shared(self, variable: Any) -> bool:
        """Returns whether several workers may change a Keras variable at once. One made outside the scope is on the coordinator."""
        if is_on_servers(variable):
            return True
        graph_of_workers = not tf.executing_eagerly() and driver_in_scope() is self
        return graph_of_workers and isinstance(variable._value, tf.Variable)


def make_exact(metric: Any) -> None:
    """Makes the updates of a metric's class atomic on the servers."""
    KerasDriver.update_metric.install_in(type(metric))


def is_on_servers(variable: Any) -> bool:
    """Returns whether a Keras variable's value is on parameter servers."""
    return isinstance(variable._value, (CachingVariable, AggregatingVariable, PartitionedVariable))
