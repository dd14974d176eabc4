"""Train, test and predict functions that trace each step once, as one device's, and partition it; and their logs.

`strategy.run` does the partitioning. If replicas have local batches that do not form a global batch, each replica runs the step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.step import KerasExtended, KerasStrategy, KnownRows, Shards, current_share
from tfrep_strategy.errors import PeerError
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.xla import compiled_at_once


class Logs(SynchronousBase):
    """Logs of steps, and results of metrics."""

    def metrics_result_or_logs(self, original: Any, model: Any, logs: Any) -> Any:
        """Sums the state of all metrics over the processes with one collective."""
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        with self.strategy.extended.summed_at_once(variables):
            return original(model, logs)


_with_own_logs: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""For each model, the phases ("train", "test") whose steps on replicas return more than the results of its metrics."""

_one_device: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""For each model, the phases whose last steps were one-device steps, so that their logs are those of the global batch."""


def note_one_device(model: Any, phase: str, is_one_device: bool) -> None:
    """Records whether the steps that a model has just run were one-device steps."""
    phases = _one_device.setdefault(model, set())
    (phases.add if is_one_device else phases.discard)(phase)


def logs_of_all(model: Any, phase: str, logs: Any) -> Any:
    """Returns the logs of a step over all replicas. Every process must call it."""
    if phase in _one_device.get(model, ()) or phase in _with_own_logs.get(model, ()):
        return logs
    return model._get_metrics_result_or_logs(logs)


def with_global_logs(model: Any, phase: str, strategy: KerasStrategy, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the step of a replica, so that floating scalars in its logs are means over the examples of all replicas.

    Results of metrics are read over all replicas on demand.
    """
    own_logs = _with_own_logs.setdefault(model, set())

    def step_with_global_logs(batch: Any) -> Any:
        logs = step_function(batch)
        own_logs.discard(phase)
        if isinstance(logs, dict) and set(logs) == set(model.get_metrics_result()):
            return logs
        own_logs.add(phase)
        share = current_share()
        assert share is not None
        flat = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
        places = [i for i, value in enumerate(flat) if value.dtype.is_floating and not value.shape.rank]
        summed = strategy.extended.sum_over_replicas([share.weighted(flat[i]) for i in places])
        known = dict(zip(places, summed, strict=True))
        return tf.nest.pack_sequence_as(logs, [known.get(i, value) for i, value in enumerate(flat)])

    return step_with_global_logs


class OneDeviceSteps:
    """Runs steps as one-device steps, if there is a global batch.

    Args:
        extended: The `extended` of the strategy.
        model: The model.
        phase: "train" or "test".
        make: Makes a function that runs steps, each in one call of `strategy.run`.
        by_replicas: Runs steps in which replicas have local batches that do not form a global batch.
        builds: Whether the first step builds the model.
        compiled: Whether XLA compiles the operations between collectives.
    """

    def __init__(
        self,
        extended: KerasExtended,
        model: Any,
        phase: str,
        make: Callable[[], Callable[[Any], Any]],
        by_replicas: Callable[[Any], Any],
        builds: bool,
        compiled: bool,
    ) -> None:
        self._extended, self._make, self._by_replicas, self._builds = extended, make, by_replicas, builds
        self._of = model, phase
        self._compiled, self._in_its_way = compiled, compiled_at_once if compiled else contextlib.nullcontext
        self._ways: dict[KnownRows, tuple[Callable[[Any], Any], Any]] = {}
        """For each kind of batch: the function that runs its steps, and the partitioned steps."""
        self._traced: set[KnownRows] = set()
        self._needs_total = builds  # A layer that was built for any number of rows cannot be built again.

    def __call__(self, batches: Any) -> Any:
        known = batches.known_rows if self._needs_total else batches.known_rows._replace(total=None)
        note_one_device(*self._of, not known.are_apart)
        if known.are_apart:
            return self._by_replicas(batches)
        if known not in self._ways:
            self._ways[known] = self._make(), self._extended.new_partitioned_steps(self._builds, known, *self._of)
        run, steps = self._ways[known]
        try:
            with self._extended.partitioned_by(steps, self._compiled), self._in_its_way():
                result = run(batches)
        except tf.errors.OutOfRangeError:
            steps.run_without_batch()
            raise
        except tf.errors.OpError as error:
            steps.tell_lines(error)
            raise
        except (PeerError, StopIteration):
            raise
        except Exception:
            if known in self._traced or known == batches.known_rows:
                raise
            self._needs_total = True  # A step may need the number of rows, as in `tf.zeros([x.shape[0], 8])`.
            return self(batches)
        self._traced.add(known)
        return result


class WholeBatches(list[Any]):
    """Whole batches as `Shards`.

    Args:
        extended: The `extended` of the strategy, which cuts the batches.
        batches: The batches.

    Attributes:
        known_rows: What is known about their rows.
    """

    def __init__(self, extended: KerasExtended, batches: Iterable[Any]) -> None:
        given = list(batches)
        super().__init__(map(extended.shard, given))
        self.known_rows = KnownRows.common(map(extended.known_rows, given))


_APART = KnownRows(are_apart=True)
"""Batches that each replica has for itself; also those of a single replica."""


class PredictFunction:
    """Predicts the rows of batches, with one-device steps if possible, else on replicas.

    Args:
        driver: The driver of the strategy.
        model: The model.
        make: Makes Keras's function again.
        run: Keras's function.
    """

    takes_whole_batches = True

    def __init__(self, driver: Any, model: Any, make: Callable[..., Any], run: Any) -> None:
        self._driver, self._model, self._make = driver, model, make
        self._builds = not model.built
        self._needs_total = self._builds  # A layer that was built for any number of rows cannot be built again.
        self._ways = {_APART: (run, None)}
        """For each kind of batch: the function that runs its steps, and the partitioned steps, if any."""
        self._traced: set[KnownRows] = set()

    def __call__(self, batches: Any) -> Any:
        extended = self._driver.strategy.extended
        self._driver.check_first_batch()
        with extended.watching_peers():
            known = _APART
            if self._driver.has_several:
                if not all(isinstance(batch, Shards) for batch in batches):
                    batches = WholeBatches(extended, batches)
                known = (batches if isinstance(batches, WholeBatches) else self._driver.read_last).known_rows
            return extended.kept_outputs(self._predicted(list(batches), known))

    def _predicted(self, batches: list[Any], known: KnownRows) -> Any:
        way = known if self._needs_total else known._replace(total=None)
        if way.are_apart:
            way = _APART
        extended = self._driver.strategy.extended
        if way not in self._ways:
            self._ways[way] = self._made(), extended.new_partitioned_steps(self._builds, way, self._model, "predict")
        run, steps = self._ways[way]
        try:
            with extended.partitioned_by(steps, bool(self._model.jit_compile)):
                if way not in self._traced and self._model.built and hasattr(run, "get_concrete_function"):
                    # Otherwise it would be traced for the size of the first batch, and again for a smaller last one.
                    run.get_concrete_function(tf.nest.map_structure(_of_any_size, batches))
                outputs = run(batches)
        except tf.errors.OpError as error:
            if steps is not None:
                steps.tell_lines(error)
            raise
        except Exception:
            if way in self._traced or known == way or way.are_apart:
                raise
            self._needs_total = True  # A model may need the number of rows, as on one device.
            return self._predicted(batches, known)
        self._traced.add(way)
        return outputs

    def _made(self) -> Any:
        run = self._make(force=True)
        self._model.predict_function = self
        return run


def _of_any_size(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
