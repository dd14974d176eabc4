"""Which scalars of a step are taken for sums over the rows of a batch, and which for means."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.protocol import Shards, Step, current_step
from tfrep_strategy.keras_integration.synchronous.batch_sums import (
    are_rows,
    as_mean,
    compares_rows,
    is_count,
    part_of_global,
)
from tfrep_strategy.keras_integration.synchronous.open_rows import NobodyRepeatsError
from tfrep_strategy.keras_integration.synchronous.row_growth import note_global
from tfrep_strategy.shares import Share

ROWS = np.random.RandomState(0).randn(6, 4, 2).astype("float32")
NO_STRATEGY: Any = None


def _pairs(x: Any) -> Any:
    """Rows of which some do not count."""
    return tf.boolean_mask(x, x[:, 0, 0] > 0)


SUMS: dict[str, Callable[[Any], Any]] = {
    "ops.sum": lambda x: ops.sum(ops.square(x)),
    "tf.reduce_sum": tf.reduce_sum,
    "by axes": lambda x: ops.sum(ops.sum(ops.sum(x, axis=0), axis=0), axis=-1),
    "of means of rows": lambda x: ops.sum(ops.mean(x, axis=(1, 2))),
    "mean of sums": lambda x: ops.mean(ops.sum(x, axis=0)),
    "flat": lambda x: ops.sum(ops.reshape(x, (-1,))),
    "scaled": lambda x: -0.1 * tf.reduce_sum(x) / 64.0,
    "of a fixed batch": lambda x: tf.nn.compute_average_loss(ops.sum(x, axis=(1, 2)), global_batch_size=6),
    "two": lambda x: sum([ops.sum(x), ops.sum(ops.abs(x))]),
    "in half precision": lambda x: ops.cast(ops.sum(x), "float32"),
    "l2": lambda x: tf.nn.l2_loss(x),
    "chosen rows": lambda x: ops.sum(_pairs(x)),
    "count": lambda x: ops.cast(ops.shape(x)[0], "float32"),
    "size": lambda x: tf.cast(tf.size(x), tf.float32),
    "some of a vector": lambda x: ops.sum(x, axis=0)[0, 1] + 2.0 * tf.gather(ops.sum(x, axis=0), 1)[0],
    "einsum": lambda x: ops.einsum("bij,bij->", x, x),
    "transposed": lambda x: ops.sum(ops.sum(ops.transpose(x) ** 2, axis=-1)),
    "transposed, by einsum": lambda x: ops.einsum("jib->", ops.transpose(x)),
    "in one row": lambda x: ops.sum(3.0 * ops.reshape(ops.mean(x, axis=(1, 2)), (1, -1)) + 1.0),
    "with a dimension before": lambda x: tf.reduce_sum(tf.squeeze(x[tf.newaxis] ** 2, 0) + tf.expand_dims(x, 0), axis=[0, 1])[0, 0],
    "a product of matrices": lambda x: ops.sum(ops.matmul(ops.transpose(x[:, 0]), x[:, 1])),
    "a dot product": lambda x: ops.dot(x[:, 0, 0], ops.mean(x, axis=(1, 2))),
    "tensordot": lambda x: tf.tensordot(x, x**2, [[0, 1, 2], [0, 1, 2]]),
    "weights of the rows": lambda x: tf.reduce_sum(tf.linalg.matvec(x[:, 0], x[:, 1, 0], transpose_a=True)),
    "stacked": lambda x: ops.sum(ops.stack([x, 2.0 * x], axis=0)) + ops.sum(ops.sum(ops.stack([x, x], axis=1), axis=0)),
    "of segments": lambda x: ops.sum(ops.segment_sum(x, ops.cast(x[:, 0, 0] > 0, "int32"), num_segments=2)),
    "size of a transposed": lambda x: ops.cast(ops.shape(ops.transpose(x))[2], "float32"),
}
MEANS: dict[str, Callable[[Any], Any]] = {
    "ops.mean": lambda x: ops.mean(ops.square(x)),
    "sum over the count": lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"),
    "sum over the size": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "rows over the count": lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32)),
    "count with epsilon": lambda x: ops.sum(x) / (ops.cast(ops.shape(x)[0], "float32") + 1e-7),
    "bounded count": lambda x: ops.sum(x) / ops.maximum(ops.cast(ops.shape(x)[0], "float32"), 1.0),
    "a loss of Keras": lambda x: keras.losses.MeanSquaredError()(x, 0.5 * x),
    "sums of means": lambda x: ops.sum([ops.mean(x), ops.mean(x**2)]),
    "of no rows": lambda x: ops.sum(ops.square(ops.ones((3, 2)))),
    "a mean of the stacked": lambda x: ops.sum(ops.mean(ops.stack([x, 2.0 * x], axis=0), axis=1)),
    "moments": lambda x: ops.sum(ops.mean(x, axis=0)),
    "einsum of means": lambda x: ops.einsum("ij->", ops.mean(x, axis=0)),
    "a mean of a transposed": lambda x: ops.sum(ops.mean(ops.transpose(x), axis=2)),
    "a mean of what was multiplied": lambda x: ops.mean(ops.matmul(x, ops.ones((2, 3)))),
    "a product over the count": lambda x: ops.dot(x[:, 0, 0], x[:, 1, 0]) / ops.cast(ops.shape(x)[0], "float32"),
}


def _correlation(a: Any, b: Any) -> Any:
    a, b = a - ops.mean(a), b - ops.mean(b)
    return ops.sum(a * b) / ops.sqrt(ops.sum(a**2) * ops.sum(b**2))


def _covariance(x: Any) -> Any:
    return ops.matmul(ops.transpose(x), x) / ops.cast(ops.shape(x)[0], "float32")


JOINT: dict[str, Callable[[Any], Any]] = {
    "a product": lambda x: ops.sum(x) * ops.sum(x**2),
    "a product of means": lambda x: ops.mean(x) * ops.mean(x**2),
    "a root": lambda x: ops.sqrt(ops.mean(x**2)),
    "a norm": lambda x: tf.norm(x),
    "a logarithm": lambda x: tf.math.log(tf.reduce_sum(x**2)),
    "a mean of chosen rows": lambda x: ops.sum(ops.where(x > 0, x, 0.0)) / ops.sum(ops.cast(x > 0, "float32")),
    "a weighted mean of rows": lambda x: ops.sum(x[:, 0] * x[:, 1] ** 2) / (ops.sum(x[:, 1] ** 2) + 1e-7),
    "a hinge": lambda x: ops.maximum(ops.sum(x**2), 0.0),
    "a bound": lambda x: ops.mean(x) + ops.maximum(ops.mean(x**2), 3.0) + ops.minimum(ops.mean(x**2), 0.5),
    "a variance": lambda x: ops.sum(ops.mean(x**2, axis=0) - ops.mean(x, axis=0) ** 2),
    "a covariance": lambda x: ops.mean(ops.square(ops.matmul(ops.transpose(x[:, 0]), x[:, 1]))) / 36.0,
    "a sum and a mean, scaled": lambda x: 3.0 * (ops.sum(x**2) + ops.mean(x)),
    "a sum over the square of the count": lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32") ** 2,
    "a count": lambda x: ops.sqrt(ops.cast(ops.shape(x)[0], "float32")) + ops.cast(ops.shape(x)[1], "float32"),
    "the largest": lambda x: ops.max(x) + 2.0 * ops.min(ops.max(x, axis=0)) - ops.min(x),
    "a standard deviation": lambda x: ops.sum(ops.std(x, axis=0)),
    "a variance about the mean": lambda x: tf.reduce_sum(tf.math.reduce_variance(x, 0)),
    "moments": lambda x: ops.sum(ops.sqrt(ops.moments(x, axes=(0, 1))[1] + 0.1)),
    "a correlation": lambda x: _correlation(x[:, 0, 0], x[:, 1, 1] ** 2),
    "rows about their mean": lambda x: ops.mean(x[:, 0] ** 2 * (x[:, 1] - ops.mean(x[:, 1])) / (ops.std(x[:, 1]) + 1e-3)),
    "a covariance of normalized rows": lambda x: ops.sum(_covariance((x[:, 0] - ops.mean(x[:, 0], 0)) / ops.std(x[:, 0], 0)) ** 2),
    "a constant beside": lambda x: ops.exp(ops.mean(x)) + ops.sum(ops.ones(3)),
}
"""What is neither a sum nor a mean. The replicas compute it together."""


def _values_of_two_replicas(
    function: Callable[[Any], Any], shared: Callable[[Step, Any], Any], rows: int = 4, shape: tuple[int | None, ...] = (None, 4, 2)
) -> float:
    """Computes what two replicas with 4 and 2 of the 6 rows make of a scalar together, or with 3 each."""

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def replica(x: Any) -> Any:
        count = tf.cast(tf.shape(x)[0], tf.int64)
        step = Step(NO_STRATEGY, Share.of_batch(count, tf.constant(6, tf.int64), 2))
        return shared(step, function(x))

    return float(replica(ROWS[:rows]) + replica(ROWS[rows:]))


@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_what_the_replicas_add_up_to_is_the_value_of_one_device(name: str) -> None:
    function = (SUMS | MEANS)[name]
    wanted = float(function(tf.constant(ROWS)))
    assert _values_of_two_replicas(function, part_of_global) == pytest.approx(wanted, rel=1e-5)
    assert _values_of_two_replicas(function, lambda step, v: step.share.weigh(as_mean(step, v))) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", MEANS)
def test_means_of_batches_of_one_size(name: str) -> None:
    wanted = float(MEANS[name](tf.constant(ROWS)))
    assert _values_of_two_replicas(MEANS[name], part_of_global, 3, (3, 4, 2)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("reduce", [lambda x: ops.mean(x, axis=0), lambda x: ops.mean(ops.transpose(x, [1, 2, 0]), axis=2)])
def test_dimensions_of_unknown_size_that_are_no_rows(reduce: Callable[[Any], Any]) -> None:
    def function(x: Any) -> Any:
        longer = tf.transpose(tf.raw_ops.PlaceholderWithDefault(input=tf.transpose(x, [1, 0, 2]), shape=[None, None, 2]), [1, 0, 2])
        return ops.sum(2.0 * reduce(longer))

    wanted = float(function(tf.constant(ROWS)))
    assert _values_of_two_replicas(function, part_of_global) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("shape", [(None, 4, 2), (3, 4, 2)])
def test_a_tensor_that_has_a_number_for_each_row(shape: Any) -> None:
    def found(x: Any) -> list[bool]:
        step = Step(NO_STRATEGY, Share.equal(2))
        means = [ops.stack([ops.mean(x), ops.mean(x**2)]), ops.mean(x), ops.mean(x, 0), ops.mean(x[:, :3], (0, 2))]
        return [are_rows(step, value) for value in [x, x[:, 0, 0] ** 2, *means, ops.shape(x)]]

    told: list[list[bool]] = []
    tf.function(lambda x: told.append(found(x)), input_signature=[tf.TensorSpec(shape)])(ROWS[:3])
    assert told == [[True, True, False, False, False, False, False]]
    step = Step(NO_STRATEGY, Share.equal(2), tf.constant(2))
    assert [are_rows(step, tf.ones(shape)) for shape in ([2], [2, 3], [3], [])] == [True, True, False, False]


def test_counts() -> None:
    counted: list[bool] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 2])])
    def replica(x: Any) -> None:
        step = Step(NO_STRATEGY, Share.equal(2))
        whole = tf.cast(x, tf.int32)
        values = [tf.shape(x)[0], tf.reduce_sum(whole), tf.shape(x)[1], tf.constant(3), tf.reduce_max(whole)]
        counted.extend(is_count(step, value) for value in values)

    replica(ROWS)
    assert counted == [True, True, False, False, False]


def test_what_is_known_of_a_graph_does_not_keep_it() -> None:
    seen: list[bool] = []

    def step(x: Any) -> Any:
        views = tf.concat([x, 2.0 * x], 0)
        own = tf.reduce_sum(tf.matmul(views, views, transpose_b=True))
        total = note_global(tf.identity(own), own)
        seen.append(compares_rows(Step(NO_STRATEGY, Share.equal(2)), total * 2.0))
        return total

    traced = tf.function(step).get_concrete_function(tf.TensorSpec([None, 2]))
    assert seen == [True]
    graph = weakref.ref(traced.graph)
    del traced
    gc.collect()
    assert graph() is None


def test_a_sum_and_a_mean_are_taken_apart() -> None:
    def function(x: Any) -> Any:
        return ops.sum(x**2) + (3.0 * ops.mean(x) + ops.sum(ops.ones(2))) + 0.1 * tf.reduce_sum(x)

    wanted = float(function(tf.constant(ROWS)))
    assert _values_of_two_replicas(function, part_of_global) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize("rows", [4, 6])
def test_what_is_neither_is_computed_together(name: str, rows: int) -> None:
    """On the rows of one device, also where a replica has none; with the gradient of a weight of each row, and of all of it."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        scale = tf.Variable(1.0)

    def replica(part: Any) -> Any:
        step: Any = current_step()
        with tf.GradientTape() as tape:
            value = part_of_global(step, scale**2 * JOINT[name](scale * part))
        gradient = tape.gradient(value, scale.values[_replica()], unconnected_gradients="zero")
        return value, strategy.extended.sum_over_replicas([gradient])[0]

    @tf.function(input_signature=[Shards((tf.TensorSpec([None, 4, 2]),) * 2, tf.TensorSpec([], tf.int64))])
    def of_replicas(batch: Shards) -> Any:
        return strategy.run(replica, args=(batch,))

    values, gradients = of_replicas(Shards((tf.constant(ROWS[:rows]), tf.constant(ROWS[rows:])), tf.constant(6, tf.int64)))
    with tf.GradientTape() as tape:
        wanted = scale.values[0] ** 2 * JOINT[name](scale.values[0] * ROWS)
    wanted_gradient = tape.gradient(wanted, scale.values[0], unconnected_gradients="zero")
    assert float(strategy.reduce("SUM", values)) == pytest.approx(float(wanted), rel=1e-5)
    for gradient in strategy.experimental_local_results(gradients):
        assert float(gradient) == pytest.approx(float(wanted_gradient), rel=1e-5)


