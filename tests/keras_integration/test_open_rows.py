"""What a step sees of the number of its rows, and what happens when it needs more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.keras_integration.synchronous.open_rows import traced_for_any_rows

BATCH = {"x": tf.ones([4, 2]), "weight": tf.constant(2.0), "rows": tf.RaggedTensor.from_row_lengths([1, 2], [1, 1])}


class Builds:
    """Builds functions as Keras does, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[Any], Any]) -> Any:
        self.count += 1
        return tf.function(lambda batches: [step(batch) for batch in batches])


def test_only_the_number_of_rows_is_hidden() -> None:
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        seen.append((batch["x"].shape.as_list(), batch["weight"].shape.as_list(), type(batch["rows"])))
        return tf.reduce_sum(batch["x"]), tf.shape(batch["x"])[0]

    builds = Builds()
    function = traced_for_any_rows(builds, step)
    for _ in range(2):
        ((total, rows),) = function([BATCH])
        assert (float(total), int(rows)) == (8.0, 4)
    assert seen == [([None, 2], [], tf.RaggedTensor)]
    assert builds.count == 1


def test_a_step_that_needs_the_number_is_traced_for_it() -> None:
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        seen.append(batch["x"].shape[0])
        return tf.reduce_sum(batch["x"] + tf.zeros([batch["x"].shape[0], 1]))

    builds = Builds()
    function = traced_for_any_rows(builds, step)
    assert [float(function([BATCH])[0]) for _ in range(2)] == [8.0, 8.0]
    assert seen == [None, 4]
    assert builds.count == 2


@pytest.mark.parametrize("error", [ConfigurationError, StopIteration, tf.errors.OutOfRangeError])
def test_what_has_another_reason_is_raised_at_once(error: type[Exception]) -> None:
    calls: list[Any] = []

    def run(batches: Any) -> Any:
        calls.append(batches)
        raise error("no") if error is not tf.errors.OutOfRangeError else error(None, None, "no")

    function = traced_for_any_rows(lambda step: run, lambda batch: batch)
    with pytest.raises(error):
        function([BATCH])
    assert len(calls) == 1


def test_an_error_of_the_step_is_its_own() -> None:
    def step(batch: Any) -> Any:
        raise KeyError("y")

    with pytest.raises(KeyError, match="y"):
        traced_for_any_rows(Builds(), step)([BATCH])
