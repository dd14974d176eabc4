"""The step that a worker runs for Keras, and the use of its result.

Covers the layout of a step's result, the values in it that are results of metrics (others, such as a bare loss, may have the
same names), and predictions of workers, each for a few batches.
"""

from __future__ import annotations

import contextlib
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.tf import PerWorkerValues
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.asynchronous.state import AsyncStep, kept_on_worker, make_exact, new_local, traced_step
from tfrep_strategy.keras_integration.asynchronous.sync_updates import SyncUpdates
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import (
    StatelessScope,
    concat,
    convert_to_np_if_not_ragged,
    pythonify_logs,
    tensorflow_trainer,
)
from tfrep_strategy.keras_integration.saving.training_state import with_inner
from tfrep_strategy.keras_integration.xla import compiled_between_collectives


class StepLayout:
    """The layout of the numbers in a step's result: metrics, counters, logs."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.counters: list[Any] = []
        self.is_numbered = False
        self.log_shapes: dict[str, tuple[int, ...]] = {}
        self.size = 0

    def describe(self, logs: dict[str, Any]) -> None:
        """Records the logs that follow the sums."""
        self.log_shapes = {name: tuple(value.shape) for name, value in logs.items()}
        self.size = sum(int(np.prod(v.shape)) for v in self.metrics + self.counters)

    def read_logs(self, values: np.ndarray) -> dict[str, Any]:
        """Reads the logs of a step from its result."""
        logs, start = {}, self.size
        for name, shape in self.log_shapes.items():
            size = int(np.prod(shape))
            logs[name] = values[start : start + size].reshape(shape) if shape else float(values[start])
            start += size
        return logs

    def split(self, totals: np.ndarray) -> list[np.ndarray]:
        """Cuts the sums into the values of the variables."""
        values, start = [], 0
        for variable in self.metrics + self.counters:
            size = int(np.prod(variable.shape))
            values.append(totals[start : start + size].reshape(tuple(variable.shape)))
            start += size
        return values


class Result:
    """The result of a metric in a step: the metric, and a copy of its state, since the step may update it again."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.state = [tf.convert_to_tensor(variable.value) for variable in metric.variables]


RecordedResults = dict[int, tuple[tf.Tensor, Result | None, int]]
"""The numbers that metrics have returned, by their ids: each with its `Result` and its place in the result.

Numbers that need no further work have no `Result`.
"""

recorded: Setting[RecordedResults | None] = Setting(None)
"""The results that metrics have returned to the step that this thread traces; None if they are not recorded."""


@contextlib.contextmanager
def recording_results(metrics: Iterable[Any]) -> Iterator[RecordedResults]:
    """Records the results of metrics in the step that this thread traces, until the block ends."""
    for metric in metrics:
        KerasDriver.metric_result.install_in(type(metric))
    noted: RecordedResults = {}
    with recorded.to(noted):
        yield noted


