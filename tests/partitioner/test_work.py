"""What a replica computes and sends in a step: its part of one device's work, and each gradient once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.core.tf import trace
from tfrep_strategy.partitioner.placements import Shard
from tfrep_strategy.partitioner.planner import Planner
from tfrep_strategy.partitioner.program import Collective, live
from tfrep_strategy.partitioner.step import Given, PartitionedStep

_REPLICAS, _ROWS = 2, 16
_K = keras.layers


class _Step(NamedTuple):
    """A model, and what its step costs.

    Attributes:
        make: Makes the model.
        rounds: Of collectives, one after the other.
        beside: Bytes that are sent beside the gradients.
        shape: Of a row.
        dtype: Of the rows.
    """

    make: Callable[[], Any]
    rounds: int
    beside: int
    shape: tuple[int, ...] = (16, 16, 3)
    dtype: str = "float32"


def _sequential(*layers: Any, shape: tuple[int, ...] = (16, 16, 3), dtype: str = "float32") -> Any:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, _K.Dense(10)])


def _block(filters: int) -> list[Any]:
    return [_K.Conv2D(filters, 3, padding="same", use_bias=False), _K.BatchNormalization(), _K.ReLU()]


def _residual() -> Any:
    x = given = keras.Input((16, 16, 3))
    for filters in (8, 16):
        y = _K.BatchNormalization()(_K.Conv2D(filters, 3, padding="same")(x))
        x = _K.ReLU()(_K.Add()([y, _K.Conv2D(filters, 1)(x)]))
    return keras.Model(given, _K.Dense(10)(_K.GlobalAveragePooling2D()(x)))


def _transformer() -> Any:
    given = keras.Input((12,), dtype="int32")
    x = _K.Embedding(64, 16)(given)
    x = _K.LayerNormalization()(x + _K.MultiHeadAttention(2, 8)(x, x))
    x = _K.LayerNormalization()(x + _K.Dense(16)(_K.Dense(32, "gelu")(x)))
    return keras.Model(given, _K.Dense(10)(_K.GlobalAveragePooling1D()(x)))


def _u_shaped() -> Any:
    given = keras.Input((16, 16, 3))
    high = _K.Conv2D(4, 3, padding="same", activation="silu")(given)
    low = _K.Conv2D(8, 3, padding="same", activation="relu")(_K.MaxPooling2D()(high))
    joined = _K.Concatenate()([high, _K.Conv2DTranspose(4, 2, 2)(low)])
    return keras.Model(given, _K.Dense(10)(_K.Flatten()(joined)))


def _quantized(x: Any) -> Any:
    return keras.quantizers.fake_quant_with_min_max_vars(x, -1.0, 1.0)


class Contrastive(keras.Model):
    """Compares each row with all others: each replica compares its own rows with all."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = _sequential(_K.Flatten(), _K.Dense(32, "relu"))

    def call(self, x: Any) -> Any:
        return self.tower(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        likeness = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        labels = keras.ops.arange(keras.ops.shape(likeness)[0])
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, likeness, from_logits=True))


