"""Fingerprints: what they see, and that they cost the same for large arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf

from tfrep_strategy.data.agreement import Fingerprint, difference

pytestmark = pytest.mark.lane("quick")

_X = np.random.RandomState(0).rand(60, 5)


def _digest(value: Any) -> bytes:
    return Fingerprint({"x": value}).digest


@pytest.mark.parametrize("make", [
    lambda x: x, lambda x: x.T, lambda x: x[::2], lambda x: x.astype(str), lambda x: x.astype(object), tf.constant,
    lambda x: tf.constant(x.astype(str)), tf.RaggedTensor.from_tensor, tf.sparse.from_dense, pd.DataFrame,
    lambda x: pd.Series(x[:, 0]), lambda x: pd.DataFrame({"a": x[:, 0], "b": x[:, 0].astype(str)}),
    scipy.sparse.csr_matrix, scipy.sparse.coo_matrix, lambda x: {"a": [x], "b": (x, None)}, lambda x: x.astype("datetime64[s]"),
    lambda x: {"weights": {0: float(x[0, 0])}},
])  # fmt: skip
def test_equal_data_has_one_digest_and_other_data_another(make: Any) -> None:
    whole = 1000 * _X
    assert _digest(make(whole)) == _digest(make(whole.copy()))
    changed = whole.copy()
    changed[0, 0] += 7
    assert _digest(make(whole)) != _digest(make(changed))
    assert "x" in difference([Fingerprint({"x": make(v)}).leaves for v in (whole, changed)])


def test_shapes_dtypes_and_names_count() -> None:
    values = [_X, _X[:, :4], _X.astype(np.float32), _X.reshape(5, 60), {"a": _X}, {"b": _X}, [_X], None, 1, True]
    assert len({_digest(value) for value in values}) == len(values)


@pytest.mark.parametrize("columns", [1, 10, 784, 1000])
def test_mostly_empty_rows(columns: int) -> None:
    """One-hot labels whose classes are in another order, and pictures with an empty border."""
    labels = np.random.RandomState(0).randint(0, columns, 20_000)
    one_hot = np.zeros((20_000, columns), np.uint8)
    other = one_hot.copy()
    one_hot[np.arange(20_000), labels] = 1
    other[np.arange(20_000), (labels + 1) % columns] = 1
    other[0] = 1 - one_hot[0] if columns == 1 else other[0]
    assert _digest(one_hot) != _digest(other)


def test_message_names_ranks_and_the_first_difference() -> None:
    other = _X.copy()
    other[3, 2] = -1
    text = difference([Fingerprint({"y": 1, "x": {"a": value}}).leaves for value in (_X, other, _X, other)])
    assert text.startswith("Ranks [1, 3] were given other data than rank 0: x['a'] differs.")
    assert f"rank_0=\"x['a'][3, 2] = {_X[3, 2]}\", rank_1=\"x['a'][3, 2] = -1.0\"" in text
    assert "rank_1='nothing'" in difference([Fingerprint(given).leaves for given in ({"x": 1}, {})])


def _milliseconds(value: Any) -> float:
    best = np.inf
    for _ in range(20):
        begun = time.perf_counter()
        _digest(value)
        best = min(best, time.perf_counter() - begun)
    return 1000 * best


def test_cost_does_not_grow() -> None:
    """200 MB and 2 MB, also where a flat view would have to be copied."""
    large = np.zeros((500_000, 100), np.float32)
    for view in (lambda x: x, lambda x: x.T, lambda x: x[::2, ::2], lambda x: pd.DataFrame(x, copy=False)):
        small = _milliseconds(view(large[:5_000]))
        assert _milliseconds(view(large)) < max(3 * small, 1.0)
