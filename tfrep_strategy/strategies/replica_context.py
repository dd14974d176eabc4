"""The replica contexts of our strategies, and the caller's state in the threads of replicas.

TensorFlow copies graphs, devices, name and variable scopes, and the state of summaries to the threads of the replicas of a
process. This module adds the state of Keras, Python's context variables, and TensorFlow's own `threading.local`s.
"""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.step import current_share
from tfrep_strategy.core.tf import MirroredReplicaContext, ReplicaContext, save_context, stop_recording, sync_on_read_context
from tfrep_strategy.keras_integration.finding import driver_of
from tfrep_strategy.keras_integration.synchronous.driver import SynchronousDriver
from tfrep_strategy.keras_integration.synchronous.threads import CallerState
from tfrep_strategy.strategies.in_sync import seeds_of_replica


class _WeightedGradient:
    """Overrides `all_reduce` in steps that weight by examples: its gradient uses the shares of all replicas (`Share.through`)."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        share = current_share()
        flat = tf.nest.flatten(value)
        if share is None or any(isinstance(v, tf.IndexedSlices) for v in flat):
            return super().all_reduce(reduce_op, value, options)  # type: ignore[misc]
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        extended = self.strategy.extended  # type: ignore[attr-defined]

        def reduced(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return tf.nest.flatten(reduce(*tensors))

        @tf.custom_gradient
        def reduce(*xs: tf.Tensor) -> Any:
            with stop_recording():  # A tape would ask TensorFlow's collective for a gradient.
                totals = list(extended._replica_ctx_all_reduce(reduce_op, list(xs), options))
            return totals, lambda *dys: share.through(reduced, dys)  # The gradient of the gradient is a sum as well.

        own = list(map(tf.convert_to_tensor, flat))
        return tf.nest.pack_sequence_as(value, reduced(own))


class ProcessReplicaContext(_WeightedGradient, ReplicaContext):
    """The context of the one replica of a process."""


class DeviceReplicaContext(_WeightedGradient, MirroredReplicaContext):
    """The context of one of several replicas of a process."""


_THREAD_LOCALS = (save_context, sync_on_read_context)


class _Inherited:
    """The state of the current thread, for a replica's thread."""

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self._context = contextvars.copy_context()
        self._keras = CallerState()
        self._locals = [dict(vars(local)) for local in _THREAD_LOCALS]

    def run(self, fn: Any) -> None:
        for local, state in zip(_THREAD_LOCALS, self._locals, strict=True):
            vars(local).update(state)
        replica_id = self._thread.replica_id
        with seeds_of_replica(replica_id), self._keras.in_replica(first=replica_id == 0):
            self._context.run(fn)


def saving_caller_state(init: Any) -> Any:
    """Wraps the constructor of a replica's thread, so that the thread gets the state of its caller."""

    @functools.wraps(init)
    def init_with_caller_state(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        init(self, strategy, *args, **kwargs)
        self.inherited = _Inherited(self) if isinstance(driver_of(strategy), SynchronousDriver) else None

    return init_with_caller_state


def in_caller_state(run: Any) -> Any:
    """Wraps the `run` of a replica's thread, so that it runs in the state of its caller."""

    @functools.wraps(run)
    def run_in_caller_state(self: Any) -> None:
        if self.inherited is None:
            run(self)
        else:
            self.inherited.run(functools.partial(run, self))

    return run_in_caller_state
