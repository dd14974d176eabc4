"""The settings of an estimator."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import KW_ONLY, dataclass
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message
from tfrep_strategy.strategies.base import SynchronousStrategy

_DEFAULT_SECONDS = 600.0
_COUNTS = ("save_checkpoints_steps", "save_summary_steps", "log_step_count_steps", "keep_checkpoint_max")


@dataclass(frozen=True)
class RunConfig:
    """Settings of an `Estimator`; the names and defaults are those of `tf.estimator.RunConfig`.

    Attributes:
        model_dir: Folder of checkpoints and summaries, which all ranks see. None: a temporary folder.
        train_distribute: The strategy that trains: a `MirroredStrategy` or `MultiWorkerStrategy` of this package. None: the one in
            scope, as under `tfrep run`; else one device.
        eval_distribute: The strategy that evaluates. None: the one in scope; else each process evaluates all of the data by itself.
        tf_random_seed: Seed of TensorFlow's random operations, set before an `input_fn` is called, so that a shuffle without a seed
            has the same order on all ranks. None: the chief draws one.
        save_summary_steps: Steps between two summaries of loss and metrics. None: there are none.
        save_checkpoints_steps: Steps between two checkpoints.
        save_checkpoints_secs: Seconds between two checkpoints; 600 if neither is given.
        keep_checkpoint_max: How many checkpoints are kept. None: all.
        log_step_count_steps: Steps between two lines of the log, and summaries of the steps per second. None: there are none.

    Raises:
        ConfigurationError: A setting cannot be used.

    Example:
        >>> config = tfrep.estimator.RunConfig("models", save_checkpoints_steps=100)
        >>> config.replace(model_dir="others").save_checkpoints_steps
        100
    """

    model_dir: str | os.PathLike[str] | None = None
    _: KW_ONLY
    train_distribute: Any = None
    eval_distribute: Any = None
    tf_random_seed: int | None = 1
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ConfigurationError(
                message(
                    "A checkpoint is due by steps or by seconds.",
                    hint="leave out one of the two.",
                    save_checkpoints_steps=self.save_checkpoints_steps,
                    save_checkpoints_secs=self.save_checkpoints_secs,
                )
            )
        for name in _COUNTS:
            if getattr(self, name) is not None:
                check_count(f"{name} must be a whole number.", **{name: getattr(self, name)})
        if self.save_checkpoints_secs is not None:
            check_seconds(save_checkpoints_secs=self.save_checkpoints_secs)
        for name in ("train_distribute", "eval_distribute"):
            check_strategy(**{name: getattr(self, name)})

    @property
    def seconds_between_checkpoints(self) -> float | None:
        """Seconds between two checkpoints; None if steps are counted."""
        if self.save_checkpoints_steps is not None:
            return None
        return self.save_checkpoints_secs or _DEFAULT_SECONDS

    def replace(self, **settings: Any) -> RunConfig:
        """Returns a copy with other settings."""
        return dataclasses.replace(self, **settings)


def check_strategy(**given: Any) -> None:
    """Refuses a strategy that an estimator cannot use.

    Args:
        **given: One strategy or None, as `name=value`.

    Raises:
        ConfigurationError: It is not one of this package's synchronous strategies.
    """
    ((name, strategy),) = given.items()
    if strategy is None or isinstance(strategy, SynchronousStrategy):
        return
    hint = "write tfrep.MirroredStrategy() or tfrep.MultiWorkerStrategy()."
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        hint = "use model.fit under tfrep.ParameterServerStrategy; see docs/migration/parameter_server.md."
    raise ConfigurationError(message(f"An estimator cannot use this strategy as {name}.", hint=hint, **given))


def strategy_for(configured: Any) -> Any:
    """Returns the strategy that a call uses: the configured one, else the one in scope, else None.

    Raises:
        ConfigurationError: An estimator cannot use the one in scope.
    """
    if configured is None and tf.distribute.has_strategy():
        configured = tf.distribute.get_strategy()
        check_strategy(strategy=configured)
    return configured
