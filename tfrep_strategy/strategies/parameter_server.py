"""`ParameterServerStrategy`: variables are on servers, and workers read and update them independently.

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), and TensorFlow's RFC 334,
"Distributed Keras training APIs with parameter servers".
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import CachingVariable, ParameterServerExtended, ShardedVariable, next_port
from tfrep_strategy.batches import pack, shard
from tfrep_strategy.clusters.cluster import wait_until_reachable
from tfrep_strategy.clusters.resolver import LocalClusterResolver
from tfrep_strategy.clusters.servers import NAMES, run_server
from tfrep_strategy.environments import SlurmEnvironment, TfConfigEnvironment
from tfrep_strategy.errors import ConfigurationError, PeerError, check_count, message, shortened
from tfrep_strategy.keras_integration.asynchronous.driver import AsynchronousDriver
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import PartInitializer, PartitionedVariable
from tfrep_strategy.keras_integration.shared.keras_2 import NoticesKeras2
from tfrep_strategy.old_spellings import OF_STRATEGIES, ShowsNewNames
from tfrep_strategy.processes.watcher import start_watcher
from tfrep_strategy.rendezvous.confinement import confined
from tfrep_strategy.rendezvous.connections import free_ports
from tfrep_strategy.rendezvous.lost_machines import watch_connections
from tfrep_strategy.strategies.checked_settings import CheckedSetting, flag, function, or_none, positive, seconds
from tfrep_strategy.strategies.graph_mode import refuse_graph_mode
from tfrep_strategy.strategies.step_runner import StepRunner
from tfrep_strategy.validation import Size, variable


class ParameterServerStrategy(ShowsNewNames, tf.distribute.ParameterServerStrategy):
    """Asynchronous training: workers process batches independently, and update variables on parameter servers.

    This process is the coordinator. A step is one batch on one worker: 100 steps on 4 workers are about 25 on each. No
    worker waits for another. Training continues without a worker that dies.

    Args:
        cluster_resolver: The addresses of the workers (job "worker") and servers (job "ps"). Default: those of `TF_CONFIG`,
            or of Slurm. Under Slurm rank 0 is the coordinator, the next `TFREP_SERVERS` (1) ranks are servers, and the rest
            are workers. All processes can run the same script: on a worker or server, making the strategy serves until the
            process is ended (under Slurm: until the coordinator has ended).
        variable_partitioner: A function that returns into how many parts to cut a variable along its first axis; see
            `tf.distribute.experimental.partitioners`.
        max_in_flight: Limits how many steps may start before an earlier one has ended: step i starts after step
            `i - max_in_flight * workers` has ended. A gradient is then applied after at most about that many other updates.
            None: the fast workers never wait for a slow one.
        sync: Whether an update applies the mean gradient of several workers that read the same weights, instead of each
            gradient separately.
        replicas_to_aggregate: With `sync`, the number of gradients of an update. Gradients of slower workers are dropped.
            Default: the number of workers.
        worker_timeout: Seconds without any worker after which training fails.
        connect_timeout: Seconds in which servers and workers must become reachable.
        coordinator_timeout: Under Slurm, seconds that workers and servers wait for the coordinator. Otherwise the job would
            last as long as they do.
        allow_plain_models: Whether models that were made outside the scope train without a warning. The coordinator trains such a
            model itself.

    Every argument is an attribute, too. `max_in_flight`, `worker_timeout` and `allow_plain_models` can be set later; the others
    are fixed.

    Raises:
        ConfigurationError: The cluster has no server or no worker, or a setting cannot be used.
        PeerError: An address cannot be reached. The message names it.

    Example:
        >>> with tfrep.local_cluster(workers=2, servers=1) as cluster:
        ...     strategy = tfrep.ParameterServerStrategy(cluster)
        ...     with strategy.scope():
        ...         model = make_model()
        ...     history = model.fit(x, y, batch_size=2, verbose=0)
        >>> len(history.history["loss"])
        1
    """

    _old_names = OF_STRATEGIES

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        max_in_flight: int | None = None,
        sync: bool = False,
        replicas_to_aggregate: int | None = None,
        worker_timeout: float = 60.0,
        connect_timeout: float = 20.0,
        coordinator_timeout: float = 600.0,
        allow_plain_models: bool = False,
    ) -> None:
        refuse_graph_mode()
        resolver = _resolver_from_environment() if cluster_resolver is None else cluster_resolver
        self._jobs = _checked_jobs(resolver)
        resolver = _without_evaluator(resolver)
        self.worker_timeout, self.connect_timeout, self.coordinator_timeout = worker_timeout, connect_timeout, coordinator_timeout
        self.allow_plain_models = allow_plain_models
        if resolver.task_type in ("worker", "ps"):
            self._have_watched(NAMES[resolver.task_type], resolver.task_id)
            timeout = self.coordinator_timeout if getattr(resolver, "from_slurm", False) else None
            cluster = resolver.cluster_spec().as_dict()
            run_server(cluster, resolver.task_type, resolver.task_id, coordinator_timeout=timeout)
            sys.exit(0)
        self.variable_partitioner, self.max_in_flight, self.sync = variable_partitioner, max_in_flight, sync
        num_workers = len(self._jobs["worker"])
        if replicas_to_aggregate is not None:
            check_count(
                f"There are {num_workers} workers to wait for.", 1, num_workers, replicas_to_aggregate=replicas_to_aggregate
            )
        if replicas_to_aggregate is not None and not sync:
            raise ConfigurationError(
                message(
                    "replicas_to_aggregate needs sync=True: without it every gradient is an update.",
                    hint="set sync=True.",
                    replicas_to_aggregate=replicas_to_aggregate,
                )
            )
        self.replicas_to_aggregate = (replicas_to_aggregate or num_workers) if sync else None
        self._refuse_unreachable(connect_timeout)
        if not isinstance(resolver, LocalClusterResolver):  # Else nobody waits for this program.
            self._have_watched("The coordinator", 0)
        # Without an address of its own, the coordinator serves itself only.
        own = self._jobs.get("chief") or [f"localhost:{free_ports(1, host='')[0]}"]
        tasks = [address for job in self._jobs.values() for address in job] if "chief" in self._jobs else own
        with next_port(int(own[0].rpartition(":")[2])), confined(own[0], tasks):
            super().__init__(resolver, variable_partitioner)
        # TensorFlow's class makes its own `extended`. The second call replaces it with ours.
        tf.distribute.Strategy.__init__(self, _Extended(self, resolver, variable_partitioner))
        self.extended.keras_driver = AsynchronousDriver(self)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        watch_connections(self, [*self._jobs["worker"], *self._jobs["ps"]])
        self.extended.step_runner = StepRunner(self)

    variable_partitioner = CheckedSetting(or_none(function), fixed=True)
    max_in_flight = CheckedSetting(or_none(positive("steps")))
    sync = CheckedSetting(flag, fixed=True)
    replicas_to_aggregate = CheckedSetting(fixed=True)
    worker_timeout = CheckedSetting(seconds)
    connect_timeout = CheckedSetting(seconds, fixed=True, of_run=True)
    coordinator_timeout = CheckedSetting(seconds, fixed=True, of_run=True)
    allow_plain_models = CheckedSetting(flag)

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has, dead ones included."""
        return len(self._jobs["worker"])

    def addresses(self, job: str) -> list[str]:
        """Returns the address ("host:port") of each task of a job, "worker" or "ps"."""
        return list(self._jobs[job])

    def lost_servers(self) -> list[str]:
        """Returns the addresses of the parameter servers that cannot be reached now."""
        servers = {address: address for address in self._jobs["ps"]}
        return wait_until_reachable(servers, 1.0)

    def _have_watched(self, name: str, number: int) -> None:
        """Has a process look at this one as long as the strategy lives, unless a launcher does."""
        watcher = start_watcher(name, number)
        if watcher is not None:
            weakref.finalize(self, watcher.close)

    def _refuse_unreachable(self, limit: float) -> None:
        tasks = {f"{job} {i}": self._jobs[job][i] for job in ("worker", "ps") for i in range(len(self._jobs[job]))}
        missing = wait_until_reachable(tasks, limit)
        if missing:
            raise PeerError(
                message(
                    f"Nobody listens at {', '.join(f'{tasks[name]} ({name})' for name in missing)} after {limit:g} seconds.",
                    hint="start the servers and workers, or correct the cluster's addresses.",
                    cluster=self._jobs,
                )
            )


