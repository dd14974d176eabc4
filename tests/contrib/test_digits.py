"""The digits that come with the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from tfrep_strategy.contrib.digits import load_digits

pytestmark = pytest.mark.lane("quick")


def test_shapes_dtypes_and_ranges():
    train, test = load_digits()
    assert train.images.shape == (1437, 8, 8, 1)
    assert test.images.shape == (360, 8, 8, 1)
    for part in (train, test):
        assert part.images.dtype == np.float32
        assert part.labels.dtype == np.int64
        assert part.labels.shape == part.images.shape[:1]
        assert part.images.min() == 0.0
        assert part.images.max() == 1.0
        assert set(np.unique(part.images * 16)) == set(range(17))
        assert set(part.labels) == set(range(10))


def test_counts_are_those_that_the_source_gives():
    train, test = load_digits()
    counts = np.bincount(np.concatenate([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_first_picture_is_a_zero():
    image = np.round(load_digits()[0].images[0, :, :, 0] * 16).astype(int)
    assert image.tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]


def test_a_nearest_neighbour_reads_them():
    (images, labels), test = load_digits()
    flat, wanted = images.reshape(len(images), -1), test.images.reshape(len(test.images), -1)
    distances = (flat**2).sum(1) - 2 * wanted @ flat.T
    assert np.mean(labels[distances.argmin(1)] == test.labels) > 0.95


def test_source_and_licence_stand_beside_the_data():
    text = (files("tfrep_strategy") / "contrib" / "digits.txt").read_text("utf-8")
    assert "UCI Machine Learning Repository" in text
    assert "CC BY 4.0" in text
