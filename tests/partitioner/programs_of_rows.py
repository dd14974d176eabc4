"""Functions of the rows of a batch: sums, means, what is neither, and what compares rows with each other, sorts or chooses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops


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
    "rows at other places": lambda x: (
        ops.mean(tf.gather(x, tf.roll(tf.range(tf.shape(x)[0]), 1, 0)) * x**2)
        + ops.mean(ops.take(x, tf.range(tf.shape(x)[0])[::-1], axis=0) * x**3)
        + ops.mean(tf.gather(x, (tf.range(tf.shape(x)[0]) + 1) % tf.shape(x)[0]) * x)
    ),
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


def _coin() -> tf.Tensor:
    return tf.random.stateless_uniform([], [1, 2]) > 0.5


def _numbers(x: tf.Tensor, step: Any) -> tf.Tensor:
    return tf.random.stateless_normal(tf.shape(x), tf.stack([step, 3]))


def _compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return tf.function(function, jit_compile=True)


def _turns(turn: Callable[[Any, Any], Any], start: Any) -> Any:
    return ops.fori_loop(0, 3, lambda i, value: turn(ops.cast(i + 1, "float32"), value), start)


def _in_python(function: Callable[[np.ndarray], np.ndarray], x: tf.Tensor, shape: Any) -> tf.Tensor:
    result = tf.numpy_function(function, [x], tf.float32)
    result.set_shape(shape)
    return result


def _until(x: Any, is_enough: Callable[[Any], Any]) -> Any:
    return tf.while_loop(lambda z: tf.logical_not(is_enough(z)), lambda z: (0.5 * z,), (x,))[0]


def _by_index(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], lambda i, total: (i + 1, total + x[i, 0]), (0, 0.0))[1]


def _attend(x: Any) -> Any:
    rows = ops.reshape(x, (-1, 2, 2))
    return _turns(lambda _, z: ops.matmul(ops.softmax(ops.matmul(z, ops.transpose(rows, (0, 2, 1)))), rows), rows)


def _second_turn_mixes(x: Any) -> Any:
    """The first turn begins with zeros, the second one with what the first one has put together."""

    def turn(i: Any, v: Any) -> Any:
        return i + 1, tf.linalg.matvec(x, tf.linalg.matvec(x, v) + 1.0, transpose_a=True)

    return tf.while_loop(lambda i, _: i < 2, turn, (0, tf.zeros(4)))[1]


def _from_a_global_value(x: Any) -> Any:
    total = tf.reduce_sum(x)
    return _turns(lambda i, z: z + i * total, x)


def _forward_gradient(x: Any) -> Any:
    weights = tf.ones([4, 1])
    with tf.autodiff.ForwardAccumulator([weights], [weights]) as accumulator:
        loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
    return accumulator.jvp(loss)


def _until_a_row_says(x: Any) -> Any:
    return tf.while_loop(lambda i, z: i < 1.0 + tf.abs(x[0, 0]), lambda i, z: (i + 1.0, 0.5 * z), (0.0, x))[1]


def _behind_a_chain_of_seeds(x: Any) -> Any:
    seed = tf.constant([3, 4])
    for _ in range(40):
        seed, own = tf.unstack(tf.random.split(seed, 2))
    return x + tf.random.stateless_uniform(tf.shape(x), own)


def _chosen(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: _compiled(function)(tf.boolean_mask(x, x[:, 0] > 0))


CALLED: dict[str, Callable[[Any], Any]] = {
    "means added up in a loop": (lambda x: _turns(lambda i, a: 0.9 * a + ops.mean(i * x**2), ops.ones(()))),
    "sums added up in a loop": (lambda x: _turns(lambda i, a: a + ops.sum(i * x**2), ops.zeros(()))),
    "a count": (lambda x: _turns(lambda i, a: a + ops.sum(ops.cast(x > i, "int32")), ops.zeros((), "int32"))),
    "a mean in one branch": (lambda x: tf.cond(_coin(), lambda: tf.reduce_mean(x), lambda: 0.5)),
    "a sum in a compiled function": (lambda x: _compiled(tf.reduce_sum)(x)),
    "a sum of all means by their number": (lambda x: _compiled(lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"))(x)),
    "a loop in a loop": (lambda x: _turns(lambda _, a: _turns(lambda i, b: b + ops.sum(i * x), a), ops.zeros(()))),
    "sums added to a weight": (lambda x: _turns(lambda i, a: a + ops.sum(i * x**2), ops.ones(()))),
    "a mean or a sum": (lambda x: tf.cond(_coin(), lambda: ops.mean(x), lambda: ops.sum(x))),
    "a product of means": (lambda x: _turns(lambda i, a: a * ops.mean(i * x**2), ops.ones(()))),
    "a root in a compiled function": (lambda x: _compiled(lambda x: tf.sqrt(tf.reduce_mean(x**2)))(x)),
    "a maximum": (lambda x: _turns(lambda i, a: ops.maximum(a, i * ops.max(x)), ops.zeros(()))),
    "a mean or a count": (lambda x: tf.cond(_coin(), lambda: ops.mean(x), lambda: ops.cast(ops.shape(x)[0], "float32"))),
    "a mean of all or rows": (lambda x: tf.cond(_coin(), lambda: ops.mean(x, axis=0, keepdims=True), lambda: x)),
    "a sum or nothing": (lambda x: tf.cond(_coin(), lambda: ops.sum(x**2), lambda: 0.0)),
    "a mean of chosen rows": (_chosen(tf.reduce_mean)),
    "a row decides over turns": (_until_a_row_says),
    "numbers of one seed in a loop": (lambda x: _turns(lambda i, z: z + _numbers(z, tf.cast(i, tf.int32)), x)),
    "numbers of one seed in a branch": (lambda x: tf.cond(_coin(), lambda: x, lambda: _numbers(x, 5))),
    "numbers of a chain of seeds": (_behind_a_chain_of_seeds),
    "normalized in a loop": (lambda x: _turns(lambda i, z: i * z / ops.sum(z, axis=0), x)),
    "normalized in a loop in a loop": (lambda x: _turns(lambda _, y: _turns(lambda i, z: i * z / ops.sum(z, 0), y), x)),
    "normalized in a branch": (lambda x: tf.cond(_coin(), lambda: x, lambda: x - ops.mean(x, axis=0))),
    "compared in a branch": (lambda x: ops.inner(x, x)),
    "reversed in a function": (lambda x: _compiled(lambda x: tf.reverse(x, [0]))(x)),
    "rows decide for a branch": (lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x)),
    "rows decide over turns": (lambda x: _until(x, lambda z: tf.reduce_max(z) < 0.1)),
    "from row to row": (lambda x: tf.scan(lambda a, row: tf.tanh(a + row), x, initializer=tf.zeros(4))),
    "all rows into one": (lambda x: tf.foldl(lambda a, row: tf.tanh(a + row), x, initializer=tf.zeros(4))),
    "one row after the other": (_by_index),
    "from the second turn on": (_second_turn_mixes),
    "a forward gradient": (_forward_gradient),
    "a number of Python's": (lambda x: _in_python(lambda rows: np.float32(rows.mean()), x, [])),
    "something of Python's": (lambda x: tf.numpy_function(lambda rows: np.float32(rows.mean()), [x], tf.float32)),
    "rows of Python's": (lambda x: _in_python(lambda rows: rows**2, x, [None, 4])),
    "each row in a loop": (lambda x: _turns(lambda i, z: i * z / ops.sum(z, axis=1, keepdims=True), x)),
    "each row in a map": (lambda x: tf.map_fn(lambda row: row / tf.reduce_sum(row), x)),
    "each row, and its place": (lambda x: _compiled(tf.gather)(x, tf.range(tf.shape(x)[0]))),
    "each row in a branch": (lambda x: tf.cond(_coin(), lambda: x, lambda: tf.nn.softmax(x))),
    "each row in a function": (lambda x: _compiled(lambda x: tf.cumsum(x, 1))(x)),
    "attention of each row in a loop": (_attend),
    "with what all replicas have alike": (_from_a_global_value),
    "in time": (lambda x: tf.scan(lambda a, now: 0.5 * (a + now), tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2]))),
}
"""Of rows with four features: what calls loops, branches, functions and Python."""

PROGRAMS = {"sums": SUMS, "means": MEANS, "neither": JOINT, "compared": COMPARED}
