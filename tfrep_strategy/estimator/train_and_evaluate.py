"""Trains, and evaluates checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfrep_strategy.estimator.input_functions import InputFn
from tfrep_strategy.estimator.model_estimator import Estimator
from tfrep_strategy.strategies.of_process import process_communicator


@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains.

    Attributes:
        input_fn: See `Estimator.train`.
        max_steps: The global step at which to end; None: at the end of the data.
        hooks: Objects with methods of a `SessionRunHook`.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: Sequence[Any] | None = None


@dataclass(frozen=True)
class EvalSpec:
    """What `train_and_evaluate` evaluates.

    Attributes:
        input_fn: See `Estimator.evaluate`.
        steps: How many steps an evaluation has at most; None: all of the data.
        name: Names the folder of the summaries.
        hooks: Objects with methods of a `SessionRunHook`.
        start_delay_secs: Has no effect, as it had none where one program trained and evaluated.
        throttle_secs: How many seconds pass at least between the starts of two evaluations.
    """

    input_fn: InputFn
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] | None = None
    start_delay_secs: float = 120
    throttle_secs: float = 600


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> tuple[dict[str, Any], list[Any]]:
    """Trains, and evaluates new checkpoints on the way and at the end. Every rank must call it.

    The training does not begin its data again after an evaluation. A checkpoint is evaluated when it is written, if the last
    evaluation is `throttle_secs` ago.

    Args:
        estimator: The estimator.
        train_spec: What to train.
        eval_spec: What to evaluate.

    Returns:
        The results of the last evaluation, and an empty list where `tf.estimator` gave the results of exporters.

    Raises:
        HookError: A hook failed, on some rank.

    Example:
        >>> estimator = tfrep.estimator.model_to_estimator(make_model(), "models")
        >>> train_spec = tfrep.estimator.TrainSpec(lambda: (x, y), max_steps=20)
        >>> results, _ = tfrep.estimator.train_and_evaluate(estimator, train_spec, tfrep.estimator.EvalSpec(lambda: (x, y)))
        >>> results["global_step"]
        20
    """
    last: list[dict[str, Any]] = []
    began = time.monotonic()

    def evaluate() -> None:
        last[:] = [estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, name=eval_spec.name)]

    def evaluate_if_due() -> None:
        nonlocal began
        if process_communicator().broadcast_object(time.monotonic() - began >= eval_spec.throttle_secs):
            began = time.monotonic()
            evaluate()

    estimator.train_with(train_spec.input_fn, train_spec.hooks, None, train_spec.max_steps, evaluate_if_due)
    newest = process_communicator().broadcast_object(estimator.latest_checkpoint())
    if not last or not (newest or "").endswith(f"-{last[0]['global_step']}"):
        evaluate()
    return last[0], []
