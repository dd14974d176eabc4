"""The learning rate of larger batches: scaled with the number of replicas, and reached step by step.

Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv:1706.02677.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, check_count, message

_RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}


def scale_learning_rate(learning_rate: float, replicas: int, rule: str = "linear") -> float:
    """Scales a learning rate for a global batch that is `replicas` times as large.

    Args:
        learning_rate: What is right for the batch of one replica.
        replicas: By how much the global batch has grown. It is 1 if the global batch stays as it is on one device.
        rule: `"linear"` (Goyal et al. 2017; for SGD), or `"sqrt"` (for Adam and its like).

    Returns:
        The learning rate for the global batch.

    Raises:
        ConfigurationError: The learning rate is not a positive number, as a `LearningRateSchedule` is none. There is no such
            rule, or no such number of replicas.

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
    """Raises the learning rate in even steps, from that of one replica to that of all, during the first epochs.

    Step `b` of `n` in epoch `e`, counted from 0, has the learning rate
    `learning_rate * (1 + (e + (b + 1) / n) / epochs * (replicas - 1)) / replicas`. It depends on nothing else, so a run that
    goes on (`initial_epoch`, `BackupAndRestore`) has the learning rates of one that was not interrupted. After the warm-up the
    callback changes nothing. The logs of an epoch get its last learning rate.

    Args:
        learning_rate: The learning rate at the end of the warm-up. It usually comes from `scale_learning_rate`.
        epochs: The length of the warm-up.
        replicas: The warm-up begins at `learning_rate / replicas`. Default: the number of replicas of the model's strategy; under
            parameter servers, of all workers.
        steps_per_epoch: Needed if `fit` does not know how long an epoch is.
        momentum_correction: Whether momentum follows the learning rate. The velocity of `SGD` and `RMSprop` contains the learning
            rates of earlier steps. At each change it is multiplied by the ratio of the new rate to the old one (Goyal et al.,
            section 3).

    Raises:
        ConfigurationError: A setting cannot be used. When training begins: the optimizer has a `LearningRateSchedule`, or
            momentum would be corrected while the workers of parameter servers change it. In the first step: nothing tells
            how long an epoch is.

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
            raise ConfigurationError(message("A warm-up needs some epochs.", hint="use a positive number.", epochs=epochs))
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
                message("Nothing tells how long an epoch is.", hint="pass steps_per_epoch=...", steps_per_epoch=None)
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
        """Returns the learning rate when so many epochs, with parts of one, are done."""
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


_SCHEDULES_WARM_UP = "A schedule has a warm-up of its own: CosineDecay(..., warmup_target=..., warmup_steps=...)."


def _check_learning_rate(learning_rate: Any) -> None:
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        hint = f"scale the numbers that it is made of. {_SCHEDULES_WARM_UP}"
        raise ConfigurationError(message("A schedule is no number.", hint=hint, learning_rate=learning_rate))
    is_number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:
        raise ConfigurationError(
            message("A learning rate is a positive number.", hint="use a number such as 0.1.", learning_rate=learning_rate)
        )
