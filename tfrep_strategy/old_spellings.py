"""Spellings of older years and of other packages that reach this one: an error shows the line to write today.

Articles on TF-Replicator, estimators, Horovod and the first versions of `tf.distribute` use them. docs/migration/old_spellings.md
lists them, and those that fail in TensorFlow or Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tfrep_strategy.errors import ConfigurationError, message

_Function = TypeVar("_Function", bound=Callable[..., Any])
Line = str | Callable[[Any], str]
"""What a hint says; or a function that makes it of the value that an argument was given."""

_LEAVE_OUT = "leave it out: "

OF_PACKAGE = {
    "MultiWorkerMirroredStrategy": "write tfrep.MultiWorkerStrategy().",
    "CollectiveAllReduceStrategy": "write tfrep.MultiWorkerStrategy().",
    "OneDeviceStrategy": 'write tfrep.MirroredStrategy(["GPU:0"]).',
    "CentralStorageStrategy": "write tfrep.MirroredStrategy().",
    "DistributedOptimizer": "write the optimizer itself, such as keras.optimizers.SGD(0.1): strategies sum its gradients.",
    "DistributedGradientTape": "write tf.GradientTape(): optimizer.apply sums gradients, in a step of strategy.run.",
    "init": _LEAVE_OUT + "making a strategy, or `tfrep run`, connects the processes.",
    "shutdown": _LEAVE_OUT + "processes part when they end.",
    "rank": "write tfrep.replica_id() in a step, and tfrep.is_chief() outside of it, or the rank of a MultiWorkerStrategy.",
    "current_replica_id": "write tfrep.replica_id(), in a step.",
    "size": "write tfrep.num_replicas() in a step, and strategy.num_replicas_in_sync outside of it.",
    "local_rank": _LEAVE_OUT + "each process takes its own GPU.",
    "allreduce": 'write tfrep.all_mean(value), or tfrep.all_reduce(value, "sum"), in a step; all_gather_object(value) outside.',
    "all_min": 'write tfrep.all_reduce(value, "min"), in a step.',
    "all_max": 'write tfrep.all_reduce(value, "max"), in a step.',
    "allgather": "write tfrep.all_gather(value) in a step, and tfrep.all_gather_object(value) outside of it.",
    "allgather_object": "write tfrep.all_gather_object(value).",
    "alltoall": "write tfrep.all_to_all(value), in a step.",
    "reducescatter": "write tfrep.reduce_scatter(value), in a step.",
    "broadcast_variables": _LEAVE_OUT + "new variables get rank 0's values.",
}
"""Names of `tfrep_strategy`."""

OF_CALLBACKS = {
    "BroadcastGlobalVariablesCallback": _LEAVE_OUT + "new variables get rank 0's values.",
    "MetricAverageCallback": _LEAVE_OUT + "logs are those of the global batch.",
    "LearningRateWarmupCallback": "write tfrep.callbacks.LearningRateWarmup(learning_rate, epochs=5).",
    "LearningRateScheduleCallback": "write keras.callbacks.LearningRateScheduler(schedule).",
    "BestModelCheckpoint": 'write keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True).',
    "CommitStateCallback": "write keras.callbacks.BackupAndRestore(folder), and start with `tfrep run --max-restarts`.",
    "UpdateBatchStateCallback": "write keras.callbacks.BackupAndRestore(folder), and start with `tfrep run --max-restarts`.",
    "UpdateEpochStateCallback": "write keras.callbacks.BackupAndRestore(folder), and start with `tfrep run --max-restarts`.",
}
"""Horovod's callbacks."""

RUN = "write strategy.run(fn, args=(...)), in a tf.function."
DISTRIBUTE = "write iter(strategy.experimental_distribute_dataset(dataset))."
OF_FUNCTIONS = "write iter(strategy.distribute_datasets_from_function(fn))."

OF_STRATEGIES = {
    "experimental_run_v2": RUN,
    "call_for_each_replica": RUN,
    "call_for_each_tower": RUN,
    "distribute_dataset": DISTRIBUTE,
    "make_input_iterator": OF_FUNCTIONS,
    "experimental_make_numpy_dataset": "write tf.data.Dataset.from_tensor_slices(arrays).",
    "num_replicas": "write strategy.num_replicas_in_sync.",
    "num_towers": "write strategy.num_replicas_in_sync.",
    "worker_devices": "write strategy.extended.worker_devices.",
    "parameter_devices": "write strategy.extended.parameter_devices.",
    "broadcast": "write tfrep.broadcast(value), in a step.",
    "initialize": _LEAVE_OUT + "there is no session.",
    "finalize": _LEAVE_OUT + "there is no session.",
}
"""Names of strategies."""

OF_REPLICATORS = {
    "scope": "write repl.context().",
    "prepare_input": "write repl.run(step_fn, input_fn).",
    "initialize": _LEAVE_OUT + "there is no session.",
    "finalize": "write repl.shutdown(), or leave it out.",
    "current_replica_id": "write tfrep.replica_id(), in the step.",
    "all_sum": "write tfrep.all_sum(value), in the step.",
    "all_reduce": "write tfrep.all_reduce(value), in the step.",
    "all_gather": "write tfrep.all_gather(value), in the step.",
    "broadcast": "write tfrep.broadcast(value), in the step.",
    "map_gather": "write tfrep.map_gather(values, fn), in the step.",
    "map_reduce": "write tfrep.map_reduce(values, fn), in the step.",
}
"""Names of replicators."""


