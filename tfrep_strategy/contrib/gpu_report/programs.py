"""Small programs that run on replicas and on one device, and whose results have to be equal.

Each takes a strategy, or None for plain Keras, and returns named arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.strategies.mirrored import use_logical_cpus

Results = dict[str, Any]

_EXAMPLES, _BATCH = 60, 16  # The last batch is smaller, and odd on no number of replicas alone.

EXACT = 1e-5
"""By how much a float32 result may differ: 20 times what was found, the last bit of a loss near 2.3."""

ROUNDED = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By how much a result may differ that has passed through a dtype: the distance from 1 to the next number of that dtype.

One device rounds nearly as far. Its weights move by up to 1.4e-4 (mixed_float16), 1.7e-3 (mixed_bfloat16) and 3.9e-3 (bfloat16)
when the last bit of its inputs changes, the rows of a batch come in another order, or the gradient is added up from two halves.
`python -m benchmarks.rounding --seeds 10` measures this. A gradient that is wrong by a tenth moves them by 2e-2.
"""


class Program(NamedTuple):
    """One program.

    Attributes:
        run: Runs it under a strategy, or without one.
        tolerance: By how much a number may differ from one device's.
        settings: Those of the strategy.
    """

    run: Callable[[Any], Results]
    tolerance: float = EXACT
    settings: Mapping[str, Any] = MappingProxyType({})


def halves(memory_mib: int) -> list[str]:
    """Cuts this machine's first GPU in two, or its CPU if it has none.

    Args:
        memory_mib: The memory of each half of a GPU, in MiB.

    Returns:
        The names of both logical devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return use_logical_cpus(2)
    tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mib)] * 2)
    tf.config.set_visible_devices(gpus[:1], "GPU")
    return ["GPU:0", "GPU:1"]


def _scope(strategy: Any) -> Any:
    keras.utils.set_random_seed(0)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws pictures and their labels.

    Args:
        count: How many.

    Returns:
        float32 of shape `[count, 12, 12, 3]`, and ten classes.
    """
    random = np.random.default_rng(0)
    return random.standard_normal((count, 12, 12, 3), np.float32), random.integers(10, size=count)


def convnet(*middle: Any, conv_bias: bool = True) -> Any:
    """Makes a small net without kinks.

    Args:
        *middle: Layers behind the convolution.
        conv_bias: Whether the convolution has a bias.

    Returns:
        The model. Its logits are float32.
    """
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(8, 3, use_bias=conv_bias),
            *middle,
            keras.layers.Activation("tanh"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


def _fitted(
    strategy: Any, *middle: Any, conv_bias: bool = True, optimizer: Any = None, jit_compile: Any = False
) -> tuple[Any, Results]:
    x, y = images(_EXAMPLES)
    with _scope(strategy):
        model = convnet(*[layer() for layer in middle], conv_bias=conv_bias)
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile,
        )
    history = model.fit(x, y, batch_size=_BATCH, epochs=2, verbose=0).history
    return model, {"loss": history["loss"], "accuracy": history["accuracy"], "weights": _flat(model.get_weights())}


def _flat(weights: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(w, np.float64)) for w in weights])


def fit(strategy: Any) -> Results:
    """`fit` with batches of 16, 16, 16 and 12 examples."""
    return _fitted(strategy)[1]


def evaluate_and_predict(strategy: Any) -> Results:
    """`evaluate` and `predict` of all, and `predict` of one row."""
    model, _ = _fitted(strategy)
    x, y = images(_EXAMPLES)
    return {
        "evaluated": model.evaluate(x, y, batch_size=_BATCH, verbose=0),
        "predicted": model.predict(x, batch_size=_BATCH, verbose=0),
        "one row": model.predict(x[:1], verbose=0),
    }


