"""`fit`, `evaluate` and `predict` on workers that take steps on their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration import server_data  # noqa: F401  (reads what `fit` is given)
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.server_predictions import PredictFunction, Prediction
from tfrep_strategy.keras_integration.server_steps import PendingLogs, StepFunction

_trainer = keras_internal("backend.tensorflow.trainer")
_Trainer = _trainer.TensorFlowTrainer
_EpochIterator = _trainer.TFEpochIterator


def server_strategy_of(model: Any) -> Any:
    """Returns the strategy that a model was made under if it is a parameter-server strategy of ours, else None."""
    strategy = model.distribute_strategy
    return strategy if getattr(strategy, "trains_asynchronously", False) else None


# Who drives the workers.

_driving: list[tuple[Any, str]] = []
"""The models that train, evaluate or predict now, innermost last, and the attribute that has the function of each."""


@contextlib.contextmanager
def _drives(model: Any, strategy: Any, function_name: str) -> Iterator[None]:
    with strategy.step_runner.driving():
        function = getattr(model, function_name)
        if function is not None:
            function.begin()
        _driving.append((model, function_name))
        try:
            yield
        finally:
            _driving.pop()


def _drives_workers(name: str, function_name: str) -> None:
    @replaces(_Trainer, name)
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Starts clean, and says that a server is gone where the coordinator notices it first."""
        strategy = server_strategy_of(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        with _drives(self, strategy, function_name):
            return original(self, *args, **kwargs)


_drives_workers("fit", "train_function")
_drives_workers("evaluate", "test_function")
_drives_workers("predict", "predict_function")


# What is read.


@replaces(_EpochIterator, "tf_sync")
def tf_sync(original: Any, self: Any) -> None:
    """Waits for the steps of an epoch, and tells Keras if a worker had no data for one of them."""
    if not getattr(self._distribute_strategy, "trains_asynchronously", False):
        return original(self)
    model, name = _driving[-1]
    function = getattr(model, name)
    function.drain()
    if function.take_out_of_data():
        raise tf.errors.OutOfRangeError(None, None, "The data of a worker has ended.")
    return None


@replaces(_Trainer, "_maybe_symbolic_build")
def maybe_symbolic_build(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds the model from the specification of its data."""
    strategy = server_strategy_of(self)
    if strategy is None:
        return original(self, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        spec = iterator._distributed_dataset.element_spec
        data_batch = tf.nest.map_structure(lambda s: None if isinstance(s, tf.OptionalSpec) else s, spec)
    with strategy.scope():
        _adopt(strategy, self.optimizer)
        if all(getattr(type(self), name) is getattr(_Trainer, name) for name in ("train_step", "test_step")):
            self._symbolic_build(data_batch=data_batch)
        elif self.built and isinstance(self.optimizer, keras.optimizers.Optimizer) and not self.optimizer.built:
            # Nothing says what else such a step calls; what it makes lazily is made when it is traced.
            self.optimizer.build(self.trainable_variables)
    return None


def _adopt(strategy: Any, optimizer: Any) -> None:
    """Takes over an optimizer that was made outside the strategy's scope, so that its slots are on the servers."""
    while isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
        optimizer._distribution_strategy = strategy
        optimizer = getattr(optimizer, "inner_optimizer", None)


# What a step does.


def _makes(name: str, attribute: str, step: str, function_class: type[StepFunction], updates: bool) -> None:
    @replaces(_Trainer, name)
    def make_function(original: Any, self: Any, force: bool = False) -> Any:
        """Makes the function that hands a step to a worker."""
        strategy = server_strategy_of(self)
        if strategy is None:
            return original(self, force=force)
        if getattr(self, attribute) is None or force:
            setattr(self, attribute, function_class(self, getattr(self, step), strategy, updates))
        return getattr(self, attribute)


_makes("make_train_function", "train_function", "train_step", StepFunction, True)
_makes("make_test_function", "test_function", "test_step", StepFunction, False)
_makes("make_predict_function", "predict_function", "predict_step", PredictFunction, False)


# What is reported.


@replaces(_trainer, "potentially_ragged_concat")
def potentially_ragged_concat(original: Any, tensors: Any) -> Any:
    """Waits for predictions, and puts them together in input order."""
    if not isinstance(tensors[0], Prediction):
        return original(tensors)
    outputs = [prediction.get() for prediction in tensors]
    return keras.tree.map_structure(lambda *parts: original(list(parts)), *outputs)


@replaces(_Trainer, "_get_metrics_result_or_logs")
def metrics_or_logs(original: Any, self: Any, logs: Any) -> Any:
    """Reports an epoch when all of its steps are done."""
    strategy = server_strategy_of(self)
    if strategy is not None and isinstance(logs, PendingLogs):
        function = logs.function
        function.drain()
        logs = function.logs
    return original(self, logs)


@replaces(_Trainer, "predict_on_batch")
def predict_on_batch(original: Any, self: Any, x: Any) -> Any:
    """Waits for the outputs of a worker."""
    strategy = server_strategy_of(self)
    if strategy is None:
        return original(self, x)
    with _drives(self, strategy, "predict_function"):
        self.make_predict_function()
        return keras.tree.map_structure(_trainer.convert_to_np_if_not_ragged, self.predict_function([(x,)]).get())


def _waits(name: str, function_name: str) -> None:
    @replaces(_Trainer, name)
    def on_batch(original: Any, self: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """Waits for the step, and returns its metrics."""
        strategy = server_strategy_of(self)
        if strategy is None:
            return original(self, *args, return_dict=return_dict, **kwargs)
        with _drives(self, strategy, function_name):
            original(self, *args, return_dict=True, **kwargs)
            function = getattr(self, function_name)
            function.drain()
        logs = self._get_metrics_result_or_logs(function.logs)
        logs = keras_internal("utils.python_utils", "pythonify_logs")(logs)
        return logs if return_dict else self._flatten_metrics_in_order(logs)


_waits("train_on_batch", "train_function")
_waits("test_on_batch", "test_function")
