"""Whether the graph tells of each operation and layer of Keras that it treats every row for itself, as can be seen by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_every_layer import deterministic, random, training_of
from test_every_operation import CALLS, ONLY_EAGERLY, tensors_of

from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.row_growth import growth_of, note_own_seed
from tfrep_strategy.shares import Share

pytestmark = pytest.mark.lane("rows")

NO_STRATEGY: Any = None
OTHERWISE = {
    "associative_scan": "loses the dimension of rows",
    "ctc_decode": "has rows in the second dimension of its result",
    "vstack": "puts both inputs one behind the other, which is told apart",
    "AugMix": "takes single elements of vectors, in some of the ways that it chooses while it is traced",
    "RandAugment": "takes single elements of vectors, in some of the ways that it chooses while it is traced",
    "RandomElasticTransform": "moves pictures by what it draws for the first one",
}


def _three_rows(row: tf.Tensor) -> tf.Tensor:
    if row.dtype == tf.string:
        return tf.repeat(row, 3, axis=0)
    if row.dtype.is_integer or row.dtype == tf.bool:
        return tf.concat([tf.roll(row, shift, -1) for shift in range(3)], 0)
    return tf.concat([row * tf.cast(factor, row.dtype) for factor in (1.0, 0.9, 1.1)], 0)


def _told_and_seen(call: Callable[[Any], Any], inputs: Any, is_random: bool) -> list[tuple[bool, bool]]:
    """Returns for each result that has rows whether the graph tells that they depend on others, and whether they do."""
    rows = list(map(_three_rows, tf.nest.flatten(inputs)))
    told: list[bool | None] = []
    axes: list[int] = []

    @tf.function(input_signature=[tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in rows], autograph=False)
    def traced(*tensors: tf.Tensor) -> Any:
        results = [t for t in tensors_of(call(tf.nest.pack_sequence_as(inputs, list(tensors)))) if t.shape.rank != 0]
        if not results:
            return []
        grows = growth_of(Step(NO_STRATEGY, Share.equal(2)), results[0])
        told.clear()
        axes[:] = [grows.axis(t) or 0 for t in results]
        told.extend(None if grows.axis(t) is None and t not in grows.compared else t in grows.compared for t in results)
        return results

    whole = traced(*rows)
    singles = [traced(*(each[i : i + 1] for each in rows)) for i in range(3)]
    of_singles = [tf.concat(parts, axis) for axis, *parts in zip(axes, *singles, strict=True)]
    seen = [not is_random and _differ(found, joined) for found, joined in zip(whole, of_singles, strict=True)]
    assert None not in [t for t, mixes in zip(told, seen, strict=True) if not mixes], "The rows are not found."
    return [(t, mixes) for t, mixes in zip(told, seen, strict=True) if t is not None]


def _differ(whole: tf.Tensor, joined: tf.Tensor) -> bool:
    if whole.shape != joined.shape:
        return True
    if whole.dtype == tf.string:
        return bool(tf.reduce_any(whole != joined))
    return not np.allclose(whole, joined, rtol=1e-3, atol=1e-4, equal_nan=True)


def _layers(made: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, (make, inputs) in made.items():
        layer = make()
        layer(tf.nest.map_structure(lambda x: keras.Input(x.shape[1:], dtype=x.dtype), inputs))
        result[name] = (lambda given, layer=layer: layer(given, **training_of(layer))), inputs
    return result


@pytest.mark.parametrize("kind", ["operations", "layers", "random layers"])
def test_what_is_told_is_what_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = keras.random.SeedGenerator.next  # In a step each replica has seeds of its own.
    monkeypatch.setattr(keras.random.SeedGenerator, "next", lambda self, ordered=True: note_own_seed(draw(self, ordered)))
    if kind == "operations":
        tried = {name: ((lambda given, call=call: call(*given)), list(inputs)) for name, (call, inputs) in CALLS.items()}
        tried = {name: each for name, each in tried.items() if name not in ONLY_EAGERLY}
    else:
        tried = _layers(random() if "random" in kind else deterministic())
    failed = []
    for name, (call, inputs) in tried.items():
        if name in OTHERWISE:
            continue
        try:
            failed += [f"{name}: told {t}, seen {s}" for t, s in _told_and_seen(call, inputs, "random" in kind) if t != s]
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__} {' '.join(str(error).split())[-300:]}")
    assert not failed, "\n".join(failed)
