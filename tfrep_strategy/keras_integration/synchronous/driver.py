"""`fit`, `evaluate`, `predict` and the `*_on_batch` methods on replicas that train in step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.notices import keeping_requests
from tfrep_strategy.core.out_of_memory import noting_out_of_memory
from tfrep_strategy.core.step import Whole
from tfrep_strategy.core.tf import is_none
from tfrep_strategy.data.agreement import Fingerprint
from tfrep_strategy.errors import TfrepError
from tfrep_strategy.keras_integration import refusals, verified_calls
from tfrep_strategy.keras_integration.distribution import check_layouts
from tfrep_strategy.keras_integration.internals import TensorFlowTrainer
from tfrep_strategy.keras_integration.profiled_fit import TracesOfRanks, profiled
from tfrep_strategy.keras_integration.synchronous import run_backups
from tfrep_strategy.keras_integration.synchronous.callbacks import Callbacks
from tfrep_strategy.keras_integration.synchronous.empty_parts import EmptyParts
from tfrep_strategy.keras_integration.synchronous.epoch_iterator import StepsOfReplicas
from tfrep_strategy.keras_integration.synchronous.functions import (
    Logs,
    OneDeviceSteps,
    PredictFunction,
    WholeBatches,
    logs_of_all,
    with_global_logs,
)
from tfrep_strategy.keras_integration.synchronous.layers import Layers, Losses
from tfrep_strategy.keras_integration.synchronous.optimizer import Updates
from tfrep_strategy.keras_integration.synchronous.saving import Saving
from tfrep_strategy.keras_integration.synchronous.threads import OtherThreads, answers_alone
from tfrep_strategy.keras_integration.synchronous.traced_step import Placement, TracedStep
from tfrep_strategy.keras_integration.xla import Prediction, compiled_between_collectives

_STEPS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class SynchronousDriver(Updates, Losses, Logs, Placement, Layers, EmptyParts, Callbacks, Saving, OtherThreads):
    """Trains a model on all replicas of a strategy as on one device.

    The loops are here, in the order in which Keras calls them. The functions that a step calls are in the base classes.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.profile: Any = None
        self.read_last: StepsOfReplicas | None = None
        """The iterator of the loop that runs now."""
        self.of_trace = TracedStep(self)
        """The driver while a one-device step is traced."""
        self._compared_calls: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    # The begin of a call.

    def compile(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Makes optimizers and metrics that are given by name in the model's scope, and refuses objects made elsewhere."""
        refusals.refuse_old_optimizer(args[0] if args else kwargs.get("optimizer"), "`compile`")
        with self.strategy.scope() if self.has_several else contextlib.nullcontext():
            original(model, *args, **kwargs)
        if self.has_several:
            refusals.refuse_foreign_parts(model, self.strategy)

    def resolve_auto_jit_compile(self, original: Any, model: Any) -> bool:
        """Decides about XLA as on one device; Keras does not use it under a strategy."""
        strategy, model._distribute_strategy = model._distribute_strategy, None
        try:
            return original(model)
        finally:
            model._distribute_strategy = strategy

    def fit(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares validation data before training, instead of after the first epoch."""
        self._refuse_foreign(model, "fit")
        given = _given(original, model, args, kwargs)
        refusals.refuse_old_callbacks(given.get("callbacks"))
        with self.leading("fit"):
            return self._fit(original, model, given, *args, **kwargs)

    def _fit(self, original: Any, model: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        extended = self.strategy.extended
        # A callback may train another model in between.
        outer = self.is_fitting, self.given_to_fit, self.steps_of_fit, self.profile, self.is_called
        beside, done, resumes_at = extended.given_beside, extended.validations_done, extended.resumes_at
        self.is_fitting, self.given_to_fit, self.steps_of_fit, self.is_called = True, given, None, False
        extended.given_beside, extended.validations_done = {"validation_data": given.get("validation_data")}, 0
        extended.resumes_at = 0, 0
        try:
            with (
                noting_out_of_memory(),
                keeping_requests(),
                run_backups.writes.waited_for(),
                profiled(lambda: TracesOfRanks(self.strategy), self.strategy.extended.is_chief) as self.profile,
            ):
                if model.built:
                    check_layouts(model)
                history = original(model, *args, **kwargs)
                check_layouts(model)
                if self.has_several and self.steps_of_fit is not None:
                    self.steps_of_fit.read_one_more()
                verified_calls.note("fit", history.history, model.weights)
                return history
        finally:
            self.is_fitting, self.given_to_fit, self.steps_of_fit, self.profile, self.is_called = outer
            extended.given_beside, extended.validations_done, extended.resumes_at = beside, done, resumes_at

    def evaluate(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Merges the state that results depend on."""
        self._refuse_foreign(model, "evaluate")
        if self.is_other_thread:
            return self.alone(original, model, *args, **kwargs)
        self._merge_state()
        with self._called():
            results = original(model, *args, **kwargs)
        verified_calls.note("evaluate", results)
        return results

    def predict(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Merges the state that predictions depend on."""
        if self.is_other_thread:
            return self.alone(original, model, *args, **kwargs)
        self._merge_state()
        with self._called():
            results = original(model, *args, **kwargs)
        verified_calls.note("predict", results)
        return results

    def train_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares the arguments of the first call between the ranks."""
        self._refuse_foreign(model, "train_on_batch")
        with self.leading("train_on_batch"):
            self._compare_first_call("train_on_batch", original, model, args, kwargs)
            return original(model, *args, **kwargs)

    def test_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares the arguments of the first call between the ranks, and merges the state that results depend on."""
        self._refuse_foreign(model, "test_on_batch")
        if self.is_other_thread:
            return self.alone(original, model, *args, **kwargs)
        self._merge_state()
        self._compare_first_call("test_on_batch", original, model, args, kwargs)
        return original(model, *args, **kwargs)

    def predict_on_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares the arguments of the first call between the ranks, and merges the state that predictions depend on."""
        if self.is_other_thread:
            return self.alone(original, model, *args, **kwargs)
        self._merge_state()
        self._compare_first_call("predict_on_batch", original, model, args, kwargs)
        return original(model, *args, **kwargs)

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Records that data is not read for validation in `fit`, since a callback may evaluate and predict as well."""
        before, read_before, self.is_called = self.is_called, self.read_last, True
        try:
            with noting_out_of_memory():
                yield
        finally:
            self.is_called, self.read_last = before, read_before

    def _refuse_foreign(self, model: Any, method: str) -> None:
        if self.has_several:
            self.strategy.extended.refuse_fork()
            refusals.refuse_foreign_model(model, self.strategy, method)
        if model.built and self.has_several_ranks:
            refusals.refuse_foreign_metrics(model, self.strategy, method)

    def _merge_state(self) -> None:
        """Merges moving statistics to one value on all replicas."""
        self.strategy.extended.refuse_fork()
        self.strategy.extended.synchronize_new_variables()
        self.strategy.extended.merge_replica_state()

    def _compare_first_call(self, method: str, original: Any, model: Any, args: Any, kwargs: Any) -> None:
        """Compares the arguments of the first call. Comparing each call would cost a collective each."""
        compared = self._compared_calls.setdefault(model, set())
        if method not in compared:
            compared.add(method)
            given = _given(original, model, args, kwargs)
            self.strategy.extended.check_same(Fingerprint({key: value for key, value in given.items() if key != "self"}))

    # Data.

    def make_epoch_iterator(self, original: Any, distribute_strategy: Any = None, **kwargs: Any) -> StepsOfReplicas:
        """Gives Keras's loops whole steps of all replicas of this process."""
        begins_fit = self.is_fitting and self.steps_of_fit is None  # Later iterators are for validation.
        validates = self.is_fitting and not begins_fit and not self.is_called
        given, epochs = self.given_to_fit, None if validates else 1
        if begins_fit:
            epochs = given.get("epochs", 1) - given.get("initial_epoch", 0)
        steps = self.read_last = StepsOfReplicas(self, epochs, **kwargs)
        if begins_fit:
            self.steps_of_fit = steps
            steps.is_of_fit, steps.profile, steps.pace = True, self.profile, self.profile.pace
        elif validates:
            done, self.strategy.extended.validations_done = self.strategy.extended.validations_done, 0
            steps.pass_over_validations(done)
        return steps

    def get_data_adapter(self, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Lets every process make the pipeline of its replicas from a `DatasetCreator`."""

        def make(creator: Any) -> Any:
            strategy: Any = self.strategy
            return strategy.distribute_datasets_from_function(creator, creator.input_options)

        adapter = super().get_data_adapter(original, x, *args, make=make, **kwargs)
        if getattr(adapter, "enqueuer", None) is not None:
            adapter.get_tf_dataset = functools.partial(_not_ahead, adapter.get_tf_dataset)
        return adapter

    def build_model(self, original: Any, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model from the specification of its data, because a batch read for this would be lost."""
        if answers_alone.value:
            original(model, iterator, data_batch)
            return
        # It is unknown what a user's own step reads or calls. It makes its variables when it is traced, as on one
        # device. So do variables with deferred values of a checkpoint: Keras would build them in a scope that loses the values.
        if not _has_own_steps(model) and not _awaits_checkpoint(model):
            if iterator is not None:
                spec = iterator.part_spec
                data_batch = tf.nest.map_structure(lambda s: None if is_none(s) or isinstance(s, tf.OptionalSpec) else s, spec)
            try:
                with self.strategy.scope():
                    model._symbolic_build(data_batch=data_batch)
            except TfrepError:
                raise
            except Exception:
                # Keras builds with dense rows without values. The model may need ragged or sparse rows, or run eagerly. It is
                # then built when the step is traced, which also reports its errors.
                pass
        self.strategy.extended.synchronize_new_variables()

    # Steps.

    def make_function(self, original: Any, model: Any, step_function: Any) -> Any:
        """Makes a train or test function that also takes whole batches, as from `train_on_batch`."""
        strategy = self.strategy
        phase = "test" if step_function == model.test_step else "train"
        extended, warns = strategy.extended, bool(self.layers_not_seen)

        def build(step_function: Any) -> Any:
            if strategy.extended.compiles_whole_steps or not model.jit_compile:
                return original(model, step_function)
            with _without_jit(model):
                return original(model, compiled_between_collectives(step_function))

        if not self.has_several and not self.layers_not_seen:
            return build(step_function)  # No other replica takes part, and another call would cost time in every step.

        run = build(step_function)
        if self.has_several:
            by_replicas = build(with_global_logs(model, phase, strategy, step_function))
            run = OneDeviceSteps(
                extended, model, phase, lambda: build(step_function), by_replicas, not model.built, model.jit_compile
            )

        # This runs in every step, so it calls as little as possible.
        def function(iterator: Any) -> Any:
            extended.synchronize_new_variables()
            extended.mark_state_changed()
            takes_whole_batches = not isinstance(iterator, _STEPS)
            if takes_whole_batches:
                iterator = WholeBatches(extended, itertools.islice(iterator, model.steps_per_execution))
            with extended.watching_peers():
                try:
                    logs = run(iterator)
                except tf.errors.OutOfRangeError:
                    if phase == "train" and self.has_several:
                        extended.take_from_first(model)
                    raise
            if model.run_eagerly or tf.config.functions_run_eagerly():
                extended.take_from_first(model)
            if extended.first_batch is not None:
                self.check_first_batch()
            if warns:
                self.warn_of_layers_not_seen()
            extended.count_steps(model, model.steps_per_execution)
            # The logs of a single batch are not read again later.
            return logs_of_all(model, phase, logs) if takes_whole_batches else logs

        return function

    def make_predict_function(self, original: Any, model: Any, force: bool = False) -> None:
        """Makes a predict function that also takes whole batches, as from `predict_on_batch`."""
        extended = self.strategy.extended

        def predicted(batch: Any) -> Any:
            return model.predict_step(batch)

        def made(force: bool) -> Any:
            compiles_all = extended.compiles_whole_steps
            predict_step: Callable[[Any], Any] = predicted
            if model.jit_compile and not compiles_all:
                predict_step = compiled_between_collectives(predict_step)
            prediction = Prediction(model, predict_step, model.jit_compile and compiles_all)
            original(prediction, force=force)
            model.predict_function = prediction.predict_function
            return model.predict_function

        run = made(force)
        if not getattr(run, "takes_whole_batches", False):
            model.predict_function = PredictFunction(self, model, made, run)

    def reduce_per_replica(self, original: Any, values: Any, strategy: Any, reduction: str) -> Any:
        """Gathers the predictions of all replicas, in input order, on every process. Truth values and strings have no mean."""
        if isinstance(values, Whole):
            return values.results
        if reduction == "concat":
            return strategy.extended.gather_outputs(values)

        def told(value: Any) -> Any:
            first = strategy.experimental_local_results(value)[0]
            return first if tf.is_tensor(first) and first.dtype in (tf.bool, tf.string) else value

        return original(tf.nest.map_structure(told, values), strategy, reduction)

    def check_first_batch(self) -> None:
        """Compares the first batches of the ranks, once."""
        first_batch, self.strategy.extended.first_batch = self.strategy.extended.first_batch, None
        if first_batch is not None:
            first_batch.check()


def _not_ahead(make: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns a data set that is not read ahead: Keras's workers read ahead, and must not be asked between epochs."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return make().with_options(options)


def _given(original: Any, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return inspect.signature(original).bind(model, *args, **kwargs).arguments


def _has_own_steps(model: Any) -> bool:
    """Returns whether a step calls the user's own code, which may use layers that `call` does not."""
    own = ("train_step", "test_step", "compute_loss")
    return any(getattr(type(model), name) is not getattr(TensorFlowTrainer, name) for name in own)


def _awaits_checkpoint(model: Any) -> bool:
    """Returns whether a checkpoint holds values for variables that a model has not made yet."""
    awaited = (getattr(layer, "_self_unconditional_deferred_dependencies", None) for layer in model._flatten_layers())
    return not model.built and any(awaited)


@contextlib.contextmanager
def _without_jit(model: Any) -> Iterator[None]:
    """Keeps Keras from compiling a whole step: XLA cannot compile its collectives."""
    jit_compile, model._jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model._jit_compile = jit_compile
