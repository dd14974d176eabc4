"""TF-Replicator's programming model: an input function, a step function, and your own training loop.

Sources: Buchlovsky et al., "TF-Replicator: Distributed Machine Learning for Researchers" (arXiv:1902.00465), and
TensorFlow's RFC "Distribution Strategy - Revised API" (2018).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.core.old_spellings import OF_REPLICATORS, ShowsNewNames
from tfrep_strategy.core.tf import converted_by_autograph
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.keras_integration.asynchronous.worker_data import drawn_by_each_worker
from tfrep_strategy.keras_integration.refusals import refuse_old_optimizer
from tfrep_strategy.strategies import auto, parameter_server
from tfrep_strategy.strategies.base import SynchronousStrategy
from tfrep_strategy.training import collectives
from tfrep_strategy.training.collectives.calls import check_op
from tfrep_strategy.training.collectives.mapping import reduce_nests
from tfrep_strategy.training.replicator_inputs import (
    InputContext,
    InputFn,
    InputReplicationMode,
    make_input,
    no_input,
    per_pipeline,
)

StepFn = Callable[..., Any]


class Replicator(ShowsNewNames):
    """Runs step functions on every replica of a strategy.

    A step is written as for one device: its loss is the mean over its own batch. The optimizer then applies the gradient
    of the mean over the batches of all replicas. Under TensorFlow's own strategies, TensorFlow's conventions hold.

    Args:
        strategy: The strategy. Default: `tfrep.auto_strategy()`.
        input_replication_mode: The number of calls of an input function.

    Example:
        >>> repl = Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
        >>> def input_fn(ctx):
        ...     return tf.data.Dataset.range(8).batch(ctx.get_per_replica_batch_size(4))
        >>> [int(v) for v in repl.local_results(repl.run(lambda batch: tf.reduce_sum(batch), input_fn))]
        [1, 5]
    """

    _old_names = OF_REPLICATORS

    def __init__(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        input_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> None:
        if not isinstance(input_replication_mode, InputReplicationMode):
            raise ConfigurationError(
                message(
                    "Unknown input replication mode.",
                    hint="use a member of tfrep.InputReplicationMode.",
                    input_replication_mode=input_replication_mode,
                )
            )
        self.strategy = auto.auto_strategy() if strategy is None else strategy
        self._check_strategy()
        self.input_replication_mode = input_replication_mode
        # The keys hold the functions, so that no other function gets the same identity.
        self._inputs: dict[Any, Any] = {}
        self._compiled: dict[Any, Any] = {}
        self._reduce = tf.function(self._all_reduce, autograph=False)
        self._is_shut_down = False

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run a step together."""
        return self.strategy.num_replicas_in_sync

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which variables, models and optimizers belong to the replicas.

        Example:
            >>> with Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])).context():
            ...     tf.distribute.get_strategy().num_replicas_in_sync
            2
        """
        return self.strategy.scope()

    def init(self) -> None:
        """Waits until all processes have called it. `run` works without it."""
        self._check_alive()
        with self.context():
            collectives.barrier()

    def shutdown(self) -> None:
        """Frees pipelines and compiled steps. The replicator cannot run steps afterwards."""
        self._inputs.clear()
        self._compiled.clear()
        self._is_shut_down = True

    def __enter__(self) -> Replicator:
        self.init()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Checks an optimizer and returns it unchanged: a Keras optimizer needs no wrapping here.

        TF-Replicator's method made an optimizer aggregate the gradients of all replicas. Keras optimizers do so under every
        synchronous strategy: `apply` and `apply_gradients`, called in a step, make the gradients global before they use them.
        Programs may call this method, or leave it out. It detects optimizers that would not aggregate.

        Args:
            optimizer: A Keras optimizer.

        Returns:
            The same object.

        Raises:
            ConfigurationError: The optimizer is of TensorFlow 1, Keras 2 or Horovod, and the message shows the line to
                write; it is not an optimizer; or it was wrapped before.

        Example:
            >>> Replicator(tfrep.MirroredStrategy(["CPU:0"])).wrap_optimizer(keras.optimizers.SGD(name="mine")).name
            'mine'
        """
        refuse_old_optimizer(optimizer, "wrap_optimizer")
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            hint = "pass keras.optimizers.SGD(0.1), or another optimizer of Keras 3."
            raise ConfigurationError(message("wrap_optimizer takes a Keras optimizer.", hint=hint, type=type(optimizer).__name__))
        if getattr(optimizer, "_tfrep_is_wrapped", False):
            raise ConfigurationError(message("The optimizer is wrapped already.", hint="wrap it once.", optimizer=optimizer.name))
        optimizer._tfrep_is_wrapped = True
        return optimizer

    def run(self, step_fn: StepFn, input_fn: InputFn | None = None, *, steps: int = 1) -> Any:
        """Runs one step, or several, on every replica.

        Args:
            step_fn: The step, called as `step_fn(batch)`, or as `step_fn()` without an `input_fn`. It is compiled once, and
                returns a nest of tensors.
            input_fn: Called once for each pipeline, as `input_fn(input_context)` or `input_fn()`. It returns a
                `tf.data.Dataset` of per-replica batches, or a callable that returns a per-replica batch: tensors of operations,
                or Python values, for which it is called in each step. Later calls of `run` continue the same iterator.
            steps: Number of steps of this call.

        Returns:
            The result of `step_fn` on each replica of this process, in the last step; see `local_results` and `reduce`.

        Raises:
            ConfigurationError: The replicator was shut down, the step returns something other than tensors, or `steps` is
                below 1.
            tf.errors.OutOfRangeError: The data has ended. A last step without a batch for every replica is dropped, with
                a warning.

        Example:
            >>> repl = Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
            >>> float(repl.reduce(repl.run(lambda: tf.constant(2.0)), "sum"))
            4.0
        """
        self._check_alive()
        check_count("At least one step is needed.", steps=steps)
        key = step_fn, input_fn, steps
        if key not in self._compiled:
            self._compiled[key] = tf.function(self._program(step_fn, self._input(input_fn), steps), autograph=False)
        with self.context():
            source = self._input(input_fn)
            return self._compiled[key](*([] if source is None or callable(source) else [source]))

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduces a result of `run` over all replicas.

        Args:
            value: A nest of per-replica tensors.
            op: As for `tfrep.all_reduce`.

        Returns:
            A nest of tensors, equal in every process.

        Example:
            >>> repl = Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
            >>> int(repl.reduce(repl.run(lambda: tf.constant(tfrep.replica_id())), "max"))
            1
        """
        with self.context():
            reduced = self._reduce(value, op)
        return tf.nest.map_structure(lambda v: self.local_results(v)[0], reduced)

    def _all_reduce(self, value: Any, op: str) -> Any:
        return self.strategy.run(lambda v: collectives.all_reduce(v, op), args=(value,))

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the results of the replicas of this process as a tuple, given a tensor that `run` returned."""
        return self.strategy.experimental_local_results(value)

    # The program of a step.

    def _program(self, step_fn: StepFn, source: Any, steps: int) -> Callable[..., Any]:
        strategy = self.strategy

        def one_step(*iterator: Any) -> Any:
            if source is None:
                step = self._checked(step_fn)
                if not isinstance(strategy, SynchronousStrategy):
                    return strategy.run(step)
                # Otherwise the gradients of the replicas would be summed, not averaged.
                return strategy.run(lambda nothing: step(), args=(no_input(strategy),))
            batch = source() if callable(source) else next(iterator[0])
            return strategy.run(self._checked(step_fn), args=(batch,))

        def program(*iterator: Any) -> Any:
            if steps > 1:

                def body(i: tf.Tensor) -> tuple[tf.Tensor]:
                    one_step(*iterator)
                    return (i + 1,)

                first = tf.while_loop(lambda i: i < steps - 1, body, (tf.constant(0),), parallel_iterations=1)
                with tf.control_dependencies(list(first)):
                    return one_step(*iterator)
            return one_step(*iterator)

        return program

    @staticmethod
    def _checked(step_fn: StepFn) -> StepFn:
        step_fn = converted_by_autograph(step_fn)

        def step(*inputs: Any) -> Any:
            result = step_fn(*inputs)
            for leaf in tf.nest.flatten(result):
                if leaf is not None and not tf.is_tensor(leaf) and not isinstance(leaf, (tf.Variable, keras.Variable)):
                    raise ConfigurationError(
                        message(
                            f"The step returned something other than a tensor on replica {collectives.replica_id()}.",
                            hint="return tensors, or a nest of them.",
                            returned=leaf,
                        )
                    )
            return result

        return step

    # Input.

    def _input(self, input_fn: InputFn | None) -> Any:
        if input_fn is not None and input_fn not in self._inputs:
            with self.context():
                self._inputs[input_fn] = self._make_input(input_fn)
        return self._inputs.get(input_fn)

    def _make_input(self, input_fn: InputFn) -> Any:
        return make_input(self.strategy, self.input_replication_mode, input_fn)

    def _check_strategy(self) -> None:
        if isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            raise ConfigurationError(
                message(
                    "The workers of a parameter-server strategy do not run steps together.",
                    hint="use tfrep.ParameterServerReplicator.",
                    strategy=type(self.strategy).__name__,
                )
            )

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise ConfigurationError("The replicator was shut down.\nHint: make a new one.")


