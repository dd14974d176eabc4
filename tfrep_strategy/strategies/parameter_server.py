"""`ParameterServerStrategy`: variables are on servers, and workers read and update them independently.

A `StepRunner` schedules steps on free workers, and collects their results and errors.

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), and TensorFlow's RFC 334,
"Distributed Keras training APIs with parameter servers".
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.environments import SlurmEnvironment, TfConfigEnvironment
from tfrep_strategy.cluster.local_cluster import NAMES, run_server, wait_until_reachable
from tfrep_strategy.cluster.rendezvous.confinement import confined
from tfrep_strategy.cluster.rendezvous.connections import free_ports, watch_connections
from tfrep_strategy.cluster.resolver import LocalClusterResolver
from tfrep_strategy.cluster.watcher import start_watcher
from tfrep_strategy.core.old_spellings import OF_STRATEGIES, ShowsNewNames
from tfrep_strategy.core.tf import (
    CachingVariable,
    Closure,
    ParameterServerExtended,
    RemoteValueImpl,
    ShardedVariable,
    context,
    executor_scope,
    is_server_failure,
    new_executor,
    next_port,
)
from tfrep_strategy.core.validation import Size, variable
from tfrep_strategy.data.batches import pack, shard
from tfrep_strategy.errors import ConfigurationError, PeerError, ServerLostError, WorkerError, check_count, message, shortened
from tfrep_strategy.keras_integration.asynchronous.driver import AsynchronousDriver
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import PartInitializer, PartitionedVariable
from tfrep_strategy.keras_integration.refusals import NoticesKeras2
from tfrep_strategy.strategies.settings import CheckedSetting, flag, function, or_none, positive, refuse_graph_mode, seconds

_CHECK_SECONDS = 0.5


class StepResult(RemoteValueImpl):
    """The result of one scheduled step.

    Unlike TensorFlow's remote values, it is complete only when its value is on the coordinator. If the worker dies before,
    another worker repeats the step.

    Attributes:
        worker: Number of the worker that runs it, or ran it last.
        attempts: Number of times that it was started.
        out_of_data: Whether the worker's data had ended.
    """

    def __init__(self, type_spec: Any, on_complete: Callable[[StepResult], None]) -> None:
        super().__init__(None, type_spec)
        self._on_complete = on_complete
        self.worker: int | None = None
        self.attempts = 0
        self.out_of_data = False
        self.complete = False

    @property
    def has_value(self) -> bool:
        """Whether the step succeeded: it did not fail, was not cancelled, and had data."""
        return self.complete and self._error is None and not self.out_of_data

    def finish(self) -> None:
        """Marks the step as complete: it needs no further attempt."""
        if not self.complete:
            self.complete = True
            self._on_complete(self)

    def _set_error(self, error: Exception) -> None:
        super()._set_error(error)
        self.finish()


class _StepClosure(Closure):
    """A step in TensorFlow's queue."""

    def __init__(self, function: Any, cancellation: Any, args: tuple[Any, ...], on_complete: Callable[[StepResult], None]) -> None:
        super().__init__(function, cancellation, args=args)
        self.result = StepResult(self._output_type_spec, on_complete)
        self._output_remote_value_ref = lambda: self.result

    def execute_on(self, worker: Any) -> None:
        # The default executor is shared by all threads. Leaving it waits for all workers, including one that hangs.
        context().executor = worker.executor
        self.result.worker = worker.worker_index
        self.result.attempts += 1
        try:
            super().execute_on(worker)
            self.result.get()
            # Frees the values on the worker now. Later the worker may hang, and freeing them would wait.
            self.result._values = None
        except tf.errors.OutOfRangeError:
            # Not a failure: the other workers continue their steps.
            self.result.out_of_data = True
            self.result._set_values(None)
        except Exception as error:
            error.worker_index = worker.worker_index  # type: ignore[attr-defined]
            raise
        self.result.finish()