def custom_loop(strategy: Any) -> Results:
    """A custom training loop: `strategy.run` in a `tf.function`, a tape, an optimizer."""
    replicas = strategy or tf.distribute.get_strategy()
    data = tf.data.Dataset.from_tensor_slices(images(_EXAMPLES)).batch(_BATCH)
    with _scope(strategy):
        model, optimizer = convnet(), keras.optimizers.SGD(0.1)

    @tf.function
    def step(batch: Any) -> Any:
        def replica_step(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
                loss = tf.reduce_sum(losses) / _BATCH
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return replicas.reduce("SUM", replicas.run(replica_step, args=batch), axis=None)

    losses = [float(step(batch)) for batch in replicas.experimental_distribute_dataset(data)]
    return {"losses": losses, "weights": _flat(model.get_weights())}


def embedding(strategy: Any) -> Results:
    """Sparse gradients through Adam."""
    tokens = np.random.default_rng(0).integers(50, size=(_EXAMPLES, 7))
    with _scope(strategy):
        model = keras.Sequential([keras.Input((7,)), keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    model.fit(tokens, np.ones((_EXAMPLES, 1)), batch_size=_BATCH, epochs=5, verbose=0)
    return {"weights": _flat(model.get_weights())}


def accumulation(strategy: Any) -> Results:
    """Gradients of two batches make an update, clipped as a whole."""
    optimizer = lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05, gradient_accumulation_steps=2)  # noqa: E731
    return _fitted(strategy, optimizer=optimizer)[1]


def synchronized_batch_norm(strategy: Any) -> Results:
    """Batch normalisation over the global batch."""
    return _fitted(strategy, lambda: keras.layers.BatchNormalization(synchronized=True))[1]


def xla(strategy: Any) -> Results:
    """`jit_compile=True`."""
    return _fitted(strategy, jit_compile=True)[1]


def clipped_adam(strategy: Any, jit_compile: bool = False) -> Results:
    """Adam, whose gradients are clipped as a whole."""
    optimizer = lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1)  # noqa: E731
    return _fitted(strategy, optimizer=optimizer, jit_compile=jit_compile)[1]


def _with_policy(name: str) -> Callable[[Any], Results]:
    # The convolution has no bias. Its gradient is a sum of 1,600 numbers, and on CPUs TensorFlow's own BiasAddGrad keeps such a sum
    # in bfloat16. One device's bias moves by 1.2e-3 when the last bit of its inputs changes, but by 8e-2 when the order of the rows
    # does, which is more than most of the biases. A bound above that would find no fault. The gradient of the last layer's bias is
    # a sum of 16 numbers.
    def run(strategy: Any) -> Results:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(name)
        try:
            return _fitted(strategy, conv_bias=False)[1]
        finally:
            keras.config.set_dtype_policy(before)

    return run


PROGRAMS = {
    "fit": Program(fit),
    "evaluate and predict": Program(evaluate_and_predict),
    "custom loop": Program(custom_loop),
    "embedding, Adam": Program(embedding),
    "accumulation, clipping": Program(accumulation),
    "synchronized batch norm": Program(synchronized_batch_norm),
    "XLA": Program(xla),
    "sharded optimizer state": Program(clipped_adam, settings={"shard_optimizer_state": True}),
    "sharded optimizer state, XLA": Program(partial(clipped_adam, jit_compile=True), settings={"shard_optimizer_state": True}),
    "compression, bf16": Program(fit, ROUNDED["bfloat16"], {"compression": "bf16"}),
    "compression, fp16": Program(fit, ROUNDED["float16"], {"compression": "fp16"}),
    "mixed_float16": Program(_with_policy("mixed_float16"), ROUNDED["float16"]),
    "mixed_bfloat16": Program(_with_policy("mixed_bfloat16"), ROUNDED["bfloat16"]),
    "bfloat16": Program(_with_policy("bfloat16"), ROUNDED["bfloat16"]),
}


def largest_difference(found: Results, expected: Results) -> float:
    """Returns the largest absolute difference between two results of one program; infinite where one is not finite."""
    assert found.keys() == expected.keys()
    gaps = [np.max(np.abs(np.asarray(found[k], np.float64) - np.asarray(expected[k], np.float64))) for k in expected]
    return float(np.max(np.nan_to_num(gaps, nan=np.inf)))