class ParameterServerReplicator(Replicator):
    """Runs steps on workers that do not wait for each other, with variables on parameter servers.

    `run` gives `steps` steps to free workers, waits for all of them, and returns one result for each step, in order.
    A step cannot call collectives. Gradients are not aggregated: each step updates the variables independently.

    Args:
        strategy: A parameter-server strategy, made in the coordinator. Default: `tfrep.ParameterServerStrategy()`.

    Raises:
        ConfigurationError: The strategy is of another kind.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy | None = None) -> None:
        super().__init__(parameter_server.ParameterServerStrategy() if strategy is None else strategy)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def init(self) -> None:
        """Checks that the replicator was not shut down. It does not wait for other processes."""
        self._check_alive()

    def run(self, step_fn: StepFn, input_fn: InputFn | None = None, *, steps: int = 1) -> Any:
        """Runs `steps` steps, each on one worker. Returns a list of their results; see `Replicator.run`."""
        self._check_alive()
        check_count("At least one step is needed.", steps=steps)
        key = step_fn, input_fn
        if key not in self._compiled:
            self._compiled[key] = tf.function(self._program(step_fn, self._input(input_fn), 1), autograph=False)
        source = self._input(input_fn)
        with self.context():
            scheduled = [
                self._coordinator.schedule(self._compiled[key], args=() if source is None else (source,)) for _ in range(steps)
            ]
        self._coordinator.join()
        return [each.fetch() for each in scheduled]

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduces the results of the steps of one `run`.

        Raises:
            ConfigurationError: The reduction is unknown.
        """
        for leaf in tf.nest.flatten(value):
            check_op(op, tf.convert_to_tensor(leaf))
        return reduce_nests(value, op)

    def _make_input(self, input_fn: InputFn) -> Any:
        def pipeline() -> Any:
            # TensorFlow's own strategy has no number of workers.
            with drawn_by_each_worker(getattr(self.strategy, "num_workers", 2)):
                return per_pipeline(self.strategy, self.input_replication_mode, input_fn)

        return iter(self._coordinator.create_per_worker_dataset(pipeline))

    def _check_strategy(self) -> None:
        if not isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            hint = "pass a tfrep.ParameterServerStrategy."
            raise ConfigurationError(message("A parameter-server strategy is needed.", hint, type=type(self.strategy).__name__))


__all__ = ["InputContext", "InputReplicationMode", "ParameterServerReplicator", "Replicator"]
