"""Callbacks for Keras's `fit`, under every strategy and under none, and the learning rate of larger batches.

The learning rate is scaled with the number of replicas, and reached step by step. Source: Goyal et al., Accurate, Large Minibatch
SGD: Training ImageNet in 1 Hour, arXiv:1706.02677.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.data.step_clock import Counts, StepClock, counting
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.keras_integration.finding import driver_of_model
from tfrep_strategy.training.sharded_checkpoint import CheckpointProgress, ShardedCheckpoint

_PERCENTILES = (50, 90, 99)


class Throughput(keras.callbacks.Callback):
    """Measures the throughput of training, and adds it to the logs of each epoch.

    Callbacks after this one in the list, such as `CSVLogger` and `TensorBoard`, and `History` get it. The time does
    not include validation, nor the first step of a `fit`, which is compiled.

    * `examples_per_second`, `steps_per_second`: of all replicas together.
    * `step_ms_p50`, `step_ms_p90`, `step_ms_p99`: percentiles of the milliseconds between the starts of two steps.
    * `data_wait`: the share of the time, from 0 to 1, in which a step waited for its batch.
    * `collective_wait`: the share in which a process had its own gradients and waited for the global ones.

    Operations in the compiled step measure the two waits. An unknown wait is left out: both under parameter servers,
    where steps overlap; `collective_wait` on GPUs, whose operations run ahead of the host, and in one process. With a GPU
    `data_wait` is the time in which the host waited. The GPU may have been busy with earlier steps meanwhile, so it is an upper
    bound. Each process reports its own waits. The model keeps the operations after `fit`.

    Under parameter servers a step takes longer than the time from one start to the next, because workers overlap. There the
    examples are those that the metric `loss` has counted. Without that metric they are unknown (NaN).

    Attributes:
        epochs: The logs of each epoch so far, as dictionaries.

    Example:
        >>> throughput = tfrep.callbacks.Throughput()
        >>> history = make_model().fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[throughput])
        >>> history.history["examples_per_second"][1] > 0, throughput.epochs[1]["data_wait"] < 1
        (True, True)
    """

    supports_remote_logs = True
    verbose = 0
    """Under parameter servers, logs of single steps are not computed for a callback that shows none."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[str, float]] = []
        self._in_epoch = False

    def reading(self, data: Iterable[Any]) -> Iterator[Any]:
        """Reads the batches of a custom training loop, and measures the loop as an epoch.

        The loop is measured from its second step on, since the first one is traced. Each process reads all of a data set
        that is not distributed. If `data_wait` is large, give `strategy.run` the batches of
        `strategy.experimental_distribute_dataset`. The time includes a step of a GPU only if the loop uses its results.

        Args:
            data: The data of the loop: a data set, distributed or not, or any iterable of batches.

        Yields:
            Its batches. Afterwards `epochs` has the logs, except `collective_wait`.

        Example:
            >>> throughput = tfrep.callbacks.Throughput()
            >>> for batch in throughput.reading(tf.data.Dataset.range(12).batch(4)):
            ...     total = int(tf.reduce_sum(batch))
            >>> sorted(throughput.epochs[0])[:2], throughput.epochs[0]["data_wait"] < 1
            (['data_wait', 'examples_per_second'], True)
        """
        starts, waits, rows = [], [], []
        batches = iter(data)
        try:
            asked = time.perf_counter()
            for batch in batches:
                starts.append(time.perf_counter())
                waits.append(starts[-1] - asked)
                rows.append(_rows(batch))
                yield batch
                asked = time.perf_counter()
            starts.append(time.perf_counter())
        finally:  # If the loop ends early, the end of its last step is unknown.
            times = np.diff(starts[1:])
            seconds = float(times.sum()) or math.nan
            percentiles = np.percentile(times, _PERCENTILES) if len(times) else [math.nan] * len(_PERCENTILES)
            logs = {
                "examples_per_second": sum(rows[1 : len(starts) - 1]) / seconds,
                "steps_per_second": len(times) / seconds,
                "data_wait": sum(waits[2:]) / seconds,
            }
            logs |= {f"step_ms_p{p}": 1000 * float(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)}
            self.epochs.append(logs)

    # A training.

    def on_train_begin(self, logs: Any = None) -> None:
        strategy, driver = self.model.distribute_strategy, driver_of_model(self.model)
        self._on_workers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
        if not isinstance(self.model.train_function, _MeasuredFunction):
            if not self._on_workers:
                # A function that was traced before has no operations that measure.
                self.model.make_train_function(force=True)
            self.model.train_function = _MeasuredFunction(self.model.train_function, None if self._on_workers else StepClock())
        self._function: _MeasuredFunction = self.model.train_function
        is_alone = self._on_workers or strategy.num_replicas_in_sync == 1
        devices = () if is_alone else strategy.extended.worker_devices
        # TensorFlow's strategies cut batches before they are read.
        self._part_read = 1.0 if is_alone or driver is not None else len(devices) / strategy.num_replicas_in_sync
        self._knows_collectives = (
            driver is not None
            and 0 < len(devices) < strategy.num_replicas_in_sync
            and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)
        )
        self._calls_before, self._compiles = self._function.calls, True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_epoch, self._first_call = True, self._function.calls
        self._starts: list[float] = []
        self._batches: list[int] = []
        self._begun = self._mark(time.perf_counter())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self._compiles and self._function.calls > self._calls_before:
            self._compiles = False
            self._starts, self._batches = [], []
            self._begun = self._mark(now)
        self._starts.append(now)
        self._batches.append(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()
        if logs is not None:
            logs.update(self.epochs[-1])

    def _end_epoch(self) -> None:
        if not self._in_epoch:  # Validation has ended it already, or runs alone.
            return
        self._in_epoch = False
        begun = self._begun
        if self._compiles:  # The only call so far: the epoch has no measured step.
            self._compiles, begun = False, begun._replace(time=math.nan)
        returned = self._function.returned_at
        has_returned = bool(self._starts) and returned > self._starts[-1]  # Otherwise the call found the end of the data.
        self.epochs.append(self._logs(begun, time.perf_counter(), [returned] if has_returned else []))

    # Measurements since a mark.

    def _mark(self, now: float) -> _Mark:
        return _Mark(now, len(self._starts), self._function.calls, self._function.counts())

    def _logs(self, since: _Mark, now: float, last_end: list[float]) -> dict[str, float]:
        """Returns the logs of the steps since a mark.

        Args:
            since: The mark.
            now: The time.
            last_end: The time at which the last step has ended, if it has.
        """
        seconds, counts = now - since.time, self._function.counts()
        if self._on_workers:
            steps = float((self._function.calls - since.calls) * self.model.steps_per_execution)
            examples = steps * self._examples_per_step()
        else:
            steps = counts.steps - since.counts.steps
            examples = (counts.examples - since.counts.examples) / self._part_read
        logs = {"examples_per_second": examples / seconds, "steps_per_second": steps / seconds}
        times = self._step_times(since.first, last_end, steps) if seconds > 0 else []
        percentiles = np.percentile(times, _PERCENTILES) if len(times) else [math.nan] * len(_PERCENTILES)
        logs |= {f"step_ms_p{p}": 1000 * float(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)}
        if not self._on_workers:
            logs["data_wait"] = (counts.data_seconds - since.counts.data_seconds) / seconds
        if self._knows_collectives:
            logs["collective_wait"] = (counts.collective_seconds - since.counts.collective_seconds) / seconds
        return logs

    def _step_times(self, first: int, last_end: list[float], steps: float) -> Any:
        """Returns the seconds of a step, for each call since the one with number `first`."""
        numbers = [float(batch) for batch in self._batches[first:]]
        if last_end:
            numbers.append(numbers[0] + steps)
        return np.diff([*self._starts[first:], *last_end]) / np.maximum(np.diff(numbers), 1)

    def _examples_per_step(self) -> float:
        calls = self._function.calls - self._first_call
        seen = [float(m.count) for m in self.model.metrics if m.name == "loss" and isinstance(m, keras.metrics.Mean)]
        if not calls or not seen or not seen[0]:
            return math.nan
        return seen[0] / (calls * self.model.steps_per_execution)


def _rows(batch: Any) -> int:
    """Returns the number of rows of a batch; of a distributed one, over all replicas, if each has as many as here."""
    first = tf.nest.flatten(batch)[0]
    local = tf.distribute.get_strategy().experimental_local_results(first)
    rows = sum(int(x.shape[0]) if x.shape.rank else 1 for x in map(tf.convert_to_tensor, local))
    return rows if len(local) == 1 and local[0] is first else rows * tf.distribute.get_strategy().num_replicas_in_sync // len(local)


class _Mark(NamedTuple):
    """A moment of an epoch.

    Attributes:
        time: The time in seconds.
        first: The number of the next call within the epoch.
        calls: Number of calls that had returned.
        counts: The totals of the clock.
    """

    time: float
    first: int
    calls: int
    counts: Counts


class _MeasuredFunction:
    """The train function of a model, with a clock.

    Args:
        run: Keras's function.
        clock: Counts the batches that it reads. None for workers of parameter servers.

    Attributes:
        calls: Number of calls that have returned.
        returned_at: The time when the last call returned.
    """

    def __init__(self, run: Any, clock: StepClock | None) -> None:
        self._run, self._clock = run, clock
        self.calls, self.returned_at = 0, 0.0

    def __call__(self, iterator: Any) -> Any:
        if self._clock is None or not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            result = self._run(iterator)  # `train_on_batch` passes its batch.
        else:
            with counting.to(self._clock):
                result = self._run(self._clock.watching(iterator))
        self.calls += 1
        self.returned_at = time.perf_counter()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def counts(self) -> Counts:
        """Returns the totals of the clock."""
        return Counts(0.0, 0.0, 0.0, 0.0) if self._clock is None else self._clock.read()


_RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}


