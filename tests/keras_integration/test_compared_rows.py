"""Steps that compare rows with each other, sort, choose or shift them: the replicas gather rows, and compute what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.protocol import Shards, current_step
from tfrep_strategy.keras_integration.synchronous.batch_sums import part_of_global

ROWS = np.random.RandomState(0).randn(6, 4, 2).astype("float32")


def _flat(x: Any) -> Any:
    return tf.math.l2_normalize(ops.reshape(x, (-1, 8)), axis=1)


def _of_pairs(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def _simclr(x: Any) -> Any:
    """As in Keras's examples of contrastive pretraining."""
    one, other = (tf.math.l2_normalize(x[:, i], axis=1) for i in (0, 1))
    similarities = ops.matmul(one, ops.transpose(other)) / 0.1
    labels = ops.arange(ops.shape(one)[0])
    return (_of_pairs(similarities, labels) + _of_pairs(ops.transpose(similarities), labels)) / 2.0


def _nt_xent(x: Any) -> Any:
    """Both views in one batch, and nobody compared with itself."""
    views = tf.math.l2_normalize(tf.concat([x[:, 0], x[:, 1] ** 2], 0), axis=1)
    count = tf.shape(x)[0]
    similarities = tf.matmul(views, views, transpose_b=True) / 0.5 - 1e9 * tf.eye(2 * count)
    return _of_pairs(similarities, tf.concat([tf.range(count) + count, tf.range(count)], 0))


def _clip(x: Any) -> Any:
    texts, images = tf.math.l2_normalize(x[:, 0], 1), tf.math.l2_normalize(x[:, 1] + 0.5, 1)
    targets = keras.activations.softmax(
        (tf.matmul(texts, texts, transpose_b=True) + tf.matmul(images, images, transpose_b=True)) / 2.0
    )
    logits = tf.matmul(texts, images, transpose_b=True)
    of_texts = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
    of_images = keras.losses.categorical_crossentropy(tf.transpose(targets), tf.transpose(logits), from_logits=True)
    return tf.reduce_mean((of_texts + of_images) / 2)


def _supervised(x: Any) -> Any:
    labels = ops.cast(x[:, 3, 0] > 0, "int32")
    same = ops.cast(ops.equal(labels[:, None], labels[None, :]), "float32")
    log_probabilities = tf.nn.log_softmax(ops.matmul(_flat(x), ops.transpose(_flat(x))) / 0.2)
    return -ops.mean(ops.sum(same * log_probabilities, axis=1) / ops.sum(same, axis=1))


def _triplets(x: Any) -> Any:
    """The hardest of each anchor, by distances."""
    z = _flat(x)
    distances = ops.sum((z[:, None] - z[None, :]) ** 2, axis=-1)
    same = ops.equal(x[:, 3, 0] > 0, (x[:, 3, 0] > 0)[:, None])
    farthest = ops.max(ops.where(same, distances, 0.0), axis=1)
    nearest = ops.min(ops.where(same, 9.0, distances), axis=1)
    return ops.mean(ops.relu(farthest - nearest + 0.3))


def _halves(x: Any) -> Any:
    one, other = tf.split(tf.tanh(tf.concat([x, 2.0 * x], 0)), 2)
    return tf.reduce_mean(tf.reduce_sum(one * other**2, [1, 2]))


def _gram(x: Any) -> Any:
    z = _flat(x)
    return ops.sum(ops.matmul(z, ops.transpose(z)) ** 2) / ops.cast(ops.shape(x)[0], "float32") ** 2


