"""TF-Replicator's programming model: an input function, a step function, and a loop of one's own."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy import collectives, data
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.protocol import Shards
from tfrep_strategy.strategies.auto import auto_strategy
from tfrep_strategy.strategies.mirrored import MirroredStrategy
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy

InputFn = Callable[..., Any]
StepFn = Callable[..., Any]


class InputReplicationMode(enum.Enum):
    """How often an input function is called, and who gets what its pipeline gives.

    Elements of a pipeline are batches of one replica, in all modes.
    """

    SINGLE = "single"
    """One pipeline; its elements go to the replicas in turn. Processes each read it and take what is theirs, so that it has
    to give the same elements everywhere."""
    PER_WORKER = "per_worker"
    """One pipeline in each process."""
    PER_REPLICA = "per_replica"
    """One pipeline for each replica."""


class InputContext(tf.distribute.InputContext):
    """What an input function is told: `num_replicas_in_sync`, `input_pipeline_id` and `num_input_pipelines`.

    Example:
        >>> InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divides the size of a global batch by the number of replicas.

        Args:
            global_batch_size: Examples in a step of all replicas.

        Returns:
            Examples in a step of one replica.

        Raises:
            ConfigurationError: when it does not divide.

        Example:
            >>> InputContext(1, 0, 2).get_per_replica_batch_size(32)
            16
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigurationError(
                message(
                    "The global batch does not divide among the replicas.",
                    hint=f"use a multiple of {self.num_replicas_in_sync}.",
                    global_batch_size=global_batch_size,
                    num_replicas_in_sync=self.num_replicas_in_sync,
                )
            )
        return global_batch_size // self.num_replicas_in_sync