def scale_learning_rate(learning_rate: float, replicas: int, rule: str = "linear") -> float:
    """Scales a learning rate for a global batch that is `replicas` times as large.

    Args:
        learning_rate: A suitable learning rate for the batch of one replica.
        replicas: The growth of the global batch. It is 1 if the global batch stays as it is on one device.
        rule: `"linear"` (Goyal et al. 2017; for SGD), or `"sqrt"` (for Adam and similar optimizers).

    Returns:
        The learning rate for the global batch.

    Raises:
        ConfigurationError: The learning rate is not a positive number; a `LearningRateSchedule` is not a number. There is no
            such rule, or no such number of replicas.

    Example:
        >>> scale_learning_rate(0.125, 8), scale_learning_rate(0.125, 16, rule="sqrt")
        (1.0, 0.5)
    """
    _check_learning_rate(learning_rate)
    check_count("There is at least one replica.", replicas=replicas)
    if rule not in _RULES:
        raise ConfigurationError(message("There is no such rule.", hint='use "linear" or "sqrt".', rule=rule))
    return float(learning_rate) * _RULES[rule](replicas)


class LearningRateWarmup(keras.callbacks.LearningRateScheduler):
    """Raises the learning rate in even steps, from one replica's rate to the rate of all, during the first epochs.

    Step `b` of `n` in epoch `e`, counted from 0, has the learning rate
    `learning_rate * (1 + (e + (b + 1) / n) / epochs * (replicas - 1)) / replicas`. It depends on nothing else, so a resumed run
    (`initial_epoch`, `BackupAndRestore`) has the learning rates of one that was not interrupted. After the warm-up the
    callback changes nothing. The logs of an epoch have its last learning rate.

    Args:
        learning_rate: The learning rate at the end of the warm-up. It usually comes from `scale_learning_rate`.
        epochs: The length of the warm-up.
        replicas: The warm-up begins at `learning_rate / replicas`. Default: the number of replicas of the model's strategy; under
            parameter servers, of all workers.
        steps_per_epoch: Needed if `fit` does not know the length of an epoch.
        momentum_correction: Whether momentum follows the learning rate. The velocity of `SGD` and `RMSprop` contains the learning
            rates of earlier steps. At each change it is multiplied by the ratio of the new rate to the old one (Goyal et al.,
            section 3).

    Raises:
        ConfigurationError: A setting cannot be used. When training begins: the optimizer has a `LearningRateSchedule`, or
            momentum would be corrected while the workers of parameter servers change it. In the first step: the length of an
            epoch is unknown.

    Example:
        >>> learning_rate = tfrep.callbacks.scale_learning_rate(0.1, replicas=4)
        >>> warmup = tfrep.callbacks.LearningRateWarmup(learning_rate, epochs=2, replicas=4)
        >>> history = make_model().fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[warmup])
        >>> [round(rate, 3) for rate in history.history["learning_rate"]]
        [0.25, 0.4, 0.4]
    """

    supports_remote_logs = True

    def __init__(
        self,
        learning_rate: float,
        *,
        epochs: float = 5,
        replicas: int | None = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__(self._learning_rate_at)
        _check_learning_rate(learning_rate)
        if isinstance(epochs, bool) or not isinstance(epochs, (int, float)) or not epochs > 0:
            raise ConfigurationError(
                message("A warm-up lasts a positive number of epochs.", hint="use a positive number.", epochs=epochs)
            )
        if replicas is not None:
            check_count("There is at least one replica.", replicas=replicas)
        if steps_per_epoch is not None:
            check_count("An epoch has at least one step.", steps_per_epoch=steps_per_epoch)
        self.learning_rate = float(learning_rate)
        self.epochs, self.replicas, self.steps_per_epoch = epochs, replicas, steps_per_epoch
        self.momentum_correction = momentum_correction
        self._start = self.learning_rate
        self._epoch = 0
        self._scaled_optimizer: Any = None
        self._multiply: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        strategy, optimizer = self.model.distribute_strategy, _innermost(self.model.optimizer)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigurationError(
                message("The model has no optimizer of Keras.", hint="compile it with one.", optimizer=optimizer)
            )
        if hasattr(optimizer, "optimizers"):
            raise ConfigurationError(
                message(
                    "The optimizer has a learning rate for each of several optimizers.",
                    hint="give each of them a schedule, or use keras.callbacks.LearningRateScheduler.",
                    optimizer=optimizer,
                )
            )
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ConfigurationError(
                message(
                    "The optimizer has a schedule, which sets the learning rate of each step itself.",
                    hint=f"give the optimizer a number. {_SCHEDULES_WARM_UP}",
                    learning_rate=optimizer._learning_rate,
                )
            )
        on_workers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
        if on_workers and self._corrects(optimizer):
            raise ConfigurationError(
                message(
                    "Momentum cannot be corrected while workers change it: one of their steps could be lost.",
                    hint="use momentum_correction=False.",
                    momentum=optimizer.momentum,
                )
            )
        replicas = self.replicas or strategy.num_replicas_in_sync * (strategy.num_workers if on_workers else 1)
        self._start = self.learning_rate / replicas

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch >= self.epochs:
            return
        steps = self.steps_per_epoch or self.params["steps"]
        if steps is None:
            raise ConfigurationError(
                message("The length of an epoch is not known.", hint="pass steps_per_epoch=...", steps_per_epoch=None)
            )
        if self._epoch + batch / steps >= self.epochs:
            return
        optimizer = _innermost(self.model.optimizer)
        # The steps of one execution share a learning rate.
        end = min(batch + self.model.steps_per_execution, steps)
        learning_rate = self._learning_rate_at(self._epoch + end / steps)
        if self._corrects(optimizer) and optimizer.built:
            self._scale_velocities(optimizer, learning_rate, float(optimizer.learning_rate))
        optimizer.learning_rate = learning_rate

    def _learning_rate_at(self, epoch: float) -> float:
        """Returns the learning rate after this number of epochs, which may be fractional."""
        done = min(epoch / self.epochs, 1.0)
        return self._start + (self.learning_rate - self._start) * done

    def _corrects(self, optimizer: Any) -> bool:
        kinds = keras.optimizers.SGD, keras.optimizers.RMSprop
        return self.momentum_correction and isinstance(optimizer, kinds) and bool(optimizer.momentum)

    def _scale_velocities(self, optimizer: Any, learning_rate: float, before: float) -> None:
        if self._scaled_optimizer is not optimizer:
            velocities = optimizer.momentums if isinstance(optimizer, keras.optimizers.SGD) else optimizer._momentums

            @tf.function(autograph=False)
            def multiply(ratio: tf.Tensor) -> None:
                for velocity in velocities:
                    velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

            self._scaled_optimizer, self._multiply = optimizer, multiply
        if before not in (0.0, learning_rate):
            self._multiply(tf.constant(learning_rate / before, tf.float64))


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


_SCHEDULES_WARM_UP = "A schedule has its own warm-up: CosineDecay(..., warmup_target=..., warmup_steps=...)."


def _check_learning_rate(learning_rate: Any) -> None:
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        hint = f"scale the numbers that it is made of. {_SCHEDULES_WARM_UP}"
        raise ConfigurationError(message("The learning rate is a schedule, not a number.", hint=hint, learning_rate=learning_rate))
    is_number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:
        raise ConfigurationError(
            message("A learning rate is a positive number.", hint="use a number such as 0.1.", learning_rate=learning_rate)
        )


__all__ = ["CheckpointProgress", "LearningRateWarmup", "ShardedCheckpoint", "Throughput", "scale_learning_rate"]
