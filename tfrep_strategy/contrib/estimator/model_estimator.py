"""An estimator made of a Keras model: it trains, evaluates and predicts from the checkpoints of its folder.

What an `input_fn` gives to the replicas: another batch for each.

Trains, and evaluates checkpoints in between.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.contrib.estimator.run_config import RunConfig, check_strategy, strategy_for
from tfrep_strategy.contrib.estimator.session_hooks import HookCalls, Session
from tfrep_strategy.contrib.estimator.training_steps import (
    EvaluationSteps,
    SavedModel,
    TrainingSteps,
    check_model,
    plain,
    summaries_in,
)
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.strategies.groups import process_communicator

InputFn = Callable[..., Any]


def seed_operations(seed: int | None) -> None:
    """Sets TensorFlow's seed, so that the pipelines of all ranks shuffle alike. Every process must call it.

    Args:
        seed: The seed. None: the chief draws one.
    """
    tf.random.set_seed(process_communicator().broadcast_object(secrets.randbelow(2**31)) if seed is None else seed)


def batches_for(strategy: Any, input_fn: InputFn, steps: int | None, repeats: bool) -> Any:
    """Returns what `fit` or `evaluate` reads: in each step one batch of `input_fn` for each replica.

    An `input_fn` with the argument `input_context` is called once in each process, and says what this process reads. Without it,
    all processes read one pipeline, whose batches go to the replicas in turn: with N replicas, replica i gets the batches i,
    N + i, 2N + i, ...

    Args:
        strategy: The strategy; None for one device.
        input_fn: Returns a `tf.data.Dataset` of batches, or the tensors of one batch.
        steps: How many steps to give at most; None for all.
        repeats: Whether tensors are the batch of every step, and not of one.
    """
    if strategy is None:
        dataset = dataset_of(input_fn, tf.distribute.InputContext(), repeats)
        return dataset if steps is None else dataset.take(steps)

    def own_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = dataset_of(input_fn, context, repeats)
        if not _takes_context(input_fn):
            dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        own = context.num_replicas_in_sync // context.num_input_pipelines
        return dataset if steps is None else dataset.take(steps * own)

    return strategy.distribute_datasets_from_function(own_batches)


def dataset_of(input_fn: InputFn, context: tf.distribute.InputContext, repeats: bool) -> tf.data.Dataset:
    """Calls an `input_fn`.

    Args:
        input_fn: The function.
        context: What it gets if it has the argument `input_context`.
        repeats: Whether tensors are the batch of every step, and not of one.

    Raises:
        ConfigurationError: It returns nothing.
    """
    given = input_fn(input_context=context) if _takes_context(input_fn) else input_fn()
    if isinstance(given, tf.data.Dataset):
        return given
    if given is None:
        raise ConfigurationError(
            message("input_fn returned nothing.", hint="return a tf.data.Dataset of (features, labels).", input_fn=input_fn)
        )
    dataset = tf.data.Dataset.from_tensors(given)
    return dataset.repeat() if repeats else dataset


def _takes_context(input_fn: InputFn) -> bool:
    return "input_context" in inspect.signature(input_fn).parameters


_CHECKPOINT = "model.ckpt"


class Estimator:
    """Trains, evaluates and predicts with copies of a Keras model, through the checkpoints of `model_dir`.

    The model is built again for each strategy that is used, with its weights and its compile settings. The model that was given
    stays as it is. Each call begins with the latest checkpoint, and without one with the weights of the given model. Every rank
    must call `train`, `evaluate` and `export_saved_model`; the chief writes the files.

    **A batch** of an `input_fn` is that of one replica, as it was: with N replicas a step takes N batches. The weights are those of
    one device that trains on the N batches put together.

    Args:
        keras_model: A compiled model that has weights.
        model_dir: Folder of checkpoints and summaries; it goes before that of `config`.
        config: The settings.
        custom_objects: Functions and classes that Keras cannot find by name. Those that `compile` was given need not be listed.

    Raises:
        ConfigurationError: The model is not compiled or has no weights; two folders are given.

    Example:
        >>> estimator = tfrep.estimator.Estimator(make_model(), "models/one")
        >>> dataset = lambda: tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(4)
        >>> results = estimator.train(dataset, steps=10).evaluate(dataset, steps=2)
        >>> sorted(results), int(results["global_step"])
        (['global_step', 'loss'], 10)
    """

    def __init__(
        self,
        keras_model: Any,
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        check_model(keras_model)
        config = config or RunConfig()
        if model_dir is not None and config.model_dir is not None and os.fspath(model_dir) != os.fspath(config.model_dir):
            raise ConfigurationError(
                message("Two model folders are given.", hint="leave out one.", model_dir=model_dir, config=config.model_dir)
            )
        folder = model_dir or config.model_dir
        if folder is None:
            communicator = process_communicator()
            folder = communicator.broadcast_object(None if communicator.rank else tempfile.mkdtemp(prefix="tfrep-estimator-"))
        self.config = config.replace(model_dir=os.path.abspath(os.fspath(folder)))
        self._given, self._custom_objects = keras_model, custom_objects
        self._copies: dict[tuple[Any, bool], SavedModel] = {}

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and summaries, as an absolute path."""
        return os.fspath(self.config.model_dir or "")

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> Estimator:
        """Trains, and writes checkpoints and summaries. It goes on from the latest checkpoint.

        The training ends when the data of all processes ends, after `steps` steps, or at the global step `max_steps`, whichever
        comes first.

        Args:
            input_fn: Returns a `tf.data.Dataset` of (features, labels), with batches for one replica; or such tensors, which are
                the batch of every step. With the argument `input_context` it gets a `tf.distribute.InputContext` and returns the
                data of its process. Otherwise the batches go to the replicas in turn.
            hooks: Objects with methods of a `SessionRunHook`.
            steps: How many more steps to train.
            max_steps: The global step at which to end. If it is reached already, nothing happens.

        Returns:
            This estimator.

        Raises:
            ConfigurationError: `steps` and `max_steps` are both given, or are no whole numbers; several ranks would train apart.
            HookError: A hook failed, on some rank. No checkpoint is written after that.
        """
        return self.train_with(input_fn, hooks, steps, max_steps, lambda: None)

    def train_with(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None,
        steps: int | None,
        max_steps: int | None,
        saved: Callable[[], None],
    ) -> Estimator:
        """Trains as `train`, and calls `saved` on all ranks when a checkpoint of this training was written."""
        if steps is not None and max_steps is not None:
            raise ConfigurationError(
                message("One of two numbers ends a training.", hint="give one.", steps=steps, max_steps=max_steps)
            )
        _check_steps(steps=steps)
        _check_steps(max_steps=max_steps)
        strategy = strategy_for(self.config.train_distribute)
        ranks = process_communicator().size
        if ranks > 1 and not hasattr(strategy, "communicator"):
            hint = "set train_distribute to the tfrep.MultiWorkerStrategy that connects the ranks."
            raise ConfigurationError(message("Each rank would train by itself.", hint=hint, train_distribute=strategy, ranks=ranks))
        latest = self._latest_of_chief()
        copy, start = self._restored(strategy, latest, trains=True)
        if max_steps is not None and start >= max_steps:
            return self
        manager = tf.train.CheckpointManager(
            copy.checkpoint, self.model_dir, max_to_keep=self.config.keep_checkpoint_max, checkpoint_name=_CHECKPOINT
        )

        def save(step: int) -> None:
            copy.global_step = step
            manager.save(checkpoint_number=step)
            saved()

        if latest is None:
            copy.global_step = start
            manager.save(checkpoint_number=start)
        calls = HookCalls(hooks, Session(copy.model, start))
        calls.begin()
        left = steps if max_steps is None else max_steps - start
        with summaries_in(self.model_dir) as summaries:
            between = TrainingSteps(self.config, copy, calls, summaries, save)
            if not calls.session.stop_requested:
                with self._reading(strategy, input_fn, left, repeats=True) as data:
                    copy.model.fit(data, callbacks=[between], shuffle=False, verbose=0)
                calls.check()
            between.go_past(between.done)
        if copy.global_step < between.done:
            save(between.done)
        calls.end()
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates the latest checkpoint; without one, the weights of the given model.

        Args:
            input_fn: Returns data as for `train`. Tensors are one batch.
            steps: How many steps to evaluate at most; None for all of the data.
            hooks: Objects with methods of a `SessionRunHook`. Their loss and metrics are those of the evaluation so far.
            checkpoint_path: A checkpoint to evaluate instead.
            name: Names the folder of the summaries: "eval_NAME" instead of "eval".

        Returns:
            The metrics and "loss", by name, as floats, or arrays of what has several numbers; "global_step" as an int.

        Raises:
            ConfigurationError: `steps` is no whole number.
            HookError: A hook failed, on some rank.
        """
        _check_steps(steps=steps)
        strategy = strategy_for(self.config.eval_distribute)
        copy, step = self._restored(strategy, checkpoint_path or self._latest_of_chief())
        calls = HookCalls(hooks, Session(copy.model, step))
        calls.begin()
        with self._reading(strategy, input_fn, steps, repeats=False) as data:
            between = [EvaluationSteps(calls)] if calls.some_have_hooks else []
            logs = copy.model.evaluate(data, callbacks=between, return_dict=True, verbose=0)
        calls.check()
        calls.end()
        results = plain(logs)
        with summaries_in(os.path.join(self.model_dir, f"eval_{name}" if name else "eval")) as summaries:
            summaries.write(step, results)
        return {**results, "global_step": step}

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: str | Sequence[str] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields predictions of the latest checkpoint, while the data is read. Each process predicts all of the data by itself.

        Args:
            input_fn: Returns a `tf.data.Dataset` of features, or of tuples whose first part is the features; or such tensors.
            predict_keys: The names of outputs to yield; None for all.
            checkpoint_path: A checkpoint to use instead.
            yield_single_examples: Whether to yield the examples one by one, and not in batches.

        Yields:
            The outputs of an example, or of a batch, by name: of its layer, or of the key if the model returns a dict.

        Raises:
            ConfigurationError: The model has no output of such a name.

        Example:
            >>> estimator = tfrep.estimator.model_to_estimator(make_model(), "models")
            >>> [next(iter(each.values())).shape for each in estimator.predict(lambda: x[:2])]
            [(1,), (1,)]
        """
        copy, _ = self._restored(strategy_for(None), checkpoint_path or self.latest_checkpoint())
        predict = tf.function(lambda features: copy.model(features, training=False), reduce_retracing=True)
        for element in dataset_of(input_fn, tf.distribute.InputContext(), repeats=False):
            outputs = _named(copy.model, predict(element[0] if isinstance(element, tuple) else element))
            wanted = list(outputs) if predict_keys is None else [*keras.tree.flatten(predict_keys)]
            if not set(wanted) <= set(outputs):
                hint = f"use one of {sorted(outputs)}."
                raise ConfigurationError(message("The model has no such output.", hint=hint, predict_keys=predict_keys))
            batch = {name: keras.ops.convert_to_numpy(outputs[name]) for name in wanted}
            if not yield_single_examples:
                yield batch
            else:
                for i in range(len(next(iter(batch.values())))):
                    yield {name: values[i] for name, values in batch.items()}

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: None = None,
        checkpoint_path: str | None = None,
    ) -> str:
        """Exports the latest checkpoint as a SavedModel, whose endpoint `serve` takes what the model takes.

        Args:
            export_dir_base: Folder of exports. The new one is named after its global step, so the newest has the largest number.
            serving_input_receiver_fn: None: a Keras model knows its inputs.
            checkpoint_path: A checkpoint to export instead.

        Returns:
            The path of the export.

        Raises:
            ConfigurationError: `serving_input_receiver_fn` is given.
        """
        if serving_input_receiver_fn is not None:
            raise ConfigurationError(
                message(
                    "The inputs of an export are those of the Keras model.",
                    hint="leave it out. Parse and prepare inputs in layers of the model.",
                    serving_input_receiver_fn=serving_input_receiver_fn,
                )
            )
        strategy = strategy_for(self.config.train_distribute)
        copy, step = self._restored(strategy, checkpoint_path or self._latest_of_chief(), trains=True)
        path = os.path.join(os.fspath(export_dir_base), str(step))
        copy.model.export(path, verbose=False)
        return path

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint; None if there is none."""
        return tf.train.latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Returns the names of the variables in the latest checkpoint, such as "dense/kernel"."""
        return list(self._variables())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns the value of a variable in the latest checkpoint.

        Raises:
            ConfigurationError: There is no such variable.
        """
        variables = self._variables()
        if name not in variables:
            raise ConfigurationError(message("No such variable.", hint=f"use one of {sorted(variables)}.", name=name))
        return keras.ops.convert_to_numpy(variables[name])

    def _variables(self) -> dict[str, Any]:
        copy, step = self._restored(strategy_for(None), self.latest_checkpoint())
        named = {variable.path: variable for variable in (*copy.model.variables, *copy.model.optimizer.variables)}
        return {**named, "global_step": np.int64(step)}

    def _restored(self, strategy: Any, path: str | None, trains: bool = False) -> tuple[SavedModel, int]:
        """Returns the model for a strategy as a checkpoint has it, or as it was given where there is none; and the global step.

        An evaluation during a training has a separate model.
        """
        check_strategy(strategy=strategy)
        place = strategy, trains
        if place not in self._copies or path is None:  # It may have been trained, and its checkpoints removed.
            self._copies[place] = SavedModel(self._given, strategy, self._custom_objects)
        return self._copies[place], self._copies[place].restore(path)

    def _latest_of_chief(self) -> str | None:
        return process_communicator().broadcast_object(self.latest_checkpoint())

    @contextlib.contextmanager
    def _reading(self, strategy: Any, input_fn: InputFn, steps: int | None, repeats: bool) -> Iterator[Any]:
        """Yields the data of a call. That it ends is no cause for a warning."""
        seed_operations(self.config.tf_random_seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            yield batches_for(strategy, input_fn, steps, repeats)


model_to_estimator = Estimator
"""The name that `tf.keras.estimator` has for making one."""


def _check_steps(**steps: int | None) -> None:
    ((name, value),) = steps.items()
    if value is not None:
        check_count("A call has at least one step.", **{name: value})


def _named(model: Any, outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, dict):
        return outputs
    flat = keras.tree.flatten(outputs)
    names = getattr(model, "output_names", None) or [layer.name for layer in model.layers[-len(flat) :]]
    return dict(zip(names, flat, strict=True))


@dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`.

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
    """The evaluation of `train_and_evaluate`.

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
