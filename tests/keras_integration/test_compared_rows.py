"""Steps that compare rows with each other, sort, choose or shift them: replicas gather rows, and compute what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.protocol import Shards, Step, current_step
from tfrep_strategy.keras_integration.synchronous.batch_sums import compares_rows, part_of_global
from tfrep_strategy.keras_integration.synchronous.row_growth import note_normalized
from tfrep_strategy.shares import Share

NO_STRATEGY: Any = None
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


def _gram_matrix(x: Any) -> Any:
    return ops.matmul(_flat(x), ops.transpose(_flat(x)))


def _gram(x: Any) -> Any:
    return ops.sum(_gram_matrix(x) ** 2) / ops.cast(ops.shape(x)[0], "float32") ** 2


def _twice(x: Any) -> Any:
    return ops.concatenate([0.5 * x, x - 1.0])


def _both_signs(x: Any) -> Any:
    return tf.concat([x[:, 0, 0] > 0, x[:, 0, 0] < 0.5], 0)


def _class_means(x: Any) -> Any:
    """As a center loss has them."""
    of_class = ops.one_hot(ops.cast(x[:, 3, 0] > 0, "int32"), 2)
    return ops.matmul(ops.transpose(of_class), x[:, 0]) / ops.sum(of_class, axis=0)[:, None]


_CODES = np.random.RandomState(1).randn(9, 2).astype("float32")


def _broadcast(x: Any) -> Any:
    count = tf.shape(x)[0] * tf.shape(x)[1]
    return tf.broadcast_to(x, [count, count, 4, 2])


def _ragged(x: Any) -> Any:
    return tf.RaggedTensor.from_tensor(x[..., 0], lengths=tf.cast(x[:, 0, 0] > 0, tf.int32) + 1)


def _padded(x: Any) -> Any:
    return _ragged(x).to_tensor(shape=[None, 4])


def _mean_of(rows: Any) -> Any:
    return tf.reduce_sum(rows) / tf.cast(tf.shape(rows)[0], tf.float32)


def _confusion(x: Any) -> Any:
    return tf.math.confusion_matrix(tf.cast(x[:, 0, 0] > 0, tf.int32), tf.cast(x[:, 1, 0] > 0, tf.int32), 2, dtype=tf.float32)


def _pairs_and_choice(x: Any) -> Any:
    pairs = _gram_matrix(x)
    return pairs, tf.logical_and(pairs < 0.5, tf.logical_not(tf.eye(tf.shape(x)[0], dtype=tf.bool)))


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
    "attention over the batch": lambda x: ops.mean((ops.softmax(ops.matmul(_flat(x), ops.transpose(_flat(x)))) @ _flat(x)) ** 3),
    "rows that are repeated": lambda x: ops.mean(tf.tile(x, [2, 1, 1])[1:] ** 2) + ops.mean(tf.repeat(x, 2, 0)[1:] ** 2),
    "pairs by tiles": lambda x: ops.mean(
        (tf.tile(x[None], [tf.shape(x)[0], 1, 1, 1]) - tf.repeat(x[:, None], tf.shape(x)[0], 1)) ** 4
    ),
    "a mean of chosen joined rows": lambda x: tf.reduce_mean(tf.boolean_mask(tf.concat([x, -2.0 * x], 0), _both_signs(x))),
    "joined thrice": lambda x: ops.sum(ops.mean(ops.prod(ops.split(ops.concatenate([x, _twice(x)]), 3), axis=0), axis=0)),
    "the largest of classes": lambda x: ops.sum(ops.segment_max(x[:, 0] ** 2, ops.cast(x[:, 3, 0] > 0, "int32"), 2)),
    "means of classes": lambda x: ops.mean((x[:, 0] - tf.gather(_class_means(x), tf.cast(x[:, 3, 0] > 0, tf.int32))) ** 2),
    "ranks": lambda x: ops.mean(ops.cast(ops.argsort(ops.argsort(x[:, 0, 0])), "float32") * x[:, 0, 1]),
    "chosen pairs": lambda x: tf.reduce_mean(tf.boolean_mask(*_pairs_and_choice(x))),
    "pairs through a layer": lambda x: ops.mean(tf.tanh(ops.matmul(ops.expand_dims(_gram_matrix(x), -1), ops.ones((1, 3))))),
    "norms of norms": lambda x: tf.norm(tf.linalg.svd(_flat(x), compute_uv=False)[:3] * [1.0, 2.0, 3.0]),
    "rows at other places": lambda x: ops.mean(tf.gather(x, tf.roll(tf.range(tf.shape(x)[0]), 1, 0)) * x**2)
    + ops.mean(ops.take(x, tf.range(tf.shape(x)[0])[::-1], axis=0) * x**3)
    + ops.mean(tf.gather(x, (tf.range(tf.shape(x)[0]) + 1) % tf.shape(x)[0]) * x),
    "a transposition by einsum": lambda x: ops.mean(ops.softmax(ops.einsum("nd,kd->kn", _flat(x), 2.0 * _flat(x)), -1) ** 2),
    "rows that were put before": lambda x: ops.mean(tf.pad(x[:, 0], [[1, 0], [0, 0]], constant_values=1.0)[:-1] * x[:, 1]),
    "pairs by broadcasts": lambda x: ops.mean(_broadcast(x[:, None]) * _broadcast(x[None]) ** 3),
    "a mean over the count of chosen": lambda x: _mean_of(tf.boolean_mask(x[:, 0, 0] ** 2, x[:, 1, 0] > 0)),
    "a loss of chosen rows": lambda x: keras.losses.MeanSquaredError()(*(tf.boolean_mask(x[:, i], x[:, 1, 0] > 0) for i in (0, 1))),
    "a part of the rows": lambda x: tf.reduce_mean(tf.dynamic_partition(x[:, 0] ** 2, tf.cast(x[:, 1, 0] > 0, tf.int32), 2)[1]),
    "hits of classes": lambda x: _mean_of(tf.linalg.diag_part(_confusion(x))) * ops.mean(x**2),
    "a loss of Keras of pairs": lambda x: keras.losses.Dice()(tf.eye(tf.shape(x)[0]), ops.sigmoid(_gram_matrix(x))),
    "rows before others": lambda x: ops.mean(ops.concatenate([x[:, 0], tf.constant(_CODES)[: -ops.shape(x)[0]]], axis=0)[:7] ** 2),
    "sentences of some lengths": lambda x: ops.mean(tf.reduce_mean(_ragged(x), 1) ** 2) + ops.mean(_padded(x)[:, 0]),
    "pairs, and a mean beside": lambda x: _gram(x) + 3.0 * ops.mean(x**2) + ops.sqrt(ops.mean(x**2)) + 0.1 * ops.sum(x),
    "pairs of normalized rows": lambda x: _gram((x - ops.mean(x, 0)) / (ops.std(x, 0) + 0.1)),
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("cut", [[4], *in_lane("rows", [6], [2, 5])], ids=["uneven", "one alone", "three"])
def test_what_compares_rows_is_computed_from_all(name: str, cut: list[int]) -> None:
    """On uneven parts, where a replica has none, and on three; with the gradient of a weight of each row, and of all of it."""
    _check(COMPARED[name], cut)


def _check(function: Callable[[Any], Any], cut: list[int], shape: tuple[int | None, ...] = (None, 4, 2)) -> None:
    parts = np.split(ROWS, cut)
    strategy = tfrep.MirroredStrategy([f"CPU:{i}" for i in range(len(parts))])
    with strategy.scope():
        scale = tf.Variable(1.2)

    def replica(part: Any) -> Any:
        step: Any = current_step()
        with tf.GradientTape() as tape:
            step.is_own = True
            value = part_of_global(step, scale**2 * function(scale * part))
        step.is_own = False  # Else the tape would sum.
        gradient = tape.gradient(value, scale.values[_replica()], unconnected_gradients="zero")
        # As the optimizer does, that of a replica without rows is left out: a mean over none of them is no number.
        return value, strategy.extended.sum_over_replicas(step.share.silenced([gradient]))[0]

    @tf.function(input_signature=[Shards((tf.TensorSpec(shape),) * len(parts), tf.TensorSpec([], tf.int64))])
    def of_replicas(batch: Shards) -> Any:
        return strategy.run(replica, args=(batch,))

    values, gradients = of_replicas(Shards(tuple(map(tf.constant, parts)), tf.constant(6, tf.int64)))
    with tf.GradientTape() as tape:
        wanted = scale.values[0] ** 2 * function(scale.values[0] * ROWS)
    wanted_gradient = tape.gradient(wanted, scale.values[0], unconnected_gradients="zero")
    assert float(strategy.reduce("SUM", values)) == pytest.approx(float(wanted), rel=1e-5)
    for gradient in strategy.experimental_local_results(gradients):
        assert float(gradient) == pytest.approx(float(wanted_gradient), rel=1e-4, abs=1e-6)


_POSITIONS = np.random.RandomState(2).randn(9, 2).astype("float32")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + _POSITIONS[None, :4] if tf.executing_eagerly() else x + tf.constant(_POSITIONS)[: tf.shape(x)[1]][None],
        lambda x: (x + tf.gather(_POSITIONS, tf.range(tf.shape(x)[1]))[None])[:, 1:] * x[:, :-1],
        lambda x: ops.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], is_causal=True),
        lambda x: ops.cumsum(x * tf.cast(tf.range(tf.shape(x)[1]), "float32")[None, :, None], axis=1),
        lambda x: ops.max(ops.concatenate([x, x + tf.constant(_POSITIONS)[: tf.shape(x)[1]]], axis=1), axis=1),
        lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))) * tf.eye(tf.shape(x)[1]),
        lambda x: _flat(x) @ tf.transpose(_flat(x)),
    ],
    ids=["positions", "looked up", "causal", "numbered", "joined", "diagonals", "pairs"],
)
def test_sentences_whose_length_is_not_known(function: Callable[[Any], Any]) -> None:
    _check(lambda x: ops.mean(ops.sum(ops.square(function(x)), axis=-1)), [4], (None, None, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda z: ops.mean(tf.map_fn(lambda row: ops.max(row), ops.matmul(z, ops.transpose(z)))),
        lambda z: ops.mean(tf.nn.dropout(ops.matmul(z, ops.transpose(z)), 0.5)),
    ],
    ids=["a loop", "dropout"],
)
def test_what_cannot_be_repeated_is_told(function: Callable[[Any], Any]) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def replica(z: Any) -> Any:
        step = Step(NO_STRATEGY, Share.of_batch(tf.cast(tf.shape(z)[0], tf.int64), tf.constant(6, tf.int64), 2))
        return part_of_global(step, function(z))

    with pytest.warns(UserWarning, match="A step compares the rows of a batch, and what comes after cannot be repeated"):
        replica(tf.reshape(ROWS, [-1, 8]))


_L = keras.layers
_LAYERS = [
    [_L.MultiHeadAttention(2, 3), _L.Conv1D(3, 2, padding="same"), _L.BatchNormalization(), _L.Dense(3), _L.LSTM(3)],
    [_L.Reshape((2, 2, 2)), _L.Conv2D(3, 2, padding="same"), _L.MaxPooling2D(), _L.Flatten(), _L.Dense(3), _L.Softmax()],
    [_L.Lambda(lambda x: ops.cast(ops.abs(x), "int32")), _L.Embedding(5, 3), _L.Permute((2, 1, 3)), _L.GlobalAveragePooling2D()],
    [_L.GroupNormalization(2), _L.UpSampling1D(), _L.Bidirectional(_L.GRU(2)), _L.Discretization([0.0])],
]


def _net(x: Any) -> Any:
    """All of the layers, each of which treats every row for itself."""
    return sum(ops.sum(ops.reshape(ops.cast(_through(x, made), "float32"), (ops.shape(x)[0], -1)), 1) for made in _LAYERS)


def _through(x: Any, made: list[Any]) -> Any:
    for layer in made:
        training = {"training": True} if isinstance(layer, _L.BatchNormalization) else {}
        x = layer(*[x] * (1 + isinstance(layer, _L.MultiHeadAttention)), **training)
        if training:
            note_normalized(x)  # As in a step.
    return x


@pytest.mark.parametrize(
    "function",
    [
        _net,
        lambda x: keras.layers.Dot(axes=1)([x, 2.0 * x]),
        lambda x: ops.softmax(ops.take_along_axis(x, ops.cast(x > 0, "int32"), axis=1), axis=-1)[..., 0] + ops.arange(4.0),
        lambda x: ops.mean(ops.reshape(ops.concatenate([x, ops.zeros_like(x)], axis=1), (-1, 2, 8)), axis=1),
        lambda x: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), tf.cast(x[:, 0, 0] > 0, tf.int32)], axis=1)),
        lambda x: tf.boolean_mask(x, x[:, 0, 0] > 0),
        lambda x: tf.tensordot(x, tf.ones([2, 3]), 1) + tf.tile(x[:, :1, :1], [1, 4, 1]),
        lambda x: ops.split(ops.stack([x, 2 * x], axis=1), 2, axis=2)[0][:, 0],
        lambda x: tf.reshape(tf.transpose(tf.stack([x, 2.0 * x]), [2, 0, 1, 3]), [-1, 2]),
        lambda x: tf.reduce_max(tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1, 2]), tf.fill([tf.shape(x)[0]], 4)), axis=1),
        lambda x: tf.image.crop_and_resize(x[..., None], tf.abs(ops.tile(x[:, 0], (1, 2))), tf.range(tf.shape(x)[0]), [3, 3]),
        lambda x: tf.tensor_scatter_nd_update(
            x, tf.stack([tf.range(tf.shape(x)[0]), tf.cast(x[:, 0, 0] > 0, tf.int32)], 1), x[:, 3] + 1.0
        ),
    ],
    ids=["layers", "dots", "columns", "groups", "of each", "chosen", "tensordot", "parts", "views", "ragged", "crops", "set"],
)
def test_what_treats_each_row_for_itself_is_left_alone(function: Callable[[Any], Any]) -> None:
    found: list[bool] = []
    function(ROWS)  # Layers make their variables.

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 2])])
    def replica(x: Any) -> Any:
        step = Step(NO_STRATEGY, Share.equal(2))
        rows = function(x)
        found.append(compares_rows(step, rows) or compares_rows(step, ops.sum(rows)))
        return rows

    replica(ROWS)
    assert found == [False]


def _replica() -> int:
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
