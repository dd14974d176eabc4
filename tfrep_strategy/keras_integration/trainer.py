"""`fit`, `evaluate`, `predict` and the `*_on_batch` methods on replicas."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.fingerprints import Fingerprint
from tfrep_strategy.keras_integration.logs import with_global_logs
from tfrep_strategy.keras_integration.patching import keras_internal, replaces
from tfrep_strategy.keras_integration.placement import warn_of_layers_not_seen
from tfrep_strategy.keras_integration.protocol import KerasStrategy, Shards
from tfrep_strategy.keras_integration.xla import SplitPrediction, compiled_between_collectives

_trainer = keras_internal("backend.tensorflow.trainer")
_Trainer = _trainer.TensorFlowTrainer
_EpochIterator = _trainer.TFEpochIterator
_array_data = keras_internal("trainers.data_adapters.array_data_adapter")
_ARRAYS = ("x", "y", "sample_weight")
_SETTINGS = ("class_weight", "batch_size", "steps_per_epoch", "shuffle", "steps_per_execution")
_compared_calls: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def strategy_of(model: Any) -> KerasStrategy | None:
    """Returns the strategy that a model was made under if it is a synchronous one of this package, else None."""
    strategy = model.distribute_strategy
    return strategy if getattr(strategy, "drives_keras", False) else None


# What is read.


@replaces(_EpochIterator, "__init__")
def init_epoch_iterator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Hands Keras's loops whole steps (`Shards`), so that a replica knows its share of the global batch."""
    strategy: Any = kwargs.get("distribute_strategy")
    if not getattr(strategy, "drives_keras", False):
        return original(self, *args, **kwargs)
    arrays = {name: kwargs.get(name) for name in _ARRAYS}
    settings = {name: kwargs.get(name) for name in _SETTINGS}
    beside, strategy.given_beside = strategy.given_beside, {}
    strategy.begin_call(settings, arrays | beside)
    if isinstance(kwargs.get("x"), types.GeneratorType):
        kwargs["x"] = _copied(kwargs["x"])
    strategy.notes_first_batch = not _array_data.can_convert_arrays(tuple(arrays.values()))
    try:
        original(self, *args, **kwargs)
    finally:
        strategy.notes_first_batch = True
    self._first_batch = self._distributed_dataset.first_batch
    self._part_spec = self._distributed_dataset.part_spec
    self._common_batches = _batches_of_all(strategy, self._distributed_dataset, self._num_batches)
    self._num_batches = self._common_batches
    self._distributed_dataset = self._distributed_dataset.for_keras(self._common_batches is not None)
    return None


def _batches_of_all(strategy: KerasStrategy, distributed: Any, num_batches: int | None) -> int | None:
    """Returns after how many steps an epoch ends on every process; None where only the data can tell."""
    if distributed.cardinality >= 0:  # Made as long as the shortest when it was distributed.
        return None if num_batches is None else min(num_batches, distributed.cardinality)
    if distributed.steps_per_batch != 1:  # Each process reads data of its own, and the epoch ends with the last of them.
        of_all = strategy.all_gather_object(num_batches)
        is_known = distributed.steps_per_batch is not None and None not in of_all
        return distributed.steps_per_batch * max(of_all) if is_known else None
    shortest = strategy.shortest_epoch(int(tf.data.UNKNOWN_CARDINALITY) if num_batches is None else num_batches)
    return shortest if shortest >= 0 else None


@replaces(_EpochIterator, "reset")
def reset(original: Any, self: Any) -> None:
    """Forgets the state of an epoch, but not that the data of another process is shorter."""
    original(self)
    if getattr(self._distribute_strategy, "drives_keras", False):
        self._num_batches = self._common_batches


def _copied(generator: Iterator[Any]) -> Iterator[Any]:
    """Copies what a generator yields: TensorFlow may write into memory that it shares with an aligned array."""
    for batch in generator:
        yield keras.tree.map_structure(lambda v: v.copy() if isinstance(v, np.ndarray) else v, batch)


@replaces(_EpochIterator, "_enumerate_iterator")
def enumerate_iterator(original: Any, self: Any) -> Any:
    """Passes over what an interrupted run has trained on already, so that the order of the data goes on."""
    strategy, epochs, batches = self._distribute_strategy, 0, 0
    if getattr(strategy, "drives_keras", False):
        (epochs, batches), strategy.resumes_at = strategy.resumes_at, (0, 0)
        strategy.first_batch = self._first_batch
    for _ in range(epochs):
        _pass_over_epoch(self, original)
    for first, last, iterator in original(self):
        if last < batches:
            for _ in range(first, last + 1):
                next(iterator)
        else:
            yield first, last, iterator


def _pass_over_epoch(epoch_iterator: Any, enumerate_steps: Any) -> None:
    # Where each epoch starts an iterator of its own, one batch of it is enough to have the next epoch's order drawn.
    starts_again = epoch_iterator.steps_per_epoch is None and epoch_iterator.num_batches is not None
    with contextlib.suppress(StopIteration):
        for first, last, iterator in enumerate_steps(epoch_iterator):
            if first == 0 or not starts_again:
                for _ in range(first, last + 1):
                    next(iterator)


