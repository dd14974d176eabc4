"""The rule of shares, as formulas: what the replicas have together is what one device has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.shares import Share

pytestmark = pytest.mark.lane("quick")

CUTS = ([3, 1, 0], [0, 0, 5], [2, 2, 2], [0, 0, 0])
EXAMPLES = tf.constant([2.0, -1.0, 4.0, 0.5, 7.0, 3.0])


def shares_of(cut: list[int]) -> list[Share]:
    total = tf.constant(sum(cut), tf.int64)
    return [Share.of_batch(tf.constant(size, tf.int64), total, len(cut)) for size in cut]


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
    weighed = [[share.weigh(value) for value in mean(part)] for share, part in replicas]
    wanted = mean(EXAMPLES[: sum(cut)]) if sum(cut) else (0.0, 0.0)
    near(tf.reduce_sum(weighed, 0), wanted)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_weighted_mean_counts_a_replica_as_its_examples(cut: list[int]) -> None:
    weights = [share.as_weight("float64") for share in shares_of(cut)]
    assert {weight.dtype for weight in weights} == {tf.float64}
    near(weights, np.array(cut) / max(sum(cut), 1))
    silenced = [share.silenced([tf.reduce_mean(part)])[0] for share, part in zip(shares_of(cut), parts_of(cut), strict=True)]
    near(silenced, [tf.reduce_mean(part) if len(part) else 0.0 for part in parts_of(cut)])


def test_what_is_unweighed_first_is_weighed_back() -> None:
    for share, part in zip(shares_of([3, 1, 0]), parts_of([3, 1, 0]), strict=True):
        near(share.weigh(share.unweigh(tf.reduce_sum(part))), tf.reduce_sum(part))


def test_gradients_through_a_collective_are_those_of_one_device() -> None:
    """Replica r computes `loss_r = mean_r(x) * s` with `s = sum of a_q`, and one device `sum of share_r * loss_r`."""
    cut = [3, 1, 0]
    replicas = list(zip(shares_of(cut), parts_of(cut), strict=True))
    of_sum = [tf.reduce_mean(part) for _, part in replicas]  # The gradient of each loss with respect to `s`.

    def summed(own: list[tf.Tensor]) -> list[tf.Tensor]:
        del own
        return [tf.add_n([share.weigh(gradient) for (share, _), gradient in zip(replicas, of_sum, strict=True)])]

    for (share, part), gradient in zip(replicas, of_sum, strict=True):
        of_a = share.weigh(share.through(summed, [gradient])[0])
        near(of_a, tf.reduce_mean(EXAMPLES[:4]) if len(part) else 0.0)


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
def test_the_mean_of_moving_statistics_moves_by_the_mean_of_the_batch(cut: list[int]) -> None:
    momentum, before = 0.9, tf.constant(5.0)
    kept = momentum * before
    states = []
    for share, part in zip(shares_of(cut), parts_of(cut), strict=True):
        states += share.of_moving([kept], [kept + (1 - momentum) * tf.reduce_mean(part)])
    near(tf.reduce_mean(states), kept + (1 - momentum) * tf.reduce_mean(EXAMPLES[: sum(cut)]))


def test_who_has_as_much_as_the_mean() -> None:
    assert [[bool(share.is_equal) for share in shares_of(cut)] for cut in ([3, 1, 2], [2, 2, 2])] == [
        [False, False, True],
        [True, True, True],
    ]
    equal = Share.equal(4)
    assert (float(equal.value), bool(equal.is_equal)) == (0.25, True)


def test_an_empty_share_silences_what_is_not_finite_and_every_type_stays() -> None:
    empty, half, _ = shares_of([0, 1, 1])
    rows = tf.IndexedSlices(tf.constant([[np.nan, 1.0]]), tf.constant([2]), tf.constant([4, 2]))
    np.testing.assert_array_equal(empty.weigh(tf.constant([np.nan, np.inf, 1.0])), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(empty.weigh(rows).values, [[0.0, 0.0]])
    assert empty.weigh(None) is None
    assert (half.weigh(tf.constant([2.0], tf.float16)).dtype, half.weigh(tf.constant(2j)).numpy()) == (tf.float16, 1j)
    # A third of 100 is 33.25 in bfloat16. The product with a third in bfloat16 would be 33.5.
    assert float(Share.equal(3).weigh(tf.constant(100.0, tf.bfloat16))) == 33.25


@pytest.mark.parametrize(("device", "by", "count"), [("CPU:0", "MulNoNan", 21), ("GPU:0", "SelectV2", 3)])
def test_small_gradients_are_silenced_those_of_a_bucket_at_once_on_a_gpu(device: str, by: str, count: int) -> None:
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([3]), tf.constant([4, 2]))
    buckets = [list(range(13, 24)), list(range(4, 13)), [0, 3]]

    @tf.function
    def silenced(value: tf.Tensor) -> Any:
        with tf.device(device):  # TensorFlow takes the CPU where there is no GPU.
            small = [tf.ones([2, 2]) + 0.0 * value for _ in range(20)]
            gradients = [tf.fill([3], np.nan * value), None, rows, tf.ones([2000]), *small]
        return Share(value, 2, tf.constant(False)).silenced_gradients(gradients, buckets)

    step = silenced.get_concrete_function(tf.TensorSpec([]))
    assert [op.type for op in step.graph.get_operations()].count(by) == count
    for kept in (0.0, 1.0):
        found = step(tf.constant(kept))
        np.testing.assert_array_equal(found[0], np.full([3], np.nan) if kept else np.zeros([3]))
        assert found[1] is None
        np.testing.assert_array_equal(found[2].values, rows.values)
        np.testing.assert_array_equal(found[3], np.ones([2000]))
        for gradient in found[4:]:
            np.testing.assert_array_equal(gradient, np.full([2, 2], kept))


def test_gradients_of_a_replica_that_is_known_to_have_examples_stay_as_they_are() -> None:
    half = Share.of_batch(tf.constant(2, tf.int64), tf.constant(4, tf.int64), 2)
    gradients = [tf.constant([np.nan]), None]
    assert half.silenced_gradients(gradients, [[0]])[0] is gradients[0]
