"""Which losses and metrics of users are tried to need the rows of all replicas, and which are believed."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous.own_functions import Sees, loss_needs_all_rows, what_metric_sees

ROWS = tf.constant(np.linspace(0.0, 1.0, 12).reshape(6, 2), tf.float32)


def _of_labels(y: Any, p: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(ops.cast(y[:, 0], "int32"), p))


LINEAR = {
    "mean": lambda y, p: ops.mean(ops.square(y - p)),
    "rows": lambda y, p: ops.sum(ops.square(y - p), axis=-1),
    "labels": _of_labels,
    "no number": lambda y, p: ops.mean(ops.log(-1.0 - y)),
    "calls a collective": lambda y, p: ops.max(tfrep.all_gather(y - p)),
    "calls one of TensorFlow": lambda y, p: ops.max(tf.distribute.get_replica_context().all_gather(y - p, axis=0)),
}
def _mean_of_unmasked(mask: Any) -> Any:
    def loss(y: Any, p: Any) -> Any:
        counts = ops.cast(mask(y), "float32")
        return ops.sum(counts * ops.square(ops.nan_to_num(y) - p)) / (ops.sum(counts) + 1e-6)

    return loss


def _nearest_of_another_label(y: Any, z: Any) -> Any:
    distances = ops.sum(ops.square(z[:, None] - z[None]), axis=-1)
    same = ops.equal(y[:, :1], ops.transpose(y[:, :1]))
    return ops.mean(ops.sum(distances * ops.cast(same, "float32"), axis=1))


def _refuses(y: Any, p: Any) -> Any:
    raise ValueError("Only one class.")


OTHERS = {
    "refuses": _refuses,
    "refuses a part": lambda y, p: ops.mean(ops.reshape(p, (4, 2))),
    "mean where not 0": _mean_of_unmasked(lambda y: y != 0),
    "mean where not -1": _mean_of_unmasked(lambda y: y != -1),
    "mean where not 255": _mean_of_unmasked(lambda y: y != 255),
    "mean where not -100": _mean_of_unmasked(lambda y: y != -100),
    "mean where known": _mean_of_unmasked(lambda y: ops.logical_not(ops.isnan(y))),
    "labels compared": _nearest_of_another_label,
    "root": lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    "sum": lambda y, p: ops.sum(ops.square(y - p)),
    "largest": lambda y, p: ops.max(y - p),
    "each row with all": lambda y, p: ops.sum(ops.matmul(p, ops.transpose(p)), axis=-1),
}


def wanted(needs: bool) -> Sees:
    return Sees.ALL_ROWS if needs else Sees.OWN_ROWS


@pytest.mark.parametrize(("name", "needs"), [(n, False) for n in LINEAR] + [(n, True) for n in OTHERS])
def test_functions(name: str, needs: bool) -> None:
    function = (LINEAR | OTHERS)[name]
    compute = keras.losses.Loss.__call__
    assert loss_needs_all_rows(keras.losses.Loss(name=name), compute, ROWS, ROWS) is False  # It cannot be called.
    compiled = keras.src.losses.losses.LossFunctionWrapper(function)
    assert loss_needs_all_rows(compiled, compute, ROWS, ROWS) is needs
    assert loss_needs_all_rows(keras.losses.Loss(), lambda loss, y, p: function(y, p), ROWS, ROWS) is needs
    metric = keras.metrics.MeanMetricWrapper(function)
    update = type(metric).update_state
    assert what_metric_sees(metric, getattr(update, "__wrapped__", update), (ROWS, ROWS), {}) is wanted(needs)


@pytest.mark.parametrize(("needs", "pixels"), [(False, 11), (False, 170), (True, 300)])
def test_pictures_of_open_sizes_may_have_to_be_large(needs: bool, pixels: int) -> None:
    def loss(y: Any, p: Any) -> Any:
        tf.debugging.assert_greater_equal(tf.shape(p)[1:3], pixels)
        return ops.mean(ops.square(y - p))

    traced: list[bool] = []

    @tf.function(input_signature=[tf.TensorSpec((None, None, None, 1))] * 2)
    def step(y: Any, p: Any) -> Any:
        traced.append(loss_needs_all_rows(keras.src.losses.losses.LossFunctionWrapper(loss), keras.losses.Loss.__call__, y, p))
        return y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.get_concrete_function()
    assert traced == [needs]
    assert any("refuses rows that were made up" in str(each.message) for each in caught) is needs


def test_a_loss_of_keras_with_a_call_of_ones_own_is_tried() -> None:
    class Root(keras.losses.MeanSquaredError):
        def call(self, y: Any, p: Any) -> Any:
            return ops.sqrt(ops.mean(ops.square(y - p)))

    assert loss_needs_all_rows(Root(), keras.losses.Loss.__call__, ROWS, ROWS)
    assert not loss_needs_all_rows(keras.losses.MeanSquaredError(), keras.losses.Loss.__call__, ROWS, ROWS)


class _Total(keras.metrics.Metric):
    def __init__(self, adds: Any) -> None:
        super().__init__()
        self.adds, self.total = adds, self.add_variable((), "zeros")
        self.seeds = keras.random.SeedGenerator(3)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.adds(self.total, y))

    def result(self) -> Any:
        return self.total.value


@pytest.mark.parametrize(
    ("needs", "adds"),
    [
        (False, lambda total, y: total + ops.sum(y)),
        (True, lambda total, y: total + ops.mean(y)),
        (True, lambda total, y: total + 1.0),
        (True, lambda total, y: ops.maximum(total, ops.max(y))),
        (True, lambda total, y: ops.sum(y)),
        (True, lambda total, y: 0.9 * total + ops.sum(y)),
    ],
)
def test_metrics(needs: bool, adds: Any) -> None:
    metric = _Total(adds)
    metric.update_state(ROWS, ROWS)
    before = float(metric.result())
    assert what_metric_sees(metric, _Total.update_state, (ROWS, ROWS), {"sample_weight": None}) is wanted(needs)
    assert float(metric.result()) == before


def test_a_metric_with_collectives() -> None:
    metric = _Total(lambda total, y: total + tfrep.all_sum(ops.sum(y)))
    assert what_metric_sees(metric, _Total.update_state, (ROWS, ROWS), {}) is Sees.WHAT_IT_GATHERS


@pytest.mark.parametrize("collective", [False, True])
def test_a_loss_with_state_is_not_run(collective: bool) -> None:
    """It needs all rows, unless it puts them together itself."""
    state = tf.Variable(0.0)

    def loss(y: Any, p: Any) -> Any:
        state.assign_add(1.0)
        error = ops.mean(ops.square(y - p))
        return tfrep.all_reduce(error, "mean") if collective else error

    wrapped = keras.src.losses.losses.LossFunctionWrapper(loss)
    assert loss_needs_all_rows(wrapped, keras.losses.Loss.__call__, ROWS, ROWS) is not collective
    assert float(state) == 0.0


@pytest.mark.parametrize("needs", [True, False])
def test_a_number_beside_rows(needs: bool) -> None:
    metric = _Total((lambda total, y: total + 1.0) if needs else (lambda total, y: total + ops.sum(y)))
    update = lambda metric, y_true, y_pred, limit: metric.update_state(y_true, y_pred)  # noqa: E731
    assert what_metric_sees(metric, update, (ROWS, ROWS, tf.constant(1.0)), {}) is wanted(needs)


@pytest.mark.parametrize("given", [tf.constant(["a", "b"]), tf.ragged.constant([[1.0], []]), 2.0])
def test_what_has_no_rows_to_put_together_is_believed(given: Any) -> None:
    metric = _Total(lambda total, y: total + 1.0)
    assert what_metric_sees(metric, _Total.update_state, (given, ROWS), {}) is Sees.OWN_ROWS


def test_drawing_random_numbers_does_not_go_on() -> None:
    seeds = keras.random.SeedGenerator(5)
    before = keras.ops.convert_to_numpy(seeds.state).tolist()
    drawn = keras.src.losses.losses.LossFunctionWrapper(lambda y, p: ops.mean(keras.random.uniform(ops.shape(p), seed=seeds) * p))
    assert loss_needs_all_rows(drawn, keras.losses.Loss.__call__, ROWS, ROWS)
    assert keras.ops.convert_to_numpy(seeds.state).tolist() == before
