"""State that many workers change at once: nothing that one of them adds is lost, and metrics do not leave the worker."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import AggregatingVariable, CachingVariable
from tfrep_strategy.keras_integration.asynchronous.ftrl import apply_ftrl
from tfrep_strategy.keras_integration.asynchronous.local_variables import kept_on_worker
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import PartitionedVariable
from tfrep_strategy.keras_integration.asynchronous.sums import refuse_what_is_no_sum
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.finding import driver_in_scope
from tfrep_strategy.keras_integration.internals import in_stateless_scope
from tfrep_strategy.keras_integration.settings import Setting

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


traced_step: Setting[AsyncStep | None] = Setting(None, of_all_threads=True)
"""The step that is traced, if Keras drives it."""


class SharedState(KerasDriver):
    """What is done to state that many workers change at once."""

    def add_to_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Adds on the server in one operation; Keras reads, adds, and writes, and loses what came in between."""
        return self._add(original, variable, value, "assign_add")

    def subtract_from_variable(self, original: Any, variable: Any, value: Any) -> Any:
        """Subtracts on the server in one operation."""
        return self._add(original, variable, value, "assign_sub")

    def accumulate_gradients(self, original: Any, optimizer: Any, grads: Any, acc_grads: Any) -> Any:
        """Adds on the servers what workers accumulate; Keras reads, adds, and writes."""
        if not all(map(is_on_servers, acc_grads)):
            return original(optimizer, grads, acc_grads)

        def add(strategy: Any, grads: Any, accumulators: Any) -> None:
            for grad, accumulator in zip(grads, accumulators, strict=True):
                strategy.extended.update(accumulator, optimizer.assign_add, args=(grad,), group=False)

        values = [accumulator.value for accumulator in acc_grads]
        return tf.__internal__.distribute.interim.maybe_merge_call(add, optimizer._distribution_strategy, grads, values)

    def update_ftrl(self, original: Any, optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves weights and both slots at once.

        Keras reads the slots, computes, and writes them. What another worker writes in between leaves the sum of gradients and
        that of their squares of different updates, for good: the weights then run away.
        """
        index = optimizer._get_variable_index(variable)
        accumulator, linear = optimizer._accumulators[index], optimizer._linears[index]
        if is_on_servers(accumulator) and is_on_servers(linear):
            apply_ftrl(optimizer, gradient, (variable, accumulator, linear), learning_rate)
        else:
            original(optimizer, gradient, variable, learning_rate)

    def next_seed(self, original: Any, generator: Any, ordered: bool = True) -> Any:
        """Gives every step of every worker another seed, though two of them may read the same state."""
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
        """Has the state of a metric be a sum, on workers too, which is added to atomically on the servers."""
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
        if not original.__module__.startswith("keras."):  # Those of Keras are sums.
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
        """Whether several workers may change a Keras variable at once; one made outside the scope is on the coordinator."""
        if is_on_servers(variable):
            return True
        graph_of_workers = not tf.executing_eagerly() and driver_in_scope() is self
        return graph_of_workers and isinstance(variable._value, tf.Variable)


def make_exact(metric: Any) -> None:
    """Makes the updates of a metric's class atomic on the servers."""
    KerasDriver.update_metric.install_in(type(metric))


def is_on_servers(variable: Any) -> bool:
    """Whether a Keras variable's value is on parameter servers."""
    return isinstance(variable._value, (CachingVariable, AggregatingVariable, PartitionedVariable))
