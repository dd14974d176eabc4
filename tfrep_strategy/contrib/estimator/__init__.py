"""The shape of `tf.estimator`, which TensorFlow 2.16 removed, on Keras 3 models: no graph and no session.

What an article imports from `tf.estimator` and `tf.keras.estimator` is here under its own name.
"""

from tfrep_strategy.contrib.estimator.model_estimator import Estimator, EvalSpec, TrainSpec, model_to_estimator, train_and_evaluate
from tfrep_strategy.contrib.estimator.run_config import RunConfig
from tfrep_strategy.contrib.estimator.session_hooks import SessionRunArgs, SessionRunHook, StopAtStepHook

__all__ = [
    "EvalSpec", "Estimator", "RunConfig", "SessionRunArgs", "SessionRunHook", "StopAtStepHook", "TrainSpec", "model_to_estimator",
    "train_and_evaluate",
]  # fmt: skip
