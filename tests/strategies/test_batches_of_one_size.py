"""The scenarios on batches of one size, whose steps may be traced for the rows they have."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import scenarios
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from test_one_device_answer import assert_same, mirrored

pytestmark = pytest.mark.lane("rows")


@pytest.fixture
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the rows that would make a smaller batch at the end, here and on one device."""
    adapt, batch = ArrayDataAdapter.__init__, tf.data.Dataset.batch

    def adapt_whole_batches(self: Any, x: Any, y: Any = None, sample_weight: Any = None, **others: Any) -> None:
        given, size = (x, y, sample_weight), others.get("batch_size") or 32
        rows = len(keras.tree.flatten(x)[0])
        if kept := rows // size * size:
            given = keras.tree.map_structure(lambda array: array[:kept] if kept < rows and array is not None else array, given)
        adapt(self, *given, **others)

    def whole_batches(self: Any, batch_size: Any, drop_remainder: bool = False, **others: Any) -> Any:
        return batch(self, batch_size, drop_remainder or int(self.cardinality()) >= int(batch_size), **others)

    monkeypatch.setattr(ArrayDataAdapter, "__init__", adapt_whole_batches)
    monkeypatch.setattr(tf.data.Dataset, "batch", whole_batches)


@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("name", sorted(scenarios.SCENARIOS))
def test_two_mirrored_replicas(name: str) -> None:
    with mirrored(2).scope():
        found = scenarios.run(name)
    assert_same(found, scenarios.run(name), name)
