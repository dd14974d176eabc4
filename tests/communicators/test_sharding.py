"""Parts of tensors become the whole again, and belong to all replicas alike."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.sharding import Even, Owned, owners

SHAPES = [(), (1,), (7,), (8,), (0,), (5, 3), (200, 3), (4, 6), (3, 3, 2, 5), (1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_even_parts(shape: tuple[int, ...], size: int) -> None:
    whole = np.arange(1, 1 + int(np.prod(shape)), dtype="float32").reshape(shape)
    cut = Even(shape, size)
    parts = [cut.part(tf.constant(whole), rank) for rank in range(size)]
    assert {tuple(part.shape) for part in parts} == {tuple(cut.part_shape)}
    np.testing.assert_array_equal(cut.joined(parts).numpy(), whole)
    np.testing.assert_array_equal(cut.rows(tf.constant(whole)).numpy(), [part.numpy().ravel() for part in parts])
    assert cut.part_shape.num_elements() <= max(1.01 * whole.size / size, whole.size / size + 1)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (200, 3), (4, 6), (3, 2, 5)])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_slices(shape: tuple[int, ...], size: int) -> None:
    draw = np.random.RandomState(0)
    indices = draw.randint(0, shape[0], 20)  # Many rows come twice.
    slices = tf.IndexedSlices(tf.constant(draw.randn(20, *shape[1:]), tf.float32), tf.constant(indices), shape)
    cut = Even(shape, size)
    for rank in range(size):
        own = cut.part(slices, rank)
        assert isinstance(own, tf.IndexedSlices)
        assert own.values.shape[1:] == cut.part_shape[1:]
        np.testing.assert_allclose(tf.convert_to_tensor(own), cut.part(tf.convert_to_tensor(slices), rank), rtol=1e-6)


def test_owned_parts() -> None:
    whole = tf.constant([[1.0, 2.0]])
    cut = Owned(whole.shape, 3, owner=2)
    parts = [cut.part(whole, rank) for rank in range(3)]
    assert [tf.size(part).numpy() for part in parts] == [0, 0, 2]
    np.testing.assert_array_equal(cut.joined(parts).numpy(), whole.numpy())


def test_owners_have_about_as_much() -> None:
    sizes = [int(n) for n in np.random.RandomState(0).randint(1, 1000, 200)]
    dealt = owners(sizes, 4)
    held = [sum(n for n, owner in zip(sizes, dealt, strict=True) if owner == rank) for rank in range(4)]
    assert max(held) <= 1.001 * sum(sizes) / 4
