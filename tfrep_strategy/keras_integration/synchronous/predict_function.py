"""A predict function that also takes whole batches, as `predict_on_batch` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import KnownRows, Shards
from tfrep_strategy.keras_integration.synchronous.one_device_steps import WholeBatches

_APART = KnownRows(are_apart=True)
"""Batches that each replica has for itself: those of the only one, too."""


class PredictFunction:
    """Predicts the rows of batches: with steps of one device where that is possible, else by replicas.

    Args:
        driver: The driver of the strategy.
        model: The model.
        make: Makes Keras's function again.
        run: What it has made.
    """

    takes_whole_batches = True

    def __init__(self, driver: Any, model: Any, make: Callable[..., Any], run: Any) -> None:
        self._driver, self._model, self._make = driver, model, make
        self._builds = not model.built
        self._needs_total = self._builds  # A layer that was built for any number of rows could not be built again.
        self._ways = {_APART: (run, None)}
        """By what is known of the rows of batches: what runs their steps, and how they are partitioned, if so."""
        self._traced: set[KnownRows] = set()

    def __call__(self, batches: Any) -> Any:
        extended = self._driver.strategy.extended
        self._driver.check_first_batch()
        with extended.watching_peers():
            known = _APART
            if self._driver.has_several:
                if not all(isinstance(batch, Shards) for batch in batches):
                    batches = WholeBatches(extended, batches)
                known = (batches if isinstance(batches, WholeBatches) else self._driver.read_last).known_rows
            return extended.kept_outputs(self._predicted(list(batches), known))

    def _predicted(self, batches: list[Any], known: KnownRows) -> Any:
        way = known if self._needs_total else known._replace(total=None)
        if way.are_apart:
            way = _APART
        extended = self._driver.strategy.extended
        if way not in self._ways:
            self._ways[way] = self._made(), extended.new_partitioned_steps(self._builds, way, self._model, "predict")
        run, steps = self._ways[way]
        try:
            with extended.partitioned_by(steps, bool(self._model.jit_compile)):
                if way not in self._traced and self._model.built and hasattr(run, "get_concrete_function"):
                    # Else it would be traced for the size of the first batch, and again for the last, smaller one.
                    run.get_concrete_function(tf.nest.map_structure(_of_any_size, batches))
                outputs = run(batches)
        except tf.errors.OpError as error:
            if steps is not None:
                steps.tell_lines(error)
            raise
        except Exception:
            if way in self._traced or known == way or way.are_apart:
                raise
            self._needs_total = True  # A model may ask how many rows there are, as on one device.
            return self._predicted(batches, known)
        self._traced.add(way)
        return outputs

    def _made(self) -> Any:
        run = self._make(force=True)
        self._model.predict_function = self
        return run


def _of_any_size(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
