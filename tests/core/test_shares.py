"""The rule of shares, as formulas: what the replicas have together is what one device has."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.core.step import Share

pytestmark = pytest.mark.lane("quick")

CUTS = ([3, 1, 0], [0, 0, 5], [2, 2, 2], [0, 0, 0])
EXAMPLES = tf.constant([2.0, -1.0, 4.0, 0.5, 7.0, 3.0])


def shares_of(cut: list[int]) -> list[Share]:
    total = tf.constant(sum(cut), tf.int64)
    return [Share.of_batch(tf.constant(size, tf.int64), total) for size in cut]


def parts_of(cut: list[int]) -> list[tf.Tensor]:
    return tf.split(EXAMPLES[: sum(cut)], cut)


def near(found: object, wanted: object) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_means_and_their_gradients_are_those_of_the_batch(cut: list[int]) -> None:
    scale = tf.Variable(1.5)

    def mean(examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(scale * examples))  # NaN where there are no examples.
        return loss, tape.gradient(loss, scale)

    replicas = zip(shares_of(cut), parts_of(cut), strict=True)
    weighted = [[share.weighted(value) for value in mean(part)] for share, part in replicas]
    wanted = mean(EXAMPLES[: sum(cut)]) if sum(cut) else (0.0, 0.0)
    near(tf.reduce_sum(weighted, 0), wanted)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_weighted_mean_counts_a_replica_as_its_examples(cut: list[int]) -> None:
    weights = [share.as_weight("float64") for share in shares_of(cut)]
    assert {weight.dtype for weight in weights} == {tf.float64}
    near(weights, np.array(cut) / max(sum(cut), 1))
    silenced = [share.silenced([tf.reduce_mean(part)])[0] for share, part in zip(shares_of(cut), parts_of(cut), strict=True)]
    near(silenced, [tf.reduce_mean(part) if len(part) else 0.0 for part in parts_of(cut)])


def test_what_is_unweighed_first_is_weighed_back() -> None:
    for share, part in zip(shares_of([3, 1, 0]), parts_of([3, 1, 0]), strict=True):
        near(share.weighted(share.unweighted(tf.reduce_sum(part))), tf.reduce_sum(part))


def test_gradients_through_a_collective_are_those_of_one_device() -> None:
    """Replica r computes `loss_r = mean_r(x) * s` with `s = sum of a_q`, and one device `sum of share_r * loss_r`."""
    cut = [3, 1, 0]
    replicas = list(zip(shares_of(cut), parts_of(cut), strict=True))
    of_sum = [tf.reduce_mean(part) for _, part in replicas]  # The gradient of each loss with respect to `s`.

    def summed(own: list[tf.Tensor]) -> list[tf.Tensor]:
        del own
        return [tf.add_n([share.weighted(gradient) for (share, _), gradient in zip(replicas, of_sum, strict=True)])]

    for (share, part), gradient in zip(replicas, of_sum, strict=True):
        of_a = share.weighted(share.through(summed, [gradient])[0])
        near(of_a, tf.reduce_mean(EXAMPLES[:4]) if len(part) else 0.0)


def test_an_empty_share_silences_what_is_not_finite_and_every_type_stays() -> None:
    empty, half, _ = shares_of([0, 1, 1])
    rows = tf.IndexedSlices(tf.constant([[np.nan, 1.0]]), tf.constant([2]), tf.constant([4, 2]))
    np.testing.assert_array_equal(empty.weighted(tf.constant([np.nan, np.inf, 1.0])), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(empty.weighted(rows).values, [[0.0, 0.0]])
    assert empty.weighted(None) is None
    assert (half.weighted(tf.constant([2.0], tf.float16)).dtype, half.weighted(tf.constant(2j)).numpy()) == (tf.float16, 1j)
    # A third of 100 is 33.25 in bfloat16. The product with a third in bfloat16 would be 33.5.
    assert float(Share.equal(3).weighted(tf.constant(100.0, tf.bfloat16))) == 33.25