class Replicator:
    """Runs step functions on every replica of a strategy.

    Inside `run`, a step computes what one device would: its loss is the mean over its own batch, and an optimizer applies
    the gradient of the mean over the batches of all replicas.

    Args:
        strategy: Default: `tfrep.auto_strategy()`.
        input_replication_mode: How input functions are called.

    Example:
        >>> repl = Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
        >>> def input_fn(ctx):
        ...     return tf.data.Dataset.range(8).batch(ctx.get_per_replica_batch_size(4))
        >>> [int(v) for v in repl.local_results(repl.run(lambda batch: tf.reduce_sum(batch), input_fn))]
        [1, 5]
    """

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
        self.strategy = auto_strategy() if strategy is None else strategy
        self.input_replication_mode = input_replication_mode
        # By function; the functions are kept, so that their identity is not used again.
        self._inputs: dict[Any, Any] = {}
        self._compiled: dict[Any, Any] = {}
        self._reduce = tf.function(self._all_reduce, autograph=False)
        self._is_shut_down = False

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run a step together."""
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
        """Waits until all processes are there; `run` needs no call of it."""
        self._check_alive()
        with self.context():
            collectives.barrier()

    def shutdown(self) -> None:
        """Lets go of pipelines and compiled steps. Nothing may be run afterwards."""
        self._inputs.clear()
        self._compiled.clear()
        self._is_shut_down = True

    def __enter__(self) -> Replicator:
        self.init()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def wrap_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Makes a Keras optimizer aggregate the gradients of all replicas before it uses them, as `fit` does.

        Args:
            optimizer: Any Keras optimizer.

        Returns:
            The same optimizer; its `apply` and `apply_gradients` may be called in a step.

        Raises:
            ConfigurationError: for something else, or when it was wrapped before.

        Example:
            >>> Replicator(tfrep.MirroredStrategy(["CPU:0"])).wrap_optimizer(keras.optimizers.SGD()).name
            'sgd'
        """
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigurationError(
                message("wrap_optimizer takes a Keras optimizer.", type=type(optimizer).__name__)
            )
        if getattr(optimizer, "_tfrep_is_wrapped", False):
            raise ConfigurationError(
                message("The optimizer is wrapped already.", hint="wrap it once.", optimizer=optimizer.name)
            )
        # Under the strategies of this package every optimizer aggregates; what is left is to notice mistakes.
        optimizer._tfrep_is_wrapped = True
        return optimizer

    def run(self, step_fn: StepFn, input_fn: InputFn | None = None, *, steps: int = 1) -> Any:
        """Runs one step, or several, on every replica.

        Args:
            step_fn: Called as `step_fn(batch)`, or `step_fn()` without an `input_fn`; compiled once. Returns a nest of
                tensors.
            input_fn: Called once for each pipeline, as `input_fn(input_context)` or `input_fn()`; returns a
                `tf.data.Dataset` of batches of one replica, or a callable that gives such a batch whenever it is called.
                The iterator is kept from one `run` to the next.
            steps: How many steps to run in this one call.

        Returns:
            What `step_fn` returned on each replica of this process in the last step; see `local_results` and `reduce`.

        Raises:
            ConfigurationError: after `shutdown`, for a step that returns something that is no tensor, or fewer than one
                step.
            tf.errors.OutOfRangeError: at the end of the data.

        Example:
            >>> repl = Replicator(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
            >>> float(repl.reduce(repl.run(lambda: tf.constant(2.0)), "sum"))
            4.0
        """
        self._check_alive()
        if steps < 1:
            raise ConfigurationError(message("At least one step is needed.", steps=steps))
        key = step_fn, input_fn, steps
        if key not in self._compiled:
            self._compiled[key] = tf.function(self._program(step_fn, self._input(input_fn), steps), autograph=False)
        with self.context():
            source = self._input(input_fn)
            return self._compiled[key](*([] if source is None or callable(source) else [source]))

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduces what `run` returned over all replicas.

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
        """Returns what the replicas of this process returned: one entry for each, of a tensor that `run` gave."""
        return self.strategy.experimental_local_results(value)

    # How a step is built.

    def _program(self, step_fn: StepFn, source: Any, steps: int) -> Callable[..., Any]:
        strategy = self.strategy

        def one_step(*iterator: Any) -> Any:
            if source is None:
                return strategy.run(self._checked(step_fn))
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
        def step(*inputs: Any) -> Any:
            result = step_fn(*inputs)
            for leaf in tf.nest.flatten(result):
                if leaf is not None and not tf.is_tensor(leaf) and not isinstance(leaf, (tf.Variable, keras.Variable)):
                    raise ConfigurationError(
                        message(
                            f"The step returned something that is no tensor on replica {collectives.replica_id()}.",
                            hint="return tensors, or a nest of them.",
                            returned=leaf,
                        )
                    )
            return result

        return step

    # What a step reads.

    def _input(self, input_fn: InputFn | None) -> Any:
        if input_fn is not None and input_fn not in self._inputs:
            with self.context():
                self._inputs[input_fn] = self._make_input(input_fn)
        return self._inputs.get(input_fn)

    def _make_input(self, input_fn: InputFn) -> Any:
        strategy = self.strategy
        if not hasattr(strategy, "communicator_of"):
            return iter(strategy.distribute_datasets_from_function(lambda ctx: _call_input(input_fn, ctx)))
        extended = strategy.extended
        agreement = extended._agreement(stop_together=True)
        count, first, total = extended.num_local_replicas, extended.first_local_replica, self.num_replicas_in_sync
        mode = self.input_replication_mode
        if mode == InputReplicationMode.SINGLE:
            places = [(1, 0)]
        elif mode == InputReplicationMode.PER_WORKER:
            places = [(agreement.size, agreement.rank)]
        else:
            places = [(total, first + i) for i in range(count)]
        made = [_call_input(input_fn, InputContext(n, i, total)) for n, i in places]
        if all(isinstance(m, tf.data.Dataset) for m in made):
            if len(made) > 1:
                made = [tf.data.Dataset.choose_from_datasets(made, tf.data.Dataset.range(count).repeat())]
            dataset = made[0]
            if mode == InputReplicationMode.SINGLE:
                dataset = dataset.shard(agreement.size, agreement.rank)
            return data.ReplicaIterator(iter(dataset), count, agreement, as_shards=True)
        if all(callable(m) for m in made):

            def batches() -> Shards:
                parts = tuple(tf.nest.map_structure(tf.convert_to_tensor, made[i % len(made)]()) for i in range(count))
                return Shards(parts, agreement.examples(tf.add_n([data.num_examples(part) for part in parts])))

            return batches
        raise ConfigurationError(
            message(
                "An input function returns a tf.data.Dataset, or a callable that gives a nest of tensors.",
                returned=[type(m).__name__ for m in made],
            )
        )

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise ConfigurationError("The replicator was shut down.\nHint: make a new one.")


def _call_input(input_fn: InputFn, context: Any) -> Any:
    try:
        takes_context = bool(inspect.signature(input_fn).parameters)
    except ValueError:  # A builtin tells nothing.
        takes_context = True
    return input_fn(context) if takes_context else input_fn()