def _replica() -> int:
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def test_what_nobody_can_follow_counts_as_a_mean() -> None:
    product = tf.function(JOINT["a product"])
    wanted = (4 * float(product(tf.constant(ROWS[:4]))) + 2 * float(product(tf.constant(ROWS[4:])))) / 6
    assert _values_of_two_replicas(product, part_of_global) == pytest.approx(wanted, rel=1e-5)


def test_what_puts_rows_together_in_an_unknown_way_asks_for_all_rows() -> None:
    def asks(step: Step, value: Any) -> Any:
        step.may_take_whole_batch = True
        return part_of_global(step, value)

    def root_of_sums(x: Any) -> Any:
        quantized = tf.raw_ops.FakeQuantWithMinMaxVarsGradient(gradients=x, inputs=x, min=-1.0, max=1.0)
        return tf.sqrt(quantized.backprop_wrt_max + 9.0)

    with pytest.raises(NobodyRepeatsError, match="FakeQuantWithMinMaxVarsGradient"):
        _values_of_two_replicas(root_of_sums, asks)


def test_what_was_computed_from_all_rows_counts_as_a_mean() -> None:
    def of_all(x: Any) -> Any:
        del x
        return note_global(tf.reduce_sum(tf.ones([tf.random.uniform([], 5, 6, tf.int32), 2])))

    def after_a_gather(step: Step, value: Any) -> Any:
        step.gathers = True
        return part_of_global(step, value)

    assert _values_of_two_replicas(of_all, part_of_global) == pytest.approx(10.0)
    assert _values_of_two_replicas(lambda x: ops.sum(ops.ones_like(x)), after_a_gather) == pytest.approx((4 * 32 + 2 * 16) / 6)