class _Extended(NoticesKeras2, ParameterServerExtended):
    step_runner: StepRunner

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._step_numbers = itertools.count()

    def cut_for_replicas(self, batch: Any) -> Any:
        """Cuts a batch into parts for the devices of a worker, as the argument of `run`."""
        replicas = self._num_replicas_in_sync
        return batch if replicas == 1 else pack(shard(batch, replicas, 0, replicas))

    def next_step_number(self) -> int:
        """Returns the number of the next step that Keras drives."""
        return next(self._step_numbers)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Marks functions that are traced in the body as functions that will run on workers."""
        self._being_scheduled = True
        try:
            yield
        finally:
            self._being_scheduled = False

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # Variables that a step makes lazily, such as an optimizer's slots, must not depend on the step's batch.
        with tf.control_dependencies(None):
            variable = self._created(next_creator, **kwargs)
        # Keras variables know it by that where no strategy is in scope.
        variable.keras_driver = self.keras_driver
        return variable

    def _created(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        like = kwargs.get("colocate_with")
        if isinstance(like, PartitionedVariable):
            return self._create_like(like, next_creator, **kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, ShardedVariable):
            # An optimizer passes each part, not the whole variable, to its update function.
            parts = [part.get() if isinstance(part, CachingVariable) else part for part in variable.variables]
            return PartitionedVariable(parts, name=kwargs.get("name") or "Variable")
        return variable

    def _create_like(self, like: PartitionedVariable, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Makes an optimizer's slot. Each part is on the server of the variable's part."""
        value, shape = kwargs.pop("initial_value"), kwargs.pop("shape", None)
        name = kwargs.pop("name", None) or "Variable"
        if not isinstance(value, PartInitializer):
            value = tf.convert_to_tensor(value() if callable(value) else value, kwargs.get("dtype"))
            shape = value.shape
        if like.shape != shape:
            kwargs.update(initial_value=value, name=name, colocate_with=like.variables[0])
            return super()._create_variable(next_creator, **kwargs)
        parts, start = [], 0
        for index, part in enumerate(like.variables):
            if isinstance(value, PartInitializer):
                initial = functools.partial(value, part.shape, (start, *[0] * (like.shape.rank - 1)))
            else:
                initial = value[start : start + part.shape[0]]
            kwargs.update(initial_value=initial, name=f"{name}/part_{index}", colocate_with=part)
            slot = super()._create_variable(next_creator, **kwargs)
            parts.append(slot.get() if isinstance(slot, CachingVariable) else slot)
            start += part.shape[0]
        return PartitionedVariable(parts, name=name)

    # A worker with one device has nothing to merge over its replicas, so updates may be inside `tf.cond`.
    def _use_merge_call(self) -> bool:
        return self._num_replicas_in_sync > 1

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if self._use_merge_call():
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        return self._update(var, fn, args, kwargs, group)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, PartitionedVariable):
            return super()._update(var, fn, args, kwargs, group)
        cut = [var.cut(arg) for arg in args]
        return [
            super(_Extended, self)._update(part, fn, tuple(parts[index] for parts in cut), kwargs, group)
            for index, part in enumerate(var.variables)
        ]

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._use_merge_call():
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        return value

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, PartitionedVariable):
            super()._validate_colocate_with_variable(colocate_with_variable)