class MultiGpuReplicator(Replicator):
    """Replicas on the GPUs of this process.

    Args:
        num_gpus: How many; default: all.
        **options: As for `Replicator`.

    Raises:
        ConfigurationError: when there are fewer.
    """

    def __init__(self, num_gpus: int | None = None, **options: Any) -> None:
        present = len(tf.config.list_logical_devices("GPU"))
        wanted = present if num_gpus is None else num_gpus
        if not 1 <= wanted <= present:
            raise ConfigurationError(
                message(
                    f"TensorFlow sees {present} GPUs.",
                    hint="use fewer, or tfrep.Replicator(tfrep.MirroredStrategy(tfrep.use_logical_cpus(n))) on a CPU.",
                    num_gpus=num_gpus,
                )
            )
        super().__init__(MirroredStrategy([f"GPU:{i}" for i in range(wanted)]), **options)


class MultiWorkerReplicator(Replicator):
    """One replica in each process of the run.

    Args:
        communicator: As for `MultiWorkerStrategy`.
        device: As for `MultiWorkerStrategy`.
        **options: As for `Replicator`.

    Example:
        >>> MultiWorkerReplicator().num_replicas_in_sync
        1
    """

    def __init__(self, communicator: Any = "auto", device: str | None = None, **options: Any) -> None:
        super().__init__(MultiWorkerStrategy(communicator, device), **options)


class TpuReplicator(Replicator):
    """Replicas on the cores of a TPU, by TensorFlow's own strategy.

    Args:
        num_workers: Hosts of the TPU.
        num_tpu_cores_per_worker: Cores at each of them.
        tpu: Name or address of the TPU; default: the one of this machine.
        **options: As for `Replicator`.

    Raises:
        ConfigurationError: when there is no TPU, or it has another number of cores.
    """

    def __init__(self, num_workers: int = 1, num_tpu_cores_per_worker: int = 8, tpu: str = "local", **options: Any) -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
            if tpu not in ("", "local"):
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            strategy = tf.distribute.TPUStrategy(resolver)
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            raise ConfigurationError(
                message("There is no TPU that TensorFlow can reach.", hint=str(error).splitlines()[0], tpu=tpu)
            ) from error
        _check_cores(strategy.num_replicas_in_sync, num_workers, num_tpu_cores_per_worker)
        super().__init__(strategy, **options)


def _check_cores(present: int, num_workers: int, num_tpu_cores_per_worker: int) -> None:
    if present != num_workers * num_tpu_cores_per_worker:
        raise ConfigurationError(
            message(
                f"The TPU has {present} cores.",
                num_workers=num_workers,
                num_tpu_cores_per_worker=num_tpu_cores_per_worker,
            )
        )


class ParameterServerReplicator(Replicator):
    """Workers that run steps without waiting for each other, on variables that live on parameter servers.

    `run` hands `steps` steps to whichever workers are free, waits for all of them, and returns one result for each step, in
    order. Collectives cannot be called in a step, and gradients are not aggregated: every step updates by itself.

    Args:
        strategy: A parameter-server strategy; made in the coordinator.

    Raises:
        ConfigurationError: for another strategy.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy) -> None:
        if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ConfigurationError(message("A parameter-server strategy is needed.", type=type(strategy).__name__))
        super().__init__(strategy)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def init(self) -> None:
        """Nothing has to be waited for."""
        self._check_alive()

    def run(self, step_fn: StepFn, input_fn: InputFn | None = None, *, steps: int = 1) -> Any:
        """Runs `steps` steps, each on one worker, and returns their results in a list; see `Replicator.run`."""
        self._check_alive()
        if steps < 1:
            raise ConfigurationError(message("At least one step is needed.", steps=steps))
        key = step_fn, input_fn
        if key not in self._compiled:
            self._compiled[key] = tf.function(self._program(step_fn, self._input(input_fn), 1), autograph=False)
        source = self._input(input_fn)
        with self.context():
            scheduled = [
                self._coordinator.schedule(self._compiled[key], args=() if source is None else (source,))
                for _ in range(steps)
            ]
        self._coordinator.join()
        return [tf.nest.map_structure(lambda v: v, each.fetch()) for each in scheduled]

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduces the results of the steps of one `run`."""
        from tfrep_strategy._collectives.spread_work import reduce_nests

        return reduce_nests(value, op)

    def _make_input(self, input_fn: InputFn) -> Any:
        made = self._coordinator.create_per_worker_dataset(
            lambda: self.strategy.distribute_datasets_from_function(lambda ctx: _call_input(input_fn, ctx))
        )
        return iter(made)
