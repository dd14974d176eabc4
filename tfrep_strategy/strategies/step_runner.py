"""Schedules steps on free workers, and collects their results and errors."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import (
    Closure,
    RemoteValueImpl,
    context,
    executor_scope,
    is_server_failure,
    new_executor,
)
from tfrep_strategy.errors import ServerLostError, WorkerError, message

_CHECK_SECONDS = 0.5


class StepResult(RemoteValueImpl):
    """The result of one scheduled step.

    Unlike TensorFlow's remote values, it is complete only when its value is on the coordinator. If the worker dies before,
    another worker repeats the step.

    Attributes:
        worker: Number of the worker that runs it, or ran it last.
        attempts: How often it was begun.
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
        # A thread that leaves the default executor, which all threads share, waits for all workers, also for one that hangs.
        context().executor = worker.executor
        self.result.worker = worker.worker_index
        self.result.attempts += 1
        try:
            super().execute_on(worker)
            self.result.get()
            # Frees the values on the worker now. Later the worker may hang, and freeing them would wait.
            self.result._values = None
        except tf.errors.OutOfRangeError:
            # Not a failure: the steps of the other workers go on.
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
        """Surrounds a training, an evaluation or a prediction. It begins when no step of an interrupted one runs any more.

        Inside, this thread has an executor of its own, and does not wait for a worker that hangs.
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
        """How many steps are queued or running."""
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