class MetricResults(KerasDriver):
    """Results of metrics."""

    def metric_result(self, original: Any, metric: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Records the tensors that are results of a metric. Results of metrics inside it are not recorded."""
        noted = recorded.value
        with recorded.to(None):
            value = original(metric, *args, **kwargs)
            if noted is not None:
                value = self.noted(noted, metric, value)
        return value

    def noted(self, noted: RecordedResults, metric: Any, value: Any) -> Any:
        """Records the result of a metric, and returns the value for the step."""
        result = Result(metric)
        for index, tensor in enumerate(tf.nest.flatten(value)):
            # A reference to the tensor keeps its id from being reused.
            noted[id(tensor)] = tensor, result, index
        return value


_SHOW_SECONDS = 0.25


class StepFunction:
    """Replaces Keras's compiled step: a call hands one step to a worker.

    The metrics of a step stay on the worker. Their increments travel with the step's result. The coordinator adds them when the
    step is complete, so a step that was started twice counts once.

    Args:
        model: The model.
        step_function: `model.train_step`, `test_step` or `predict_step`.
        strategy: The strategy of the model.
        updates: Whether the step changes the model.
        is_watched: Whether the logs are read while an epoch runs.
    """

    def __init__(
        self, model: Any, step_function: Callable[[Any], Any], strategy: Any, updates: bool, is_watched: Setting[bool]
    ) -> None:
        if model.run_eagerly:
            raise ConfigurationError(
                message("Workers run compiled steps only.", hint="compile with run_eagerly=False.", run_eagerly=True)
            )
        if model.jit_compile:
            step_function = compiled_between_collectives(step_function)
        self._model = weakref.ref(model)
        self._step_function = model._autoconvert_optionals(step_function)
        self.strategy = strategy
        self._runner = strategy.extended.step_runner
        self._updates = updates
        self._traced: dict[Any, Any] = {}
        self._arguments: dict[str, Any] = {}
        self._own_logs: set[str] = set()
        """Logs that are not results of metrics, though they may have the names of metrics."""
        self._pending: list[Any] = []
        self._is_watched = is_watched
        self._sync = SyncUpdates(strategy) if updates and strategy.replicas_to_aggregate else None
        self._is_drained, self._out_of_data = True, False
        self._reset()

    @property
    def model(self) -> Any:
        """The model of the steps."""
        return self._model()

    def _reset(self) -> None:
        self._totals: np.ndarray | None = None
        self._logs: dict[str, float] = {}
        self._handed_out: dict[str, float] = {}
        """The result of the last call. It gets the logs of the epoch when all steps are complete."""
        self._shown: dict[str, float] = {}
        self._shown_at, self._retried = 0.0, False
        self._base: dict[int, np.ndarray] = {}
        """The value of each sum before the first step. Keras before 3.15 keeps the metrics of the last single batch."""

    def begin(self) -> None:
        """Forgets an interrupted training or evaluation. None of its steps is running."""
        if self._is_drained:
            return
        self._pending, self._is_drained, self._out_of_data = [], True, False
        self._reset()
        if self._sync is not None:
            # Accumulators may hold gradients of abandoned steps, and the traced programs hold their names.
            self._sync.close()
            self._sync = SyncUpdates(self.strategy)
            self._traced.clear()

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Hands the next step to a worker.

        Returns:
            The logs of the completed steps. They become those of the epoch when all steps are complete. For a single batch, as from
            `train_on_batch`, the logs of its step.
        """
        if isinstance(iterator, types.GeneratorType):
            self._hand_out(self._next_batches(iterator, 1))
            self.drain()
            return self.logs
        count = self.model.steps_per_execution
        on_worker = isinstance(iterator, PerWorkerValues)
        data = iterator if on_worker else self._next_batches(iterator, count)
        if self._sync is None:
            self._hand_out(data)
        else:
            # Each gradient belongs to its own update.
            for batches in [data] * count if on_worker else [(batch,) for batch in data]:
                self._hand_out(batches)
        self._handed_out = dict(self._current_logs())
        return self._handed_out

    def _hand_out(self, data: Any) -> None:
        self._is_drained = False
        update = 0 if self._sync is None else self._sync.wait_for_turn()
        self._collect()
        if self._out_of_data:
            self.drain()
            self.take_out_of_data()
            raise StopIteration
        concrete, layout = self._trace(data)
        for variable in layout.metrics + layout.counters:
            if id(variable) not in self._base:
                self._base[id(variable)] = variable.numpy()
        arguments: tuple[Any, ...] = (data,)
        if layout.is_numbered:
            arguments = (data, tf.constant([self.strategy.extended.next_step_number(), update], tf.int64))
        result = self._runner.schedule(concrete, arguments)
        self._pending.append((result, layout))
        if self._sync is not None:
            self._sync.add(result)

    def _next_batches(self, iterator: Any, count: int) -> tuple[Any, ...]:
        batches: list[Any] = []
        for batch in iterator:
            batches.append(as_tensors(batch))
            if len(batches) == count:
                break
        if not batches:
            self.drain()
            raise StopIteration
        return tuple(batches)

    def drain(self) -> None:
        """Waits for all steps, and writes the metrics into the model."""
        if self._is_drained:
            return
        self._runner.join()
        if self._sync is not None:
            self._sync.finish()
        self._collect()
        if self._totals is not None:
            self._write(self._layout.metrics)
        if self._retried and self._updates and self._totals is not None:
            # A worker that died may have added to a counter on the server before another worker repeated the step.
            self._write(self._layout.counters)
        logs, shown, handed_out = self._logs, self._read_metrics(), self._handed_out
        self._reset()
        self._is_drained = True
        self._logs = self._with_metrics(logs, shown)
        handed_out.clear()
        handed_out.update(self._logs)

    def take_out_of_data(self) -> bool:
        """Returns whether a worker had no data for a completed step, and resets this."""
        out_of_data, self._out_of_data = self._out_of_data, False
        return out_of_data

    @property
    def logs(self) -> dict[str, float]:
        """The logs of an epoch whose steps are complete."""
        return dict(self._logs)

    def _collect(self) -> None:
        waiting = []
        for result, layout in self._pending:
            if not result.complete:
                waiting.append((result, layout))
                continue
            self._retried |= result.attempts > 1
            if result.out_of_data:
                self._out_of_data = True
            elif result.has_value:
                values = result.get().numpy()
                self._layout = layout
                self._logs = layout.read_logs(values)
                totals = values[: layout.size]
                self._totals = totals if self._totals is None else self._totals + totals
        self._pending = waiting

    def _sums(self) -> dict[int, np.ndarray]:
        """Returns the values of metrics and counters after the completed steps, in their own dtypes."""
        added = self._layout.split(self._totals)
        return {
            id(variable): (self._base[id(variable)] + each).astype(tf.as_dtype(variable._dtype).as_numpy_dtype)
            for variable, each in zip(self._layout.metrics + self._layout.counters, added, strict=True)
        }

    def _write(self, variables: Sequence[Any]) -> None:
        sums = self._sums()
        for variable in variables:
            variable.assign(sums[id(variable)])

    def _read_metrics(self) -> dict[str, float]:
        """Computes the metrics of the completed steps, from sums on the coordinator."""
        if self._totals is None:
            return {}
        sums = self._sums()
        values = [(variable, tf.constant(sums[id(variable)], variable._dtype)) for variable in self._layout.metrics]
        with StatelessScope(state_mapping=values):
            return pythonify_logs(self.model.get_metrics_result())

    def _with_metrics(self, logs: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """Replaces the results of metrics in the logs of one step by the results of all steps."""
        return {name: value if name in self._own_logs else metrics.get(name, value) for name, value in logs.items()}

    def _current_logs(self) -> dict[str, float]:
        now = time.monotonic()
        if self._is_watched.value and self._totals is not None and now - self._shown_at > _SHOW_SECONDS:
            self._shown = self._with_metrics(self._logs, self._read_metrics())
            self._shown_at = time.monotonic()
        return self._shown

    def _trace(self, data: Any) -> tuple[Any, Any]:
        on_worker = isinstance(data, PerWorkerValues)
        argument = data._values[0]._type_spec if on_worker else tf.nest.map_structure(_relaxed_spec, data)
        opened = argument if on_worker else self._open(argument)
        try:
            return self._traced_for(opened, on_worker)
        except (TypeError, ValueError):
            if opened == argument:
                raise
        self._arguments[_kinds_of(argument)] = None  # A step may need the length of sequences.
        return self._traced_for(argument, on_worker)

    def _traced_for(self, argument: Any, on_worker: bool) -> tuple[Any, StepLayout]:
        key = str(argument), self.model.steps_per_execution
        if key not in self._traced:
            known = len(self._metric_variables())
            traced = self._traced_anew(argument, on_worker)
            if len(self._metric_variables()) > known:  # The step has made metrics that the layout lacks.
                traced = self._traced_anew(argument, on_worker)
            self._traced[key] = traced
        return self._traced[key]

    def _open(self, argument: Any) -> Any:
        """Leaves open the dimensions that have differed between batches, so that other lengths need no new trace."""
        kind = _kinds_of(argument)
        before = self._arguments.get(kind, argument)
        if before is None:
            return argument
        self._arguments[kind] = tf.nest.map_structure(
            lambda one, other: one if one == other else one.most_specific_common_supertype([other]) or other, before, argument
        )
        return self._arguments[kind]

    def _traced_anew(self, argument: Any, on_worker: bool) -> tuple[Any, StepLayout]:
        layout = StepLayout()
        # Each argument costs a message from the coordinator.
        layout.is_numbered = self._sync is not None or _draws_random_numbers(self.model)
        arguments = (argument, tf.TensorSpec([2], tf.int64)) if layout.is_numbered else (argument,)
        function = tf.function(lambda data, *number: self._steps(data, on_worker, layout, *number), autograph=False)
        with self.strategy.scope(), self.strategy.extended.tracing():
            concrete = function.get_concrete_function(*arguments)
        return concrete, layout

    def _metric_variables(self) -> list[Any]:
        return _distinct(v for metric in self.model.metrics for v in metric.variables)

    def _steps(self, data: Any, on_worker: bool, layout: StepLayout, number: tf.Tensor | None = None) -> tf.Tensor:
        model = self.model
        for metric in _flat(model.metrics):
            make_exact(metric)
        layout.metrics = self._metric_variables()
        layout.counters = _counters(model) if self._updates and self._sync is None else []
        step = AsyncStep() if number is None else AsyncStep(number[0], self._sync, number[1])
        count = len(data) if not on_worker else model.steps_per_execution if self._sync is None else 1
        one_step = tf.function(lambda batch: self._one_step(batch), autograph=False) if count > 1 else self._one_step
        batches = _all_or_none([next(data) for _ in range(count)]) if on_worker else data
        with kept_on_worker(layout.metrics) as metrics, traced_step.to(step):
            counters = [new_local(variable) for variable in layout.counters]
            step.added = {id(v): local for v, local in zip(layout.counters, counters, strict=True)}
            for index, batch in enumerate(batches):
                step.number = None if number is None else number[0] * count + index
                logs = one_step(batch)
            sums = [tf.reshape(tf.cast(v.read_value(), tf.float64), [-1]) for v in metrics + counters]
        logs = {name: tf.convert_to_tensor(value) for name, value in logs.items()} if isinstance(logs, dict) else {}
        layout.describe(logs)
        return tf.concat([*sums, *(tf.reshape(tf.cast(value, tf.float64), [-1]) for value in logs.values())], 0)

    def _one_step(self, batch: Any) -> Any:
        def step(batch: Any) -> Any:
            # The batch must be read before anything is counted, since the data may have ended.
            leaves = tf.nest.flatten(batch, expand_composites=True)
            with tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)]):
                with recording_results(self.model.metrics) as results:
                    logs = self._step_function(batch)
                if isinstance(logs, dict):
                    logs = _flat_logs(logs)
                    self._own_logs = {name for name, value in logs.items() if id(value) not in results}
                return logs

        return run_on_worker(self.strategy, step, batch, "auto")


