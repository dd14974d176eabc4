"""What an `input_fn` gives to the replicas: a batch of its own for each."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.of_process import process_communicator

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
