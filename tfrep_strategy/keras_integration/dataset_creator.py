"""A function that makes a data set, passed instead of the data set. It works under every strategy and under none."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.internals import TFDatasetAdapter, make_class_weight_map_fn


class DatasetCreator:
    """Data for `fit`, `evaluate` and `predict` that is made where it is read.

    In `fit` under a parameter-server strategy, with `steps_per_epoch`, every worker runs its own pipeline, which continues from
    epoch to epoch and should repeat and shuffle. Under a multi-worker strategy every process makes the pipeline of
    its replica. Under no strategy, and in validation, `evaluate` and `predict` under a parameter-server strategy, one
    pipeline is read, each time from its start.

    Args:
        dataset_fn: Takes a `tf.distribute.InputContext` and returns a `tf.data.Dataset` of batches. The batches are those
            of one replica: `context.get_per_replica_batch_size(global_batch_size)`.
        input_options: `tf.distribute.InputOptions` for the strategy, if any.

    Raises:
        TypeError: `dataset_fn` is not callable or takes no argument, or `input_options` has another type. Also raised when
            the data is made, if it is not a `tf.data.Dataset`.

    Example:
        >>> def dataset_fn(context):
        ...     return tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(1024).batch(32)
        >>> history = make_model().fit(tfrep.DatasetCreator(dataset_fn), epochs=2, steps_per_epoch=10, verbose=0)
    """

    def __init__(self, dataset_fn: Callable[[Any], Any], input_options: Any = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(f"`dataset_fn` for `DatasetCreator` must be a `callable`. Received: {dataset_fn!r}")
        if input_options is not None and not isinstance(input_options, tf.distribute.InputOptions):
            raise TypeError(
                f"`input_options` for `DatasetCreator` must be a `tf.distribute.InputOptions`. Received: {input_options!r}"
            )
        try:
            inspect.signature(dataset_fn).bind(None)
        except TypeError:
            raise TypeError(
                "`dataset_fn` for `DatasetCreator` must take one argument, a `tf.distribute.InputContext`."
                f" Received: {dataset_fn!r} with the signature {inspect.signature(dataset_fn)}"
            ) from None
        except ValueError:
            pass  # A builtin without a signature.
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, input_context: Any = None) -> Any:
        """Makes the data set.

        Args:
            input_context: The argument of `dataset_fn`; by default that of one process with one replica.

        Returns:
            A `tf.data.Dataset`.

        Raises:
            TypeError: `dataset_fn` returned another type.
        """
        dataset = self.dataset_fn(tf.distribute.InputContext() if input_context is None else input_context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                "`dataset_fn` for `DatasetCreator` must return a `tf.data.Dataset`."
                f" Received: {dataset!r} (of type {type(dataset)})"
            )
        return dataset

    def with_class_weight(self, class_weight: Mapping[int, float]) -> DatasetCreator:
        """Returns a creator whose examples (x, y) are weighted by class, as in `fit`."""
        weigh = make_class_weight_map_fn(class_weight)
        return DatasetCreator(lambda context: self(context).map(weigh), self.input_options)


def make_and_adapt(get_data_adapter: Any, x: Any, *args: Any, make: Any = None, **kwargs: Any) -> Any:
    """Adapts data as Keras does, including a `DatasetCreator` or a distributed data set.

    Args:
        get_data_adapter: Keras's own function, with its arguments.
        x: The data.
        make: Makes the data set of a creator; by default, for one process with one replica.
    """
    if isinstance(x, DatasetCreator):
        class_weight = kwargs.pop("class_weight", None)
        creator = x if class_weight is None else x.with_class_weight(class_weight)
        x = creator() if make is None else make(creator)
        kwargs["shuffle"] = False
    if isinstance(x, tf.distribute.DistributedDataset):
        return _adapt_distributed(get_data_adapter, x, *args, **kwargs)
    return get_data_adapter(x, *args, **kwargs)


def _adapt_distributed(get_data_adapter: Any, x: Any, *args: Any, class_weight: Any = None, **kwargs: Any) -> Any:
    """Adapts a data set that the user has distributed. Keras recognizes those of TensorFlow's strategies by name."""
    get_data_adapter(tf.data.Dataset.range(0), *args, **kwargs)  # Refuses arguments that no data set takes.
    return TFDatasetAdapter(x, class_weight)


EXPERIMENTAL = types.ModuleType("keras.utils.experimental")
"""The module of `DatasetCreator` in Keras 2."""
EXPERIMENTAL.DatasetCreator = DatasetCreator  # type: ignore[attr-defined]