def _checked_jobs(resolver: Any) -> dict[str, list[str]]:
    try:
        spec, own_job, own_index = tf.train.ClusterSpec(resolver.cluster_spec()), resolver.task_type, resolver.task_id
    except Exception as error:  # TensorFlow reads `TF_CONFIG` without checking it.
        setting = {name: os.environ[name] for name in TfConfigEnvironment.variables if name in os.environ}
        what, hint = f"The cluster cannot be read ({shortened(str(error))}).", 'it maps "worker" and "ps" to lists of "host:port".'
        raise ConfigurationError(message(what, hint, **setting)) from error
    jobs = {job: spec.job_tasks(job) for job in spec.jobs}
    for job, what in (("ps", "parameter server"), ("worker", "worker")):
        if not jobs.get(job):
            raise ConfigurationError(message(f"The cluster has no {what}.", hint=f'list its address under "{job}".', cluster=jobs))
    unknown = sorted(set(jobs) - {"chief", "worker", "ps", "evaluator"})
    if unknown:
        raise ConfigurationError(
            message("The cluster has a job of another kind.", hint="use chief, worker, ps, evaluator.", jobs=unknown)
        )
    for job in ("chief", "evaluator"):
        if len(jobs.get(job, ())) > 1:
            raise ConfigurationError(message(f"The cluster has more than one {job}.", hint="list one.", **{job: jobs[job]}))
    if own_job == "evaluator":
        raise ConfigurationError(
            message(
                "An evaluator takes no part in the training.",
                hint="run tfrep.SidecarEvaluator there.",
                type="evaluator",
            )
        )
    if own_job and own_job not in list(jobs):
        raise ConfigurationError(
            message("This task's job is not in the cluster.", hint=f"its type must be {' or '.join(jobs)}.", type=own_job)
        )
    if own_job and (own_index is None or not 0 <= own_index < len(jobs[own_job])):
        raise ConfigurationError(
            message("There is no such task.", hint=f"job {own_job!r} has {len(jobs[own_job])}, from 0.", index=own_index)
        )
    return jobs


def _without_evaluator(resolver: Any) -> Any:
    """Removes the evaluator from a cluster. It runs no server, and TensorFlow would wait for it."""
    jobs = resolver.cluster_spec().as_dict()
    if jobs.pop("evaluator", None) is None:
        return resolver
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), rpc_layer=resolver.rpc_layer, task_type=resolver.task_type, task_id=resolver.task_id
    )


def _resolver_from_environment() -> Any:
    if TfConfigEnvironment.detect():
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if SlurmEnvironment.detect():
        return _resolver_from_slurm()
    raise ConfigurationError(
        message(
            "There is no description of the cluster.",
            hint="pass a cluster resolver (tfrep.local_cluster starts a cluster on this machine), or set TF_CONFIG.",
            cluster_resolver=None,
        )
    )


def _resolver_from_slurm() -> Any:
    environment = SlurmEnvironment()
    addresses, servers = environment.addresses or [], variable(Size, "TFREP_SERVERS", default=1)
    cluster = {"chief": addresses[:1], "ps": addresses[1 : 1 + servers], "worker": addresses[1 + servers :]}
    own = addresses[environment.rank]
    job = next(job for job, tasks in cluster.items() if own in tasks)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: tasks for job, tasks in cluster.items() if tasks}),
        rpc_layer="grpc",
        task_type=job,
        task_id=cluster[job].index(own),
    )
    resolver.from_slurm = True
    return resolver
