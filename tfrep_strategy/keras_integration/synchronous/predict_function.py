"""A predict function that also takes whole batches, as `predict_on_batch` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import CannotPartitionError, TfrepError
from tfrep_strategy.keras_integration.protocol import Shards
from tfrep_strategy.keras_integration.synchronous.one_device_steps import WholeBatches


class PredictFunction:
    """Predicts the rows of batches: with steps of one device where that is possible, else by replicas.

    Args:
        driver: The driver of the strategy.
        model: The model.
        make: Makes Keras's function again; `asks_for_rows` if the model asks how many rows there are.
        run: What it has made.
    """

    takes_whole_batches = True

    def __init__(self, driver: Any, model: Any, make: Callable[..., Any], run: Any) -> None:
        self._driver, self._model, self._make = driver, model, make
        extended = driver.strategy.extended
        # Between processes a step is traced for any number of rows, and a model that was built so could not be built otherwise.
        can_be_traced = model.built or not driver.has_several_ranks
        self._partitions = driver.has_several and not model.run_eagerly and extended.partitions_steps and can_be_traced
        self._builds = not model.built
        self._ways = {False: (run, None)}
        """By whether the tensors of a batch have one number of rows: what runs its steps, and how they are partitioned, if so."""
        self._untraced: set[bool | None] = {True, None, False}

    def __call__(self, batches: Any) -> Any:
        extended = self._driver.strategy.extended
        self._driver.check_first_batch()
        with extended.watching_peers():
            alike: bool | None = False
            if self._driver.has_several:
                if not all(isinstance(batch, Shards) for batch in batches):
                    batches = WholeBatches(extended, batches)
                whole = isinstance(batches, WholeBatches)
                alike = batches.rows_are_alike if whole else self._driver.read_last.rows_are_alike
            try:
                outputs = self._predicted(list(batches), alike)
            except tf.errors.OpError as error:
                _, steps = self._ways.get(alike, (None, None))
                if steps is not None:
                    steps.tell_lines(error)
                raise
            except CannotPartitionError:
                self._partitions = False
                outputs = self._predicted(list(batches), False)
        return extended.kept_outputs(outputs)

    def _predicted(self, batches: list[Any], alike: bool | None) -> Any:
        extended = self._driver.strategy.extended
        if not self._partitions:
            alike = False
        if alike not in self._ways:
            self._ways[alike] = self._made(), extended.new_partitioned_steps(self._builds, alike)
        run, steps = self._ways[alike]
        if alike in self._untraced and self._model.built and hasattr(run, "get_concrete_function"):
            try:
                # Else it would be traced for the size of the first batch, and again for the last, smaller one.
                with extended.partitioned_steps.to(steps):
                    run.get_concrete_function(tf.nest.map_structure(_of_any_size, batches))
            except (TfrepError, tf.errors.OpError):
                raise
            except Exception:  # A model may ask how many rows there are, as on one device. Other errors come again.
                self._partitions = False
                run, steps = self._ways[False] = self._made(asks_for_rows=True), None
                self._untraced.clear()
        self._untraced.discard(alike)
        with extended.partitioned_steps.to(steps):
            return run(batches)

    def _made(self, **settings: Any) -> Any:
        run = self._make(force=True, **settings)
        self._model.predict_function = self
        return run


def _of_any_size(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
