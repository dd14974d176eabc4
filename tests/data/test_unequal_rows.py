"""Batches whose tensors have different numbers of rows: which pipelines tell that they may be cut; what becomes of others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.data.own_part import OwnReplicas, cut_low, cutting
from tfrep_strategy.data.pipeline_functions import first_stateful_operation, parts_fit

Dataset = tf.data.Dataset
_TWO = {"size": tf.TensorSpec([None]), "other": tf.TensorSpec([None])}


@tf.autograph.experimental.do_not_convert
def halves(value: tf.Tensor) -> tf.Tensor:
    return value * 0.5


def labeled(batch: int = 4, drop: bool = False) -> tf.data.Dataset:
    return Dataset.from_tensor_slices((np.arange(20.0), np.arange(20))).batch(batch, drop)


def unlabeled(batch: int = 12, drop: bool = False) -> tf.data.Dataset:
    return Dataset.from_tensor_slices(np.arange(60.0)).map(halves).batch(batch, drop)


def generated(*sizes: tuple[int, int]) -> tf.data.Dataset:
    batches = [{"size": np.arange(a, dtype="float32"), "other": np.arange(b, dtype="float32")} for a, b in sizes]
    return Dataset.from_generator(lambda: iter(batches), output_signature=_TWO)


def joined(*parts: Any) -> Any:
    return parts


PIPELINES: dict[str, tuple[Callable[[], tf.data.Dataset], bool]] = {
    "one batch": (labeled, True),
    "one batch, repeated, shuffled and kept": (lambda: labeled().repeat().shuffle(3).cache().take(5).prefetch(1), True),
    "a map of rows": (lambda: labeled().map(lambda x, y: (x * 2, y)), True),
    "a map that mixes rows": (lambda: labeled().map(lambda x, y: (x[::-1], y)), False),
    "batches of one size, mixed": (lambda: labeled(4, True).map(lambda x, y: (x[::-1], tf.ensure_shape(y, [4]))), True),
    "a generator": (lambda: generated((2, 3)), False),
    "a generator of one tensor": (lambda: generated((2, 3)).map(lambda batch: batch["size"]), True),
    "side by side, alike": (lambda: Dataset.zip((labeled(), labeled())), True),
    "side by side, of sizes that are divided": (lambda: Dataset.zip((labeled(), unlabeled())), True),
    "side by side, endless": (lambda: Dataset.zip((labeled().repeat(), unlabeled(8, True).repeat())), True),
    "side by side, of sizes that are not divided": (lambda: Dataset.zip((labeled(5), unlabeled(12))), False),
    "side by side, with a last batch that is divided": (lambda: Dataset.zip((labeled(4), unlabeled(16).take(3).skip(1))), True),
    "side by side, with a last batch that is not": (lambda: Dataset.zip((labeled(6), Dataset.range(21).batch(12))), False),
    "side by side, of open length": (lambda: Dataset.zip((labeled(), Dataset.range(60).filter(lambda n: n > 1).batch(8))), False),
    "side by side, one of which is a generator": (lambda: Dataset.zip((labeled(), generated((4, 4)))), False),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_pipeline_tells(name: str) -> None:
    make, fits = PIPELINES[name]
    assert parts_fit(make(), 2) == fits
    cut = make().map(cutting(make(), OwnReplicas(2, 0, 2)))
    stateful = first_stateful_operation(cut._map_func.function)
    assert (stateful is None) == fits, "where the pipeline does not tell, each batch is asked"


def sizes_of_parts(steps: Any) -> list[list[list[int]]]:
    return [[[len(leaf) for leaf in tf.nest.flatten(part)] for part in step.parts] for step in steps]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((4, 12), [[2, 2, 6], [2, 2, 6]]), ((5, 15), [[5, 5, 15], [0, 0, 0]]), ((5, 5), [[3, 3, 3], [2, 2, 2]])],
)
def test_parts_of_batches_side_by_side(sizes: tuple[int, int], parts: list[list[int]]) -> None:
    """A process computes maps of its own examples only where its parts fit, and gets the same parts either way."""
    data = Dataset.zip((labeled(sizes[0]), unlabeled(sizes[1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sizes_of_parts(data.map(cutting(data, OwnReplicas(2, 0, 2)))) == [parts] * (20 // sizes[0])
        for rank in range(2):
            cut = cut_low(data, OwnReplicas(2, rank, 1), None)
            assert sizes_of_parts(cut.dataset) == [[parts[rank]]] * (20 // sizes[0])
            assert ("map(halves)" in cut.above) == (sizes == (4, 12))


@pytest.mark.parametrize(("other", "rank", "told"), [(3, 0, 1), (3, 1, 0), (2, 0, 0)])
def test_a_batch_that_stays_whole_is_told_once(other: int, rank: int, told: int) -> None:
    """By the process of replica 0, which computes it."""
    data = generated((2, other), (4, 2 * other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        steps = list(data.map(cutting(data, OwnReplicas(2, rank, 1))))
    whole = [[[other, 2]], [[2 * other, 4]]] if rank == 0 else [[[0, 0]], [[0, 0]]]
    assert sizes_of_parts(steps) == (whole if other == 3 else [[[1, 1]], [[2, 2]]])
    messages = [str(each.message) for each in caught if "different numbers of rows" in str(each.message)]
    assert len(messages) == told