def run_on_worker(strategy: Any, step_function: Any, batch: Any, reduction: str) -> Any:
    """Runs a step on the devices of a worker. Each device gets its part of the batch."""
    outputs = strategy.run(step_function, args=(strategy.extended.cut_for_replicas(batch),))
    return tensorflow_trainer.reduce_per_replica(outputs, strategy, reduction)


def _all_or_none(batches: list[Any]) -> list[Any]:
    """Makes each batch depend on all of them: if the data ends early, none of their steps runs."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    with tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)]):
        leaves = [tf.identity(leaf) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(batches, leaves, expand_composites=True)


def _draws_random_numbers(model: Any) -> bool:
    return any(variable.name == "seed_generator_state" for variable in model.variables)


def _flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested logs as Keras does."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat_logs(value) if isinstance(value, dict) else {name: value}
    return flat


def _flat(metrics: Any) -> Iterator[Any]:
    for metric in metrics:
        yield metric
        yield from _flat(getattr(metric, "metrics", metric._metrics))


def _distinct(variables: Any) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _counters(model: Any) -> list[Any]:
    """Returns the step counters of the optimizer and of optimizers inside it."""
    return _distinct(optimizer._iterations for optimizer in with_inner(getattr(model, "optimizer", None)))


def as_tensors(batch: Any) -> Any:
    """Converts the leaves of a batch to tensors, except None."""
    return tf.nest.map_structure(lambda v: v if v is None or _is_tensor(v) else tf.convert_to_tensor(v), batch)


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, tf.experimental.Optional)


def _kinds_of(argument: Any) -> str:
    return str(tf.nest.map_structure(_kind_of, argument))


def _kind_of(spec: Any) -> tuple[Any, ...]:
    rank = getattr(getattr(spec, "shape", None), "rank", None)
    return type(spec).__name__, getattr(spec, "dtype", None), getattr(spec, "ragged_rank", None), rank


def _relaxed_spec(value: Any) -> Any:
    """Returns a specification with an open batch size, so that a smaller last batch needs no new trace."""
    if value is None:
        return None
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return spec


class PredictFunction(StepFunction):
    """Replaces Keras's compiled prediction; a call returns a result that may be pending."""

    def __call__(self, batches: Any) -> Any:
        data = tuple(as_tensors(batch) for batch in batches)
        concrete, layout = self._trace(data)
        arguments = (data, tf.zeros([2], tf.int64)) if layout.is_numbered else (data,)
        return Prediction(self.strategy, self._runner.schedule(concrete, arguments))

    def drain(self) -> None:
        """Does nothing: callers wait for the predictions that they need."""

    def _steps(self, data: Any, on_worker: bool, layout: StepLayout, number: tf.Tensor | None = None) -> Any:
        outputs = [run_on_worker(self.strategy, self._step_function, batch, "concat") for batch in data]
        return keras.tree.map_structure(lambda *parts: parts[0] if len(parts) == 1 else concat(parts), *outputs)


class Prediction:
    """The outputs of a step that may not be complete.

    Args:
        strategy: The strategy of the model.
        result: The coordinator's result of the step.
    """

    def __init__(self, strategy: Any, result: Any) -> None:
        self.strategy, self._result = strategy, result

    def get(self) -> Any:
        """Waits for the outputs, and returns them."""
        self.strategy.extended.step_runner.wait_for(self._result)
        return self._result.get()

    def numpy(self) -> Any:
        """Waits for the outputs, and returns them as Keras does those of a batch."""
        return keras.tree.map_structure(convert_to_np_if_not_ragged, self.get())
