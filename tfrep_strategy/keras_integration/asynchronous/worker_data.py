"""Data of workers: batches that the coordinator sends them, or their own pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import PerWorkerValues, operations_seeded
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.dataset_creator import DatasetCreator
from tfrep_strategy.keras_integration.internals import DataAdapter, TFEpochIterator, data_adapters


class FedData:
    """Batches that the coordinator reads and sends to any free worker: each example is seen once per epoch."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.element_spec = dataset.element_spec
        self._dataset = dataset.prefetch(tf.data.AUTOTUNE)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class WorkerData:
    """A pipeline on each worker. It continues from epoch to epoch until one of them ends."""

    def __init__(self, strategy: Any, source: Any) -> None:
        if isinstance(source, DatasetCreator):
            creator = source
            source = lambda: strategy.distribute_datasets_from_function(creator, creator.input_options)  # noqa: E731

        def read() -> Any:
            with drawn_by_each_worker(strategy.num_workers):
                return source()

        self._distributed = strategy.coordinator.create_per_worker_dataset(read if callable(source) else source)
        self.element_spec = self._distributed.element_spec

    def __iter__(self) -> PerWorkerValues:
        return iter(self._distributed)


class StepsOfWorkers(TFEpochIterator):
    """Reads data on the coordinator. For training with a `DatasetCreator` the workers read it.

    Args:
        driver: The driver of the model.
        **kwargs: The arguments of Keras's loops: the data, and settings.

    Attributes:
        trains: Whether `fit` uses the iterator.
        around_step: Returns a context for each execution of so many steps. It is left when they were handed out.
    """

    def __init__(self, driver: Any, **kwargs: Any) -> None:
        strategy, source = driver.strategy, kwargs.get("x")
        # Only `fit` has class weights, `evaluate` and `predict` have none.
        self.trains = "class_weight" in kwargs
        self.around_step: Callable[[int], contextlib.AbstractContextManager[None]] = lambda steps: contextlib.nullcontext()
        created = isinstance(source, DatasetCreator) and self.trains and kwargs.get("steps_per_epoch") is not None
        on_workers = created or isinstance(source, tf.distribute.DistributedDataset)
        if on_workers:
            source = _as_dataset_only(source, **kwargs)
            kwargs |= {"x": _WorkerAdapter(), "class_weight": None}
        # TensorFlow's iterator adds only the distribution of data to its base class, which differs here.
        super(TFEpochIterator, self).__init__(**kwargs)
        self._driver, self._distribute_strategy = driver, strategy
        dataset: Any = None if on_workers else self.data_adapter.get_tf_dataset()
        endless = on_workers or int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        if self.steps_per_epoch is None and endless:
            raise ConfigurationError(
                message("The data never ends.", hint="say how long an epoch is: steps_per_epoch=...", steps_per_epoch=None)
            )
        self._distributed_dataset = WorkerData(strategy, source) if on_workers else FedData(dataset)
        self.element_spec = self._distributed_dataset.element_spec

    def _enumerate_iterator(self) -> Iterator[Any]:
        """Marks in traces when steps are handed out."""
        for first, last, iterator in super()._enumerate_iterator():
            with self.around_step(last - first + 1):
                yield first, last, iterator

    def tf_sync(self) -> None:
        """Waits for the steps of an epoch."""
        self._driver.end_epoch()


def _as_dataset_only(source: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, **unused: Any) -> Any:
    """Refuses arguments that Keras refuses beside a data set, and adds class weights to the data of a `DatasetCreator`."""
    for name, value, what in (("y", y, "the targets"), ("sample_weight", sample_weight, "the sample weights")):
        if value is not None:
            data_adapters.raise_unsupported_arg(name, what, type(source).__name__)
    if class_weight is None:
        return source
    if not isinstance(source, DatasetCreator):
        raise ConfigurationError(
            message(
                "Class weights cannot be added to a data set that is distributed already.",
                hint="let it yield (x, y, sample_weight), or pass a tfrep.DatasetCreator.",
                class_weight=class_weight,
            )
        )
    return source.with_class_weight(class_weight)


class _WorkerAdapter(DataAdapter):
    """Stands for data that the coordinator does not read."""

    num_batches = batch_size = has_partial_batch = partial_batch_size = None


def drawn_by_each_worker(num_workers: int) -> contextlib.AbstractContextManager[None]:
    """Makes random operations of a pipeline that is traced in the body draw different numbers on each of several workers.

    TensorFlow traces the pipeline of all workers once. The global seed would become a constant of it, and all workers would read
    the same batches. Operations with their own seed keep it.

    Args:
        num_workers: The number of workers. A single one draws by the global seed.
    """
    return operations_seeded(None) if num_workers > 1 else contextlib.nullcontext()