class StepRunner:
    """Schedules steps, a limited number at a time, and waits for them.

    Args:
        strategy: The strategy whose workers run the steps. Its `max_in_flight` limits the age of a gradient.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._condition = threading.Condition()
        self._unfinished: collections.OrderedDict[int, StepResult] = collections.OrderedDict()
        self._scheduled = 0
        self._last_progress = time.monotonic()
        self._is_driving = self._has_abandoned = False

    @property
    def _cluster(self) -> Any:
        return self._strategy.coordinator._cluster

    def schedule(self, function: Any, args: tuple[Any, ...]) -> StepResult:
        """Waits until a step may be queued, and queues it.

        Args:
            function: A concrete function.
            args: Its arguments. Per-worker values are replaced by the value of the worker.

        Returns:
            The result, which is not complete yet.

        Raises:
            WorkerError: A step failed on its worker, or no worker is left.
            ServerLostError: A parameter server has ended.
        """
        num_workers = len(self._cluster.workers)
        per_worker = self._strategy.max_in_flight or 2
        self._wait_for(lambda: self._backlog() < per_worker * num_workers)
        number = self._scheduled
        self._scheduled += 1

        def on_complete(result: StepResult) -> None:
            with self._condition:
                if self._unfinished.pop(number, None) is not None:
                    self._last_progress = time.monotonic()
                self._condition.notify_all()

        queue = self._cluster.closure_queue
        closure = _StepClosure(function, queue._cancellation_mgr, args, on_complete)
        with self._condition:
            if not self._unfinished:
                self._last_progress = time.monotonic()
            self._unfinished[number] = closure.result
        self._translating_errors(lambda: queue.put(closure))
        return closure.result

    def join(self) -> None:
        """Waits for all steps.

        Raises:
            WorkerError: A step failed on its worker, or no worker is left.
            ServerLostError: A parameter server has ended.
        """
        self._wait_for(lambda: not self._unfinished)
        self._translating_errors(self._cluster.closure_queue.wait)

    def wait_for(self, result: StepResult) -> None:
        """Waits for one step."""
        self._wait_for(lambda: result.complete)
        if result._error is not None:
            self._translating_errors(self._cluster.closure_queue.wait)

    def _backlog(self) -> int:
        if not self._unfinished:
            return 0
        if self._strategy.max_in_flight is None:
            return len(self._unfinished)
        return self._scheduled - next(iter(self._unfinished))

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._condition:
            while not self._condition.wait_for(condition, _CHECK_SECONDS):
                self._check_workers()

    def _check_workers(self) -> None:
        waited = time.monotonic() - self._last_progress
        workers = self._cluster.workers
        if waited < self._strategy.worker_timeout or not all(worker._is_dead_with_error for worker in workers):
            return
        addresses = self._strategy.addresses("worker")
        raise WorkerError(
            message(
                f"No worker is left: all {len(workers)} have been gone for {waited:.0f} seconds.",
                hint="start them again, or raise worker_timeout.",
                workers=addresses,
            )
        )

    def _translating_errors(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            with self._condition:
                self._unfinished.clear()
            raise self._explained(error) from error

    @contextlib.contextmanager
    def naming_lost_servers(self) -> Iterator[None]:
        """Raises `ServerLostError` if the coordinator cannot access a variable because a server has ended."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            if not is_server_failure(error) and not self._strategy.lost_servers():
                raise
            raise self._server_lost() from error

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Surrounds a training, evaluation or prediction. It begins once no step of an interrupted one is running.

        Inside, this thread has its own executor, so it does not wait for a worker that hangs.
        """
        with self.naming_lost_servers(), executor_scope(new_executor(enable_async=False)):
            is_outermost = not self._is_driving
            if is_outermost and self._has_abandoned:
                self._forget_abandoned()
            self._is_driving = True
            try:
                yield
            except BaseException:
                self._has_abandoned = True
                raise
            finally:
                self._is_driving = not is_outermost

    def _forget_abandoned(self) -> None:
        """Waits for the remaining steps of an interrupted training, and ignores their results and errors."""
        queue = self._cluster.closure_queue
        self._last_progress = time.monotonic()
        self._wait_for(lambda: not self._unfinished or queue._error is not None)
        with contextlib.suppress(Exception):
            queue.wait()
        self._unfinished.clear()
        self._has_abandoned = False

    @property
    def num_unfinished(self) -> int:
        """The number of queued and running steps."""
        return len(self._unfinished)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that changes when steps complete. Raises the error of a step that has failed meanwhile."""
        queue = self._cluster.closure_queue
        self._wait_for(lambda: condition() or queue._error is not None)
        if queue._error is not None:
            self._translating_errors(queue.wait)

    def _explained(self, error: Exception) -> Exception:
        if is_server_failure(error):
            return self._server_lost()
        index = getattr(error, "worker_index", None)
        name = "A worker"
        if index is not None:
            name = f"Worker {index} ({self._strategy.addresses('worker')[index]})"
        return WorkerError(f"{name} raised {type(error).__name__}: {error}")

    def _server_lost(self) -> ServerLostError:
        lost = self._strategy.lost_servers()
        return ServerLostError(
            message(
                "A parameter server is gone, and its variables are lost.",
                hint="start the cluster again, and resume from a checkpoint (keras.callbacks.BackupAndRestore).",
                servers=lost or self._strategy.addresses("ps"),
            )
        )


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
                f"An update waits for gradients of at most {num_workers} workers.",
                1,
                num_workers,
                replicas_to_aggregate=replicas_to_aggregate,
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
        if not isinstance(resolver, LocalClusterResolver):  # Servers and workers of a local cluster do not wait for this program.
            self._have_watched("The coordinator", 0)
        # Without its own address, the coordinator serves only itself.
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
        """The number of workers of the cluster, including dead ones."""
        return len(self._jobs["worker"])

    def addresses(self, job: str) -> list[str]:
        """Returns the address ("host:port") of each task of a job, "worker" or "ps"."""
        return list(self._jobs[job])

    def lost_servers(self) -> list[str]:
        """Returns the addresses of the parameter servers that are unreachable now."""
        servers = {address: address for address in self._jobs["ps"]}
        return wait_until_reachable(servers, 1.0)

    def _have_watched(self, name: str, number: int) -> None:
        """Starts a process that watches this one as long as the strategy lives, unless a launcher watches it."""
        watcher = start_watcher(name, number)
        if watcher is not None:
            weakref.finalize(self, watcher.close)

    def _refuse_unreachable(self, limit: float) -> None:
        tasks = {f"{job} {i}": self._jobs[job][i] for job in ("worker", "ps") for i in range(len(self._jobs[job]))}
        missing = wait_until_reachable(tasks, limit)
        if missing:
            raise PeerError(
                message(
                    f"No process listens at {', '.join(f'{tasks[name]} ({name})' for name in missing)} after {limit:g} seconds.",
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
        """Cuts a batch into parts for the devices of a worker, in the form that `run` takes."""
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
        # Keras variables find their driver by this attribute where no strategy is in scope.
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
        """Makes an optimizer slot. Each part is on the server of the variable's part."""
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
            message("The cluster has an unknown job.", hint="name the jobs chief, worker, ps and evaluator.", jobs=unknown)
        )
    for job in ("chief", "evaluator"):
        if len(jobs.get(job, ())) > 1:
            raise ConfigurationError(message(f"The cluster has more than one {job}.", hint="list one.", **{job: jobs[job]}))
    if own_job == "evaluator":
        raise ConfigurationError(
            message(
                "This task is the evaluator, which does not train.",
                hint="run a tfrep.SidecarEvaluator in this process, without a strategy.",
                type="evaluator",
            )
        )
    if own_job and own_job not in list(jobs):
        raise ConfigurationError(
            message("This task's job is not in the cluster.", hint=f"its type must be {' or '.join(jobs)}.", type=own_job)
        )
    if own_job and (own_index is None or not 0 <= own_index < len(jobs[own_job])):
        raise ConfigurationError(
            message("There is no such task.", hint=f"job {own_job!r} has tasks 0 to {len(jobs[own_job]) - 1}.", index=own_index)
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