COMPARED: dict[str, Callable[[Any], Any]] = {
    "SimCLR": _simclr,
    "both views": _nt_xent,
    "CLIP": _clip,
    "labels in pairs": _supervised,
    "triplets": _triplets,
    "halves of joined rows": _halves,
    "a Gram matrix": _gram,
    "einsum": lambda x: ops.mean(ops.einsum("ae,pe->ap", _flat(x), _flat(x)) ** 3),
    "a log-determinant": lambda x: tf.linalg.slogdet(tf.matmul(_flat(x), _flat(x), transpose_b=True) + tf.eye(tf.shape(x)[0]))[1],
    "the hardest rows": lambda x: ops.mean(ops.top_k(ops.mean(x**2, (1, 2)), 2)[0]),
    "half of the rows, the hardest": lambda x: ops.mean(tf.sort(x[:, 0, 0], direction="DESCENDING")[: tf.shape(x)[0] // 2]),
    "a median": lambda x: ops.median(x[:, 1, 1] ** 2),
    "a mean of chosen rows": lambda x: tf.reduce_mean(tf.boolean_mask(x[:, 0] ** 2, x[:, 1, 0] > 0)),
    "rows at places": lambda x: tf.reduce_mean(tf.gather(x, tf.where(x[:, 1, 0] > 0)[:, 0]) ** 2),
    "the first row": lambda x: ops.sum(x[0] ** 2) + ops.mean(x[-1]),
    "neighbours": lambda x: ops.mean((x[1:] - x[:-1]) ** 2),
    "every other row": lambda x: ops.sum(x[::2, 0] * 2.0),
    "a running sum": lambda x: ops.mean(ops.cumsum(x[:, 0, 0]) ** 2),
    "the other order": lambda x: ops.mean(ops.flip(x, axis=0) * x),
    "a shift": lambda x: ops.mean(ops.roll(x, 1, axis=0) * x),
    "a softmax over the batch": lambda x: ops.sum(ops.softmax(x[:, 0, 0], axis=0) * x[:, 0, 1] ** 2),
    "a softmax over the batch, of a matrix": lambda x: ops.sum(ops.softmax(x[:, 0], axis=0) * x[:, 1]),
    "the best row": lambda x: ops.sum(ops.take(x, ops.argmax(x[:, 0, 0]), axis=0) ** 2),
    "by the place": lambda x: ops.mean(x[:, 0, 0] * ops.cast(ops.arange(ops.shape(x)[0]), "float32")),
    "a product over rows": lambda x: ops.sum(ops.prod(1.0 + 0.1 * x[:, 0], axis=0)),
    "pairs of neighbours": lambda x: ops.mean(ops.prod(ops.reshape(x[:, 0], (-1, 2, 2)), axis=1)),
    "views that are flattened": lambda x: ops.mean(ops.reshape(ops.transpose(x, (1, 0, 2)), (-1, 2))[1:] ** 2),
    "pairs, and a mean beside": lambda x: _gram(x) + 3.0 * ops.mean(x**2) + ops.sqrt(ops.mean(x**2)) + 0.1 * ops.sum(x),
    "pairs of normalized rows": lambda x: _gram((x - ops.mean(x, 0)) / (ops.std(x, 0) + 0.1)),
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("cut", [[4], [6], [2, 5]])
def test_what_compares_rows_is_computed_from_all(name: str, cut: list[int]) -> None:
    """On uneven parts, where a replica has none, and on three; with the gradient of a weight of each row, and of all of it."""
    function, parts = COMPARED[name], np.split(ROWS, cut)
    strategy = tfrep.MirroredStrategy([f"CPU:{i}" for i in range(len(parts))])
    with strategy.scope():
        scale = tf.Variable(1.2)

    def replica(part: Any) -> Any:
        step: Any = current_step()
        with tf.GradientTape() as tape:
            value = part_of_global(step, scale**2 * function(scale * part))
        gradient = tape.gradient(value, scale.values[_replica()], unconnected_gradients="zero")
        return value, strategy.extended.sum_over_replicas([gradient])[0]

    @tf.function(input_signature=[Shards((tf.TensorSpec([None, 4, 2]),) * len(parts), tf.TensorSpec([], tf.int64))])
    def of_replicas(batch: Shards) -> Any:
        return strategy.run(replica, args=(batch,))

    values, gradients = of_replicas(Shards(tuple(map(tf.constant, parts)), tf.constant(6, tf.int64)))
    with tf.GradientTape() as tape:
        wanted = scale.values[0] ** 2 * function(scale.values[0] * ROWS)
    wanted_gradient = tape.gradient(wanted, scale.values[0], unconnected_gradients="zero")
    assert float(strategy.reduce("SUM", values)) == pytest.approx(float(wanted), rel=1e-5)
    for gradient in strategy.experimental_local_results(gradients):
        assert float(gradient) == pytest.approx(float(wanted_gradient), rel=1e-4, abs=1e-6)


def _replica() -> int:
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