_SCALARS = 64
"""Bytes of the loss and of metrics, at most."""
_STEPS = {
    "dense": _Step(lambda: _sequential(_K.Flatten(), _K.Dense(64, "relu"), _K.Dropout(0.2)), 1, _SCALARS),
    "convolutions": _Step(lambda: _sequential(_K.Conv2D(8, 3), _K.MaxPooling2D(), _K.Conv2D(8, 3), _K.Flatten()), 1, _SCALARS),
    # Forward the mean in 32 bits, and two sums in 64; backward two sums in 32, of each channel.
    "batch normalization": _Step(
        lambda: _sequential(*_block(8), *_block(8), _K.GlobalAveragePooling2D()), 2 + 2 + 1, _SCALARS + 2 * 8 * (4 + 16 + 8)
    ),
    "residual": _Step(_residual, 2 + 2 + 1, _SCALARS + (8 + 16) * (4 + 16 + 8)),
    "depthwise": _Step(
        lambda: _sequential(_K.SeparableConv2D(8, 3), _K.GroupNormalization(2), _K.GlobalMaxPooling2D()), 1, _SCALARS
    ),
    "quantized": _Step(lambda: _sequential(_K.Flatten(), _K.Dense(64), _K.Lambda(_quantized)), 1, _SCALARS),
    "u": _Step(_u_shaped, 1, _SCALARS),
    # Of the table of words, slices and their numbers.
    "transformer": _Step(_transformer, 1, _SCALARS + _ROWS // _REPLICAS * 4 * (16 + 1), (12,), "int32"),
    "lstm": _Step(lambda: _sequential(_K.LSTM(16), shape=(12, 4)), 1, _SCALARS, (12, 4)),
    "convolutions over time": _Step(
        lambda: _sequential(_K.Conv1D(8, 3, padding="causal"), _K.Conv1D(8, 3), _K.Flatten(), shape=(12, 4)), 1, _SCALARS, (12, 4)
    ),
    # The representations of all rows go to all replicas, and their gradients back.
    "contrastive": _Step(Contrastive, 3, _SCALARS + 4 * _ROWS // _REPLICAS * 10 + 4 * _ROWS * 10),
}


def _multiplications(operation: Any) -> int:
    """Counts the multiplications of a product or a convolution; 0 for what costs a few operations an element."""
    shapes = [x.shape for x in operation.inputs]
    result = operation.outputs[0].shape if operation.outputs else None
    if operation.type in ("MatMul", "BatchMatMulV2"):
        transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return int(result.num_elements() * shapes[0][-2 if transposed else -1])
    if operation.type == "Conv2D":
        return int(result.num_elements() * math.prod(shapes[1][:-1]))
    if operation.type == "DepthwiseConv2dNative":
        return int(result.num_elements() * math.prod(shapes[1][:2]))
    if operation.type == "Conv2DBackpropInput":
        return int(shapes[2].num_elements() * math.prod(shapes[1][:-1]))
    if operation.type == "Conv2DBackpropFilter":
        return int(shapes[2].num_elements() * math.prod(result[:-1]))
    return 0


@pytest.mark.parametrize("name", _STEPS)
def test_work_rounds_and_bytes_of_a_replica(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _STEPS[name]
    drawn = np.random.default_rng(0)
    x = (drawn.random((_ROWS, *wanted.shape)) * 5).astype(wanted.dtype)
    y = drawn.integers(0, 10, _ROWS)
    model = wanted.make()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model._symbolic_build(data_batch=(x, y))
    graph = trace("step", lambda *data: model.train_step(data), [tf.TensorSpec(each.shape, each.dtype) for each in (x, y)], {})
    have_rows: dict[int, bool] = {}
    emit = Planner.emit

    def noted(plan: Planner, operation: Any, *args: Any, **changes: Any) -> None:
        is_cut = any(isinstance(plan.placement(x), Shard) for x in operation.inputs)
        emit(plan, operation, *args, **changes)
        have_rows[id(plan.node_of(operation))] = is_cut

    monkeypatch.setattr(Planner, "emit", noted)
    captured = [outer for outer, _ in graph.captures]
    given = [Given(Shard(0)), Given(Shard(0)), *(Given(is_shared=each.dtype == tf.resource) for each in captured)]
    step = PartitionedStep(graph, given, _REPLICAS)
    work = {True: 0, False: 0}
    for node in _run(step.nodes):
        if getattr(node, "traced", None) is not None:
            work[have_rows.get(id(node), False)] += _multiplications(node.traced)
    of_rows, of_all = work[True], work[False]
    assert of_rows > 0
    assert of_rows / _REPLICAS + of_all <= 1.1 / _REPLICAS * (of_rows + of_all)
    sent = [node for node in step.nodes if isinstance(node, Collective) and node.kind != "shared"]
    size = sum(_bytes(each.inputs[0]) for each in sent)
    assert len({each.level for each in sent}) == wanted.rounds, step.describe()
    gradients = 4 * sum(math.prod(v.shape) for v in model.trainable_variables if not v.path.endswith("embeddings"))
    assert gradients <= size <= gradients + wanted.beside, (gradients, step.describe())
    assert step.without_rule.keys() <= {"ResourceScatterSub"}  # In the scope of a strategy, gradients are whole before it.


def _run(nodes: Any) -> Iterator[Any]:
    """Yields what runs of nodes, and of their bodies."""
    for node in nodes:
        yield node
        for _, body in getattr(node, "bodies", ()):
            yield from _run(live(body.nodes, body.results))


def _bytes(tensor: Any) -> int:
    """Returns how much is sent of a tensor; of rows, those of a replica."""
    return math.prod(_ROWS // _REPLICAS if size is None else size for size in tensor.shape) * tensor.dtype.size
