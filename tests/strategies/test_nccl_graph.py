"""The graph that mirrored GPUs run, on logical CPUs: only NCCL's kernel is replaced, by a sum over the replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import scenarios
import tensorflow as tf
from gpu_kernels import without_gpu_kernel
from scenarios.base import init, regression
from test_one_device_answer import assert_same, on_one_device

import tfrep_strategy as tfrep
from tfrep_strategy.communicators import local
from tfrep_strategy.core.tf import NCCL_DTYPES

pytestmark = pytest.mark.lane("gpus")


class Nccl:
    """Stands in for NCCL's kernel, and notes what it gets."""

    def __init__(self) -> None:
        self.graphs: list[tf.Graph] = []
        self.launches: list[list[Any]] = []

    def all_sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        devices = [tensor.device for tensor in tensors]
        assert all(devices), "NCCL has to know where each tensor is."
        assert len(set(devices)) == len(tensors)
        assert {tensor.dtype for tensor in tensors} <= NCCL_DTYPES
        self.launches.append([(tensor.dtype.name, tensor.shape.num_elements()) for tensor in tensors])
        self.graphs.append(tf.compat.v1.get_default_graph())
        results = []
        for device in devices:
            with tf.device(device):
                results.append(tf.add_n(tensors))
        return results


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    kernel = Nccl()
    monkeypatch.setattr(local, "nccl_connects", lambda gpus: len(gpus) > 1)
    monkeypatch.setattr(local, "nccl_all_sum", kernel.all_sum)
    return kernel


def mirrored(**options: Any) -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"], **options)


# Keras's `isfinite` of sparse gradients, for a loss scale: on one GPU too it runs on the CPU.
_OF_KERAS = {("TensorScatterUpdate", "bool", "int32")}

SCENARIOS = [
    "sgd_momentum",
    "global_clipnorm",
    "cnn_synchronized_batch_normalization",
    "embedding_shared_by_two_towers",
    "accumulation",
    "mixed_float16",
    "mixed_bfloat16",
    "all_reduce_in_call",
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_answer_of_one_device(name: str, nccl: Nccl) -> None:
    with mirrored().scope():
        found = scenarios.run(name)
    assert nccl.launches
    assert_same(found, on_one_device(name), name)


def trained_weights(policy: str, steps: int = 4) -> list[np.ndarray]:
    """A net of what large nets are made of: embedding, convolution, synchronized batch norm, dense."""
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy(policy)
    try:
        words = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(9, 8, embeddings_initializer=init(1))(words)
        x = keras.layers.Conv1D(8, 3, use_bias=False, kernel_initializer=init(2))(x)
        x = keras.layers.BatchNormalization(synchronized=True)(x)
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Activation("tanh")(x))
        model = keras.Model(words, keras.layers.Dense(1, kernel_initializer=init(3), dtype="float32")(x))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        rows = np.random.RandomState(0).randint(0, 9, (8 * steps, 6))
        model.fit(rows, rows.mean(1, keepdims=True) / 9, batch_size=8, epochs=1, shuffle=False, verbose=0)
        return [np.asarray(w, np.float64) for w in model.get_weights()]
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 1e-5), ("mixed_float16", 2e-2), ("mixed_bfloat16", 2e-2), ("bfloat16", 2e-2)]
)
def test_every_operation_of_a_step_has_a_kernel_on_gpus(policy: str, tolerance: float, nccl: Nccl) -> None:
    expected = trained_weights(policy)
    with mirrored().scope():
        found = trained_weights(policy)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance)
    # Nothing but a replica's own work is on the second device.
    missing = set().union(*(without_gpu_kernel(graph, lambda device: "CPU:1" in device) for graph in set(nccl.graphs)))
    assert missing <= _OF_KERAS


def test_a_bucket_is_one_launch(nccl: Nccl) -> None:
    def launches(bucket_bytes: int) -> list[list[Any]]:
        nccl.launches.clear()
        with mirrored(bucket_bytes=bucket_bytes).scope():
            model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(8) for _ in range(10)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
            model.train_on_batch(*regression(8))
        return [sums for sums in nccl.launches if sums[0][1] != 1]  # The loss is a sum of its own.

    loss = 2  # Its sum and the number of rows travel with the gradients.
    assert launches(32 << 20) == [[("float32", 8 * 5 + 9 * 8 * 9 + 9 + loss)] * 2]
    assert len(launches(1)) > 10
