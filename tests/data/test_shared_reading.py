"""Processes that share the reading of a pipeline, through TensorFlow's data service: docs/shared_reading.md."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("input")

_ROWS, _BATCH, _EPOCHS = 20, 4, 3  # An epoch has no half batch.
service = tf.data.experimental.service


def rows(per_step: int, decoded: list[int]) -> tf.data.Dataset:
    def decode(i: np.ndarray) -> np.ndarray:
        decoded.append(int(i))
        return np.float32([i, i % 3])

    tf.random.set_seed(1)  # The order depends on it, too, and earlier tests have set others.
    numbers = tf.data.Dataset.range(_ROWS).shuffle(_ROWS, seed=5).repeat()
    examples = numbers.map(lambda i: tf.ensure_shape(tf.numpy_function(decode, [i], tf.float32, stateful=False), [2]))
    batches = examples.map(lambda x: (x / _ROWS, tf.reduce_sum(x, keepdims=True))).batch(per_step, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False  # The notes keep the order of the rows.
    return batches.with_options(options)


def trained(dataset: Any) -> list[float]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(dataset, epochs=_EPOCHS, steps_per_epoch=_ROWS // _BATCH, verbose=0).history["loss"]
    return [*losses, *np.concatenate([w.ravel() for w in model.get_weights()]).tolist()]


def trained_with_a_service(strategy: Any) -> tuple[list[float], list[int]]:
    size, decoded = strategy.num_replicas_in_sync, []
    own = rows(_BATCH // size, decoded)  # A step takes as many elements as there are ranks: one each.
    running, place = [], None
    if strategy.rank == 0:
        dispatcher = service.DispatchServer()
        worker = service.WorkerServer(service.WorkerConfig(dispatcher.target.split("://")[1]))
        running += [dispatcher, worker]
        identity = service.register_dataset(dispatcher.target, own)
        place = dispatcher.target, np.asarray(identity).item()
    target, identity = tfrep.broadcast_object(place)

    def of_this_rank(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return service.from_dataset_id(
            "parallel_epochs", target, identity, own.element_spec, job_name="train",
            consumer_index=context.input_pipeline_id, num_consumers=size,
        )  # fmt: skip

    with strategy.scope():
        result = trained(strategy.distribute_datasets_from_function(of_this_rank))
    tfrep.barrier()  # Rank 0 serves until all have what they need.
    return result, decoded


def test_each_example_is_decoded_once_for_all_ranks(worker_pool: Any) -> None:
    expected = trained(rows(_BATCH, []))
    (first, decoded), (second, none) = worker_pool("tf", 2).run(trained_with_a_service)
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    np.testing.assert_allclose(second, expected, rtol=1e-5)
    assert none == []
    # The service reads ahead, beyond the last epoch.
    assert sorted(decoded[: _ROWS * _EPOCHS]) == sorted([*range(_ROWS)] * _EPOCHS)
