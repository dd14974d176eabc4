"""The shape of `tf.estimator`, which TensorFlow 2.16 removed, on Keras 3 models: no graph and no session.

What an article imports from `tf.estimator` and `tf.keras.estimator` is here under its own name.
"""

from tfrep_strategy.estimator.model_estimator import Estimator, model_to_estimator
from tfrep_strategy.estimator.run_config import RunConfig
from tfrep_strategy.estimator.session_hooks import SessionRunArgs, SessionRunHook, StopAtStepHook
from tfrep_strategy.estimator.train_and_evaluate import EvalSpec, TrainSpec, train_and_evaluate

__all__ = [
    "EvalSpec", "Estimator", "RunConfig", "SessionRunArgs", "SessionRunHook", "StopAtStepHook", "TrainSpec", "model_to_estimator",
    "train_and_evaluate",
]  # fmt: skip