def _devices(count: Any) -> str:
    names = [f"GPU:{i}" for i in range(count)] if isinstance(count, int) and 0 < count <= 16 else ["GPU:0", "GPU:1"]
    return f"write tfrep.MirroredStrategy({names}), or tfrep.MirroredStrategy() for all.".replace("'", '"')


_TRANSPORT = 'write tfrep.MultiWorkerStrategy("tf") or "horovod"; TensorFlow\'s uses NCCL on GPUs.'
_NO_READING = _LEAVE_OUT + "batches are cut and moved to their devices as the strategy needs."

OF_MIRRORED: dict[str, Line] = {
    "num_gpus": _devices,
    "num_gpus_per_worker": _devices,
    "cross_device_ops": _LEAVE_OUT + "NCCL sums on GPUs. `gradient_aggregator` replaces the sum.",
    "cross_tower_ops": _LEAVE_OUT + "NCCL sums on GPUs. `gradient_aggregator` replaces the sum.",
    "prefetch_on_device": _NO_READING,
    "auto_shard_dataset": _NO_READING,
}
"""Arguments of `MirroredStrategy`."""

OF_MULTI_WORKER: dict[str, Line] = {
    "num_gpus_per_worker": _LEAVE_OUT + "start a process for each GPU, as `tfrep run -n` does.",
    "cluster_resolver": _LEAVE_OUT + "TF_CONFIG, Slurm and others are found. tfrep.register_environment adds your own.",
    "communication": _TRANSPORT,
    "communication_options": _TRANSPORT + " `bucket_bytes` is what `bytes_per_pack` was.",
}
"""Arguments of `MultiWorkerStrategy`."""

OF_PARAMETER_SERVERS: dict[str, Line] = {
    "num_gpus_per_worker": _LEAVE_OUT + "each worker uses its GPU.",
}
"""Arguments of `ParameterServerStrategy`."""

OF_RUN_CONFIG: dict[str, Line] = {
    "session_config": _LEAVE_OUT + "there is no session. tf.config has what ConfigProto had.",
    "device_fn": _LEAVE_OUT + "the strategy places variables.",
    "protocol": _LEAVE_OUT + "the strategy connects the processes.",
    "experimental_distribute": "write train_distribute=strategy, eval_distribute=strategy.",
    "keep_checkpoint_every_n_hours": "write keep_checkpoint_max=None to keep all.",
}
"""Arguments of `tfrep_strategy.estimator.RunConfig`."""


def refuses(arguments: Mapping[str, Line]) -> Callable[[_Function], _Function]:
    """Lets a function refuse arguments of older years, with the line to write today.

    Args:
        arguments: Their hints, by name.

    Example:
        >>> @refuses({"lr": "write learning_rate=0.1."})
        ... def train(learning_rate=0.1): ...
        >>> train(lr=0.5)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: train no longer takes lr. Received: lr=0.5
        Hint: write learning_rate=0.1.
    """

    def decorate(function: _Function) -> _Function:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for argument, value in kwargs.items():
                if argument in arguments:
                    line = arguments[argument]
                    hint = line if isinstance(line, str) else line(value)
                    raise ConfigurationError(message(f"{name} no longer takes {argument}.", hint=hint, **{argument: value}))
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def takes_no_session(function: _Function) -> _Function:
    """Lets a method without arguments refuse the session that TensorFlow 1 gave it.

    Example:
        >>> class Loop:
        ...     @takes_no_session
        ...     def init(self): ...
        >>> Loop().init("a session")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: TensorFlow 2 has no sessions, and init takes none. Received: session='a session'
        Hint: write repl.init().
    """

    @functools.wraps(function)
    def checked(self: Any, *session: Any, **named: Any) -> Any:
        if session or named:
            raise ConfigurationError(
                message(
                    f"TensorFlow 2 has no sessions, and {function.__name__} takes none.",
                    hint=f"write repl.{function.__name__}().",
                    session=[*session, *named.values()][0],
                )
            )
        return function(self)

    return checked  # type: ignore[return-value]


def no_attribute(owner: str, name: str, line: str) -> str:
    """Returns what the error says about an attribute of older years.

    Example:
        >>> print(no_attribute("module 'tfrep_strategy'", "rank", "write tfrep.replica_id()."))
        module 'tfrep_strategy' has no attribute 'rank'.
        Hint: write tfrep.replica_id().
    """
    return message(f"{owner} has no attribute {name!r}.", hint=line)


def gone(name: str, line: str) -> Callable[..., Any]:
    """Returns a method that refuses to be called, for one of TensorFlow's that needs a session.

    Example:
        >>> gone("make_dataset_iterator", "write iter(dataset).")()
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: make_dataset_iterator is of TensorFlow 1.
        Hint: write iter(dataset).
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigurationError(message(f"{name} is of TensorFlow 1.", hint=line))

    refuse.__name__, refuse.__doc__ = name, f"Is gone: {line}"
    return refuse


class ShowsNewNames:
    """Base of classes that say, if they are asked for an attribute of older years, what to write today.

    Example:
        >>> class Model(ShowsNewNames):
        ...     _old_names = {"fit_generator": "write model.fit(generator)."}
        >>> Model().fit_generator
        Traceback (most recent call last):
        ...
        AttributeError: 'Model' object has no attribute 'fit_generator'.
        Hint: write model.fit(generator).
    """

    _old_names: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # A type checker would take any name.

        def __getattr__(self, name: str) -> Any:
            line = type(self)._old_names.get(name)
            if line is None:
                return object.__getattribute__(self, name)  # Raises what Python raises, or what a property has raised.
            raise AttributeError(no_attribute(f"{type(self).__name__!r} object", name, line), name=name, obj=self)