@replaces(_Trainer, "_maybe_symbolic_build")
def maybe_symbolic_build(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds the model from the specification of its data: a batch that is read for that would be lost."""
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, iterator=iterator, data_batch=data_batch)
    if _has_own_steps(self):
        # Nothing says what such a step reads or calls. What it makes lazily is made when it is traced, as on one device.
        return strategy.synchronize_new_variables()
    if iterator is not None:
        data_batch = tf.nest.map_structure(lambda s: None if isinstance(s, tf.OptionalSpec) else s, iterator._part_spec)
    with strategy.scope():
        self._symbolic_build(data_batch=data_batch)
    return strategy.synchronize_new_variables()


@replaces(keras_internal("trainers.data_adapters"), "is_tf_dataset")
def is_tf_dataset(original: Any, x: Any) -> bool:
    """Takes data sets that the user has distributed."""
    return isinstance(x, tf.distribute.DistributedDataset) or original(x)


def _check_first_batch(strategy: KerasStrategy) -> None:
    """Compares what the ranks have read first, once."""
    first_batch, strategy.first_batch = strategy.first_batch, None
    if first_batch is not None:
        first_batch.check()


@replaces(_Trainer, "fit")
def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compares validation data before training, and not after the first epoch."""
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    strategy.given_beside = {"validation_data": given.get("validation_data")}
    try:
        return original(self, *args, **kwargs)
    finally:
        strategy.given_beside = {}


def _compares_first_call(name: str) -> None:
    @replaces(_Trainer, name)
    def on_batch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares what the ranks give to the first call; to compare each would cost each a collective."""
        strategy = strategy_of(self)
        if strategy is not None and name not in _compared_calls.setdefault(self, set()):
            _compared_calls[self].add(name)
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments
            strategy.check_same(Fingerprint({key: value for key, value in given.items() if key != "self"}))
        return original(self, *args, **kwargs)


for _name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
    _compares_first_call(_name)


def _has_own_steps(model: Any) -> bool:
    return any(getattr(type(model), name) is not getattr(_Trainer, name) for name in ("train_step", "test_step"))


# What a step does.


@replaces(keras_internal("trainers.trainer", "Trainer"), "_resolve_auto_jit_compile")
def resolve_auto_jit_compile(original: Any, self: Any) -> bool:
    """Decides about XLA as on one device, where Keras does without it under every strategy."""
    strategy = strategy_of(self)
    if strategy is None:
        return original(self)
    self._distribute_strategy = None
    try:
        return original(self)
    finally:
        self._distribute_strategy = strategy


@replaces(_Trainer, "_make_function")
def make_function(original: Any, self: Any, step_function: Any) -> Any:
    """Makes a train or test function that also takes whole batches, as `train_on_batch` gives them."""
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, step_function)
    if strategy.num_replicas_in_sync > 1:
        step_function = with_global_logs(self, strategy, step_function)
    if strategy.compiles_whole_steps or not self.jit_compile:
        run = original(self, step_function)
    else:
        with _without_jit(self):
            run = original(self, compiled_between_collectives(step_function))

    def function(iterator: Any) -> Any:
        strategy.synchronize_new_variables()
        strategy.mark_state_changed()
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = map(strategy.shard, iterator)
        with strategy.watching_peers():
            logs = run(iterator)
        _check_first_batch(strategy)
        warn_of_layers_not_seen(strategy)
        strategy.count_steps(self, self.steps_per_execution)
        return logs

    return function


@contextlib.contextmanager
def _without_jit(model: Any) -> Iterator[None]:
    """Keeps Keras from compiling a whole step, which holds collectives that XLA cannot."""
    jit_compile, model._jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model._jit_compile = jit_compile


@replaces(_Trainer, "make_predict_function")
def make_predict_function(original: Any, self: Any, force: bool = False) -> None:
    """Makes a predict function that also takes whole batches, as `predict_on_batch` gives them."""
    strategy = strategy_of(self)
    if strategy is None or strategy.compiles_whole_steps or not self.jit_compile:
        original(self, force=force)
    else:
        split = SplitPrediction(self)
        original(split, force=force)
        self.predict_function = split.predict_function
    if strategy is None or getattr(self.predict_function, "takes_whole_batches", False):
        return
    run = self.predict_function

    def function(batches: Any) -> Any:
        _check_first_batch(strategy)
        with strategy.watching_peers():
            return run([batch if isinstance(batch, Shards) else strategy.shard(batch) for batch in batches])

    function.takes_whole_batches = True  # type: ignore[attr-defined]
    self.predict_function = function


@replaces(_trainer, "reduce_per_replica")
def reduce_per_replica(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
    """Gathers the predictions of all replicas, in input order, on every process."""
    if reduction == "concat" and getattr(strategy, "drives_keras", False):
        return strategy.gather_outputs(values)
    return original(values, strategy, reduction)


# What is reported.


def _reports_global_metrics(name: str) -> None:
    @replaces(_Trainer, name)
    def on_batch(original: Any, self: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """Reports the metrics of the global batch; the logs of a step are those of one replica."""
        logs = original(self, *args, return_dict=True, **kwargs)
        if strategy_of(self) is not None:
            logs = keras_internal("utils.python_utils", "pythonify_logs")(self._get_metrics_result_or_logs(logs))
        return logs if return_dict else self._flatten_metrics_in_order(logs)


for _name in ("train_on_batch", "test_on_batch"):
    _reports_global_metrics(_name)


# State before it is used.


def _merges_state_first(name: str) -> None:
    @replaces(_Trainer, name)
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes moving statistics one value on all replicas before predictions depend on them."""
        strategy = strategy_of(self)
        if strategy is not None:
            strategy.synchronize_new_variables()
            strategy.merge_replica_state()
        return original(self, *args, **kwargs)


for _name in ("evaluate", "predict", "test_on_batch", "predict_on_batch"):
    _merges_state_first(_name)

