"""Every operation and layer of Keras gives replicas, on parts of the rows, what it gives one device on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras_integration.test_every_layer import deterministic, training_of
from keras_integration.test_every_operation import CALLS, ONLY_EAGERLY, tensors_of
from partitioner.replicas import differences

from tfrep_strategy.partitioner.placements import Shard

pytestmark = pytest.mark.lane("rows")


def _three_rows(row: tf.Tensor) -> tf.Tensor:
    if row.dtype == tf.string:
        return tf.repeat(row, 3, axis=0)
    if row.dtype.is_integer or row.dtype == tf.bool:
        return tf.concat([tf.roll(row, shift, -1) for shift in range(3)], 0)
    return tf.concat([row * tf.cast(factor, row.dtype) for factor in (1.0, 0.9, 1.1)], 0)


def _layers() -> dict[str, tuple[Callable[[Any], Any], Any]]:
    result = {}
    for name, (make, inputs) in deterministic().items():
        layer = make()
        layer(tf.nest.map_structure(lambda x: keras.Input(x.shape[1:], dtype=x.dtype), inputs))
        result[name] = (lambda given, layer=layer: layer(given, **training_of(layer))), inputs
    return result


@pytest.mark.parametrize("kind", ["operations", "layers"])
@pytest.mark.parametrize("counts", [(2, 1), (3, 0)], ids=str)
def test_parts_give_what_all_rows_give(kind: str, counts: tuple[int, ...]) -> None:
    tried: dict[str, Any] = _layers()
    if kind == "operations":
        tried = {name: ((lambda given, call=call: call(*given)), list(inputs)) for name, (call, inputs) in CALLS.items()}
    failed = []
    for name, (call, inputs) in tried.items():
        if name in ONLY_EAGERLY:
            continue
        rows = [_three_rows(x).numpy() for x in tf.nest.flatten(inputs)]

        def called(*tensors: tf.Tensor, call: Any = call, inputs: Any = inputs) -> list[tf.Tensor]:
            return tensors_of(call(tf.nest.pack_sequence_as(inputs, list(tensors))))

        try:
            worst, step, _ = differences(called, rows, [Shard(0)] * len(rows), counts, in_function=True)
            if worst > 1e-5:
                failed.append(f"{name}: {worst}")
            print("WITHOUT", name, list(step.without_rule))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__} {' '.join(str(error).split())[-300:]}")
    assert not failed, "\n".join(failed)
