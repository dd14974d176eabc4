"""Weights that layouts shard: each replica computes with its part, and sends what Megatron-LM's replicas send.

M. Shoeybi et al., arXiv:1909.08053, section 3: one all-reduce for each block of a layer forward, and one backward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences, on_mesh

from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import OF_LAYOUT, PARTIAL, REPLICATE, Placement, Shard
from tfrep_strategy.partitioner.program import Collective

pytestmark = pytest.mark.lane("quick")

_DRAW = np.random.default_rng(0)
_ROWS, _TIMES, _HEADS, _WIDTH, _DEPTH = 5, 6, 4, 8, 4


def _drawn(*shape: int) -> np.ndarray:
    return (_DRAW.normal(size=shape) / np.sqrt(shape[0])).astype("float32")


def _along(axis: int | None, size: int) -> Callable[[int], Placement]:
    """Returns what gives the placement of a weight whose axis has this size, for a number of replicas."""
    return lambda replicas: REPLICATE if axis is None else Shard(axis, size // replicas, OF_LAYOUT)


_WHOLE = _along(None, 0)


def _mlp(x: Any, into: Any, bias: Any, out: Any) -> Any:
    return tf.nn.gelu(x @ into + bias) @ out


def _attention(x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
    q, k, v = (tf.einsum("btd,dhe->bthe", x, each) for each in (query, key, value))
    weights = tf.nn.softmax(tf.einsum("bthe,bshe->bhts", q, k))
    return tf.einsum("bthe,hed->btd", tf.einsum("bhts,bshe->bthe", weights, v), out)


def _attention_of_matrices(x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
    def heads(weight: Any) -> Any:
        every = tf.reshape(tf.reshape(x, [-1, _WIDTH]) @ weight, [-1, _TIMES, _HEADS, _DEPTH])
        return tf.transpose(every, [0, 2, 1, 3])

    q, k, v = map(heads, (query, key, value))
    found = tf.transpose(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)) @ v, [0, 2, 1, 3])
    return tf.reshape(found, [-1, _HEADS * _DEPTH]) @ out


_X, _SEQUENCES = _drawn(_ROWS, _WIDTH), _drawn(_ROWS, _TIMES, _WIDTH)
_MLP = [_drawn(_WIDTH, 16), _drawn(16), _drawn(16, _WIDTH)]
_OF_HEADS = [*(_drawn(_WIDTH, _HEADS, _DEPTH) for _ in range(3)), _drawn(_HEADS, _DEPTH, _WIDTH)]
_MATRICES = [*(_drawn(_WIDTH, _HEADS * _DEPTH) for _ in range(3)), _drawn(_HEADS * _DEPTH, _WIDTH)]

_BLOCKS: dict[str, tuple[Callable[..., Any], np.ndarray, Sequence[np.ndarray], Sequence[Callable[[int], Placement]]]] = {
    "columns, then rows": (_mlp, _X, _MLP, [_along(1, 16), _along(0, 16), _along(0, 16)]),
    "a whole bias": (_mlp, _X, _MLP, [_along(1, 16), _WHOLE, _along(0, 16)]),
    "attention heads": (_attention, _SEQUENCES, _OF_HEADS, [*[_along(1, _HEADS)] * 3, _along(0, _HEADS)]),
    "heads from matrices": (_attention_of_matrices, _SEQUENCES, _MATRICES, [*[_along(1, 16)] * 3, _along(0, 16)]),
}


def _sent(step: Any) -> list[str]:
    return [each.kind for each in step.nodes if isinstance(each, Collective)]


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", _BLOCKS)
def test_a_block(name: str, replicas: int) -> None:
    block, x, weights, along = _BLOCKS[name]
    placements = [REPLICATE, *(each(replicas) for each in along)]

    def forward(x: Any, *weights: Any) -> Any:
        return [block(x, *weights)]

    def backward(x: Any, *weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            loss = tf.reduce_mean(block(x, *weights) ** 2)
        return tape.gradient(loss, [x, *weights])

    for function, sums in ((forward, 1), (backward, 2)):
        difference, step, _ = differences(function, [x, *weights], placements, [1] * replicas, is_open=False)
        assert difference < 1e-6
        assert not step.without_rule
        sent = _sent(step)
        assert sent.count("sum") == sums
        assert function is backward or "gather" not in sent, "only gradients are wanted whole here"


@pytest.mark.parametrize("counts", [[3, 2], [3, 0, 2]])
@pytest.mark.parametrize("name", _BLOCKS)
def test_a_block_on_a_mesh(name: str, counts: Sequence[int]) -> None:
    """Replicas with the same rows send what they send without others; those with other rows add up their gradients."""
    block, x, weights, along = _BLOCKS[name]

    def gradients(x: Any, *weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            loss = tf.reduce_mean(block(x, *weights) ** 2)
        of_rows, *found = tape.gradient(loss, [x, *weights])
        return [loss, of_rows, *(found if tf.executing_eagerly() else map(marks.gradient, found))]

    for function, sums in ((lambda x, *weights: [block(x, *weights)], 1), (gradients, 2)):
        difference, step = on_mesh(function, [x, *weights], [None, *(each(2) for each in along)], counts, model_size=2)
        assert difference < 1e-6
        assert not step.without_rule
        sent = Counter((each.group, each.kind) for each in step.nodes if isinstance(each, Collective))
        assert sent["model", "sum"] == sums
        assert sent["batch", "gradient"] == (len(weights) if function is gradients else 0)


def _in_a_loop(x: Any, into: Any, bias: Any, out: Any) -> Any:
    for _ in tf.range(3):
        x = x + tf.where(tf.reduce_sum(x) > 0.0, _mlp(x, into, bias, out), 2.0 * x)
    return [x, tf.reduce_sum(x, 0)]


def test_a_loop_on_a_mesh() -> None:
    """A loop whose body sends along both axes."""
    looped = tf.autograph.experimental.do_not_convert(lambda *given: tf.function(_in_a_loop)(*given))
    difference, step = on_mesh(looped, [_X, *_MLP], [None, *(each(2) for each in _BLOCKS["a whole bias"][3])], [3, 2], model_size=2)
    assert difference < 1e-5
    assert not step.without_rule


def _vocabulary(x: Any, table: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([x, table])
        logits = (x + tf.gather(table, labels)) @ tf.transpose(table)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return [loss, *map(tf.convert_to_tensor, tape.gradient(loss, [x, table]))]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_vocabulary(replicas: int, axis: int) -> None:
    table, labels = _drawn(12, _WIDTH), _DRAW.integers(0, 12, _ROWS).astype("int32")
    placements = [REPLICATE, _along(axis, (12, _WIDTH)[axis])(replicas), REPLICATE]
    difference, step, _ = differences(_vocabulary, [_X, table, labels], placements, [1] * replicas, is_open=False)
    assert difference < 1e-6
    assert not step.without_rule


def _logits(x: Any, table: Any, labels: Any) -> Any:
    return [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ table)]


def _rows(table: Any, labels: Any) -> Any:
    return [tf.gather(table, labels)]


def test_what_a_vocabulary_sends() -> None:
    """A number or two for each row, not the logits; and the chosen rows of the table."""
    labels = _DRAW.integers(0, 12, _ROWS).astype("int32")
    of_logits = [_X, _drawn(_WIDTH, 12), labels], [REPLICATE, _along(1, 12)(2), REPLICATE]
    of_rows = [_drawn(12, _WIDTH), labels], [_along(0, 12)(2), REPLICATE]
    for function, given, sent in ((_logits, of_logits, ["gather", "sum", "sum"]), (_rows, of_rows, ["sum"])):
        difference, step, _ = differences(function, *given, [1, 1], is_open=False)
        assert difference < 1e-6
        assert _sent(step) == sent


@pytest.mark.parametrize("counts", [[1, 1], [0, 2]])
def test_beside_the_rows_of_a_batch(counts: Sequence[int]) -> None:
    """One of the two is sent: a replica has either its rows or its columns of a product."""
    difference, _, _ = differences(
        lambda x, w: [x @ w, tf.reduce_sum(x @ w, 0)], [_drawn(2, 4), _drawn(4, 6)], [Shard(0), REPLICATE], counts
    )
    assert difference < 1e-6


def _gradients(function: Callable[..., Any], *given: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = function(*given)
        loss = tf.reduce_sum(found * tf.cos(found))
    return [found, *tape.gradient(loss, given)]


def _pooled(x: Any, weights: Any, bias: Any) -> Any:
    y = tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), bias)
    mean, variance = tf.nn.moments(y, [0, 1, 2])
    y = tf.nn.relu(tf.nn.batch_normalization(y, mean, variance, bias, None, 1e-3))
    return tf.nn.avg_pool2d(tf.nn.max_pool2d(y, 3, 1, "SAME"), 2, 2, "VALID")


def _resized(x: Any) -> Any:
    ways = ("bilinear", "nearest", "bicubic", "lanczos3")
    return tf.concat([tf.image.resize(x, (5, 6), way) for way in ways], 1)


_IMAGES = _drawn(3, 6, 6, 8).astype("float64")
_CONVOLUTIONS: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "convolution": (lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), [_IMAGES, _drawn(3, 3, 8, 4)]),
    "convolution of volumes": (
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
        [_drawn(2, 3, 3, 3, 8).astype("float64"), _drawn(2, 2, 2, 8, 4)],
    ),
    "transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, tf.stack([tf.shape(x)[0], 12, 12, 4]), 2, "SAME"),
        [_IMAGES, _drawn(3, 3, 4, 8)],
    ),
    "in groups": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), [_IMAGES, _drawn(3, 3, 4, 8)]),
    "depthwise": (lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [_IMAGES, _drawn(3, 3, 8, 4)]),
    "pooled": (_pooled, [_IMAGES, _drawn(3, 3, 8, 8), _drawn(8)]),
    "volumes pooled": (
        lambda x: tf.nn.avg_pool3d(tf.nn.max_pool3d(x, 2, 1, "SAME"), 2, 2, "SAME"),
        [_drawn(2, 4, 4, 4, 8)],
    ),
    "resized": (_resized, [_IMAGES.astype("float32")]),
    "over channels": (tf.nn.local_response_normalization, [_IMAGES.astype("float32")]),
}


@pytest.mark.lane("rows")
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_images_by_brute_force(name: str, replicas: int) -> None:
    """Images and filters are split along each axis that can be, or along none; and images are addends."""
    function, given = _CONVOLUTIONS[name]
    given = [x.astype(given[0].dtype) for x in given]
    splits = [[REPLICATE, *(_along(i, d)(replicas) for i, d in enumerate(x.shape) if d % replicas == 0)] for x in given]

    def run(*x: Any) -> list[Any]:
        return [function(*x)] if name == "in groups" else _gradients(function, *x)  # CPUs have no gradient of groups.

    for placements in itertools.product([*splits[0], PARTIAL], *splits[1:]):
        found, _, _ = differences(run, given, placements, [1] * replicas, is_open=False)
        assert found < (1e-9 if given[0].dtype == np.float64 else 1e-5), placements


def _two_convolutions(x: Any, into: Any, bias: Any, out: Any) -> Any:
    return tf.reduce_mean(tf.nn.conv2d(_pooled(x, into, bias), out, 1, "SAME"), [1, 2])


@pytest.mark.parametrize("replicas", [2, 4])
def test_what_convolutions_send(replicas: int) -> None:
    """As a block of dense layers: a sum forward, and one backward for the images. No image or filter is gathered."""
    weights = [x.astype("float64") for x in (_drawn(3, 3, 8, 8), _drawn(8), _drawn(3, 3, 8, 4))]
    placements = [REPLICATE, *(_along(axis, 8)(replicas) for axis in (3, 0, 2))]
    steps: list[tuple[Callable[..., Any], list[str]]] = [
        (lambda *given: [_two_convolutions(*given)], ["sum"]),
        (lambda *given: _gradients(_two_convolutions, *given), ["sum", "sum", *["gather"] * 3]),
    ]
    for function, expected in steps:
        found, step, _ = differences(function, [_IMAGES, *weights], placements, [1] * replicas, is_open=False)
        assert found < 1e-9
        assert not step.without_rule
        assert sorted(_sent(step), reverse=True) == expected, "only gradients are wanted whole here"
