"""`fit`, `evaluate` and `predict` on workers that run steps independently.

Under a parameter-server strategy steps end on workers, in no fixed order. So callbacks of single batches are refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration import refusals
from tfrep_strategy.keras_integration.asynchronous.partitioned_variables import Parts
from tfrep_strategy.keras_integration.asynchronous.state import SharedState
from tfrep_strategy.keras_integration.asynchronous.steps import MetricResults, PredictFunction, StepFunction
from tfrep_strategy.keras_integration.asynchronous.sync_updates import Updates
from tfrep_strategy.keras_integration.asynchronous.worker_data import StepsOfWorkers
from tfrep_strategy.keras_integration.internals import TensorFlowTrainer, is_default
from tfrep_strategy.keras_integration.profiled_fit import TracesOfCluster, check_cluster, profiled
from tfrep_strategy.keras_integration.refusals import refuse_old_callbacks
from tfrep_strategy.keras_integration.saving.backups import Backups
from tfrep_strategy.keras_integration.saving.model_files import ModelFiles
from tfrep_strategy.keras_integration.saving.training_state import CHECKPOINTS, CsvFiles

_SAVE: Any = (*CHECKPOINTS, keras.callbacks.BackupAndRestore)

_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def check_callbacks(phase: str, method: Any, model: Any, args: Any, kwargs: Any) -> bool:
    """Refuses, before the first step, callbacks that expect to see each batch.

    Args:
        phase: "train", "test" or "predict".
        method: Keras's `fit`, `evaluate` or `predict`.
        model: The model.
        args: The positional arguments of the method.
        kwargs: Its keyword arguments.

    Returns:
        Whether a callback or the progress bar reads the logs while an epoch runs.

    Raises:
        ConfigurationError: A callback needs each batch.
    """
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    refuse_old_callbacks(given.get("callbacks"))
    callbacks, shows_bar = given.get("callbacks"), given.get("verbose", "auto") != 0
    if isinstance(callbacks, keras.callbacks.CallbackList):  # The bar is one of its callbacks.
        callbacks, shows_bar = callbacks.callbacks, False
    watched = shows_bar
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        hooks = [name for name in _HOOKS[phase] if not is_default(getattr(callback, name))]
        watched |= bool(hooks) and getattr(callback, "verbose", 1) != 0
        if hooks and not _accepts_remote_logs(callback):
            raise ConfigurationError(
                message(
                    f"{type(callback).__name__} looks at single batches ({', '.join(hooks)}), which end on the"
                    " workers, in no order.",
                    hint="use on_epoch_end (save_freq or update_freq 'epoch'), or set"
                    " `supports_remote_logs = True` on the callback: its batch hooks are then called when a step"
                    " is handed out, with the logs of the steps that are done.",
                    callback=callback,
                )
            )
    return watched


def _accepts_remote_logs(callback: Any) -> bool:
    if isinstance(callback, _SAVE):
        return callback.save_freq == "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq == "epoch"
    known = (keras.callbacks.ProgbarLogger, keras.callbacks.TerminateOnNaN, keras.callbacks.SwapEMAWeights)
    return isinstance(callback, known) or bool(getattr(callback, "supports_remote_logs", False))


class AsynchronousDriver(Updates, SharedState, Parts, MetricResults, ModelFiles, Backups, CsvFiles):
    """Trains a model on the workers of a parameter-server strategy.

    The loops are here, in the order in which Keras calls them. The functions that a step calls are in the base classes.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._running: Setting[Any] = Setting(None)
        self._is_watched: Setting[bool] = Setting(True)

    # The begin of a call.

    def compile(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Makes optimizers and metrics that are given by name in the model's scope."""
        refusals.refuse_old_optimizer(args[0] if args else kwargs.get("optimizer"), "`compile`")
        with self.strategy.scope():
            original(model, *args, **kwargs)

    def fit(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Trains on the workers."""
        refusals.refuse_foreign_model(model, self.strategy, "fit")
        check_cluster()
        with profiled(TracesOfCluster, speaks=True) as self._profile:
            return self._on_workers("train", original, model, args, kwargs)

    def evaluate(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluates on the workers."""
        refusals.refuse_foreign_model(model, self.strategy, "evaluate")
        return self._on_workers("test", original, model, args, kwargs)

    def predict(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predicts on the workers."""
        return self._on_workers("predict", original, model, args, kwargs)

    def train_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for one step of a worker."""
        refusals.refuse_foreign_model(model, self.strategy, "train_on_batch")
        with self._driving(model, "train_function"):
            return original(model, *args, **kwargs)

    def test_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for one step of a worker."""
        refusals.refuse_foreign_model(model, self.strategy, "test_on_batch")
        with self._driving(model, "test_function"):
            return original(model, *args, **kwargs)

    def predict_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for the outputs of a worker."""
        with self._driving(model, "predict_function"):
            return original(model, *args, **kwargs)

    def _on_workers(self, phase: str, original: Any, model: Any, args: Any, kwargs: Any) -> Any:
        is_watched = check_callbacks(phase, original, model, args, kwargs)
        with self._driving(model, f"{phase}_function"), self._is_watched.to(is_watched):
            return original(model, *args, **kwargs)

    @contextlib.contextmanager
    def _driving(self, model: Any, function_name: str) -> Iterator[None]:
        """Forgets an interrupted call, and turns errors of a lost server into `ServerLostError`."""
        with self.strategy.extended.step_runner.driving(), self._running.to((model, function_name)):
            function = getattr(model, function_name)
            if function is not None:
                function.begin()
            yield

    # Data.

    def make_epoch_iterator(self, original: Any, distribute_strategy: Any = None, **kwargs: Any) -> StepsOfWorkers:
        """Gives Keras's loops batches to send to workers, or the workers' pipelines."""
        steps = StepsOfWorkers(self, **kwargs)
        if steps.trains:
            steps.around_step = self._profile.step
        return steps

    def end_epoch(self) -> None:
        """Waits for the steps of an epoch, and tells Keras if a worker had no data for one of them."""
        model, function_name = self._running.value
        function = getattr(model, function_name)
        function.drain()
        if function.take_out_of_data():
            raise tf.errors.OutOfRangeError(None, None, "The data of a worker has ended.")

    def build_model(self, original: Any, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model from the specification of its data."""
        if iterator is not None:
            spec = iterator.element_spec
            data_batch = tf.nest.map_structure(lambda s: None if isinstance(s, tf.OptionalSpec) else s, spec)
        with self.strategy.scope():
            if all(getattr(type(model), name) is getattr(TensorFlowTrainer, name) for name in ("train_step", "test_step")):
                model._symbolic_build(data_batch=data_batch)
            elif model.built and isinstance(model.optimizer, keras.optimizers.Optimizer) and not model.optimizer.built:
                # Other functions that such a step calls are unknown; it makes its variables lazily when it is traced.
                model.optimizer.build(model.trainable_variables)

    def build_optimizer(self, original: Any, optimizer: Any, variables: Any) -> None:
        """Takes over an optimizer that was made outside the strategy's scope, so that its slots are on the servers."""
        if not optimizer.built:
            optimizer._distribution_strategy = self.strategy
        original(optimizer, variables)

    # Steps.

    def make_function(self, original: Any, model: Any, step_function: Any) -> StepFunction:
        """Makes the function that hands a step to a worker."""
        updates = step_function != model.test_step
        return StepFunction(model, step_function, self.strategy, updates, self._is_watched)

    def make_predict_function(self, original: Any, model: Any, force: bool = False) -> Any:
        """Makes the function that hands a prediction to a worker."""
        if model.predict_function is None or force:
            model.predict_function = PredictFunction(model, model.predict_step, self.strategy, False, self._is_watched)
        return model.predict_function

    # Results.

    def join_predictions(self, original: Any, tensors: Any) -> Any:
        """Waits for predictions, and puts them together in input order."""
        outputs = [prediction.get() for prediction in tensors]
        return keras.tree.map_structure(lambda *parts: original(list(parts)), *outputs)
