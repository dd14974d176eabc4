"""Small Keras programs, each of which must give under a strategy what it gives on one device.

A scenario is a function without arguments. It runs inside a strategy's scope, or in none, and returns what is to be
compared: a dictionary of arrays, numbers and lists. It never asks where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(fn: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Registers a scenario under its name."""
    SCENARIOS[fn.__name__] = fn
    return fn


def run(name: str) -> dict[str, Any]:
    """Runs a scenario with seeds set."""
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy("float32")
    try:
        return SCENARIOS[name]()
    finally:
        keras.config.set_dtype_policy("float32")


def init(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


def regression(n: int = 37, d: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets whose number no replica count but one divides."""
    rng = np.random.RandomState(0)
    x = rng.randn(n, d).astype("float32")
    return x, (x @ rng.randn(d, 1) + 0.5 * np.sin(3 * x[:, :1])).astype("float32")


def dense(d: int = 4, out: int = 1, activation: str | None = None) -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((d,)),
            layers.Dense(8, "tanh", kernel_initializer=init(1)),
            layers.Dense(out, activation, kernel_initializer=init(2)),
        ]
    )


def trained(model: Any, x: Any, y: Any = None, *, epochs: int = 3, batch_size: int = 16, **kwargs: Any) -> dict[str, Any]:
    """Fits, evaluates and predicts, and returns all that came out."""
    shuffle = kwargs.pop("shuffle", False)
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=shuffle, verbose=0, **kwargs)
    weight = kwargs.get("sample_weight")
    return {
        "weights": model.get_weights(),
        "optimizer": [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables],
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=batch_size, sample_weight=weight, verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
    }


# Optimizers and their options.


def _optimizer(name: str, make: Callable[[], Any]) -> None:
    def fn() -> dict[str, Any]:
        model = dense()
        model.compile(make(), "mse", metrics=["mae"])
        return trained(model, *regression())

    SCENARIOS[name] = fn


_O = keras.optimizers
_optimizer("sgd_momentum", lambda: _O.SGD(0.05, momentum=0.9))
_optimizer("adam", lambda: _O.Adam(0.02))
_optimizer("clipnorm", lambda: _O.SGD(0.1, clipnorm=0.1))
_optimizer("clipvalue", lambda: _O.SGD(0.1, clipvalue=0.05))
_optimizer("global_clipnorm", lambda: _O.Adam(0.05, global_clipnorm=0.1))
_optimizer("weight_decay", lambda: _O.AdamW(0.02, weight_decay=0.1))
_optimizer("accumulation", lambda: _O.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2))
_optimizer("accumulation_clipped", lambda: _O.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=4))
_optimizer("ema", lambda: _O.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2))
_optimizer("loss_scale_factor", lambda: _O.SGD(0.1, loss_scale_factor=16.0))
_optimizer("learning_rate_schedule", lambda: _O.SGD(_O.schedules.ExponentialDecay(0.1, 2, 0.5)))


@scenario
def swap_ema_weights() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.1, use_ema=True, ema_momentum=0.7), "mse")
    x, y = regression()
    return trained(
        model, x, y, validation_data=(x, y), callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    )


@scenario
def frozen_variables() -> dict[str, Any]:
    model = dense()
    model.layers[0].trainable = False
    model.compile(_O.Adam(0.05), "mse")
    return trained(model, *regression())


@scenario
def variable_without_gradient() -> dict[str, Any]:
    inputs = keras.Input((4,))
    used = layers.Dense(1, kernel_initializer=init(1))(inputs)
    unused = layers.Dense(1, kernel_initializer=init(2))(inputs)
    model = keras.Model(inputs, [used, unused])
    model.compile(_O.SGD(0.05), ["mse", None])
    x, y = regression()
    model.fit(x, [y, y], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


# Mixed precision.


@scenario
def mixed_bfloat16() -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = dense()
    model.compile(_O.SGD(0.01), "mse")
    model.fit(*regression(32), batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {"weights_rough": model.get_weights()}


@scenario
def mixed_float16() -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    model.compile(_O.SGD(0.01), "mse", jit_compile=False)
    model.fit(*regression(32), batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {"weights_rough": model.get_weights(), "scale": float(model.optimizer.dynamic_scale)}


@scenario
def float16_overflow_on_one_replica() -> dict[str, Any]:
    """Only the last rows overflow, which are those of the last replica: all skip the step, and halve the scale."""
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    model.compile(_O.SGD(0.01), "mse", jit_compile=False)
    x, y = regression(16)
    before = model.get_weights()
    x[-1] = 6e4
    y[-1] = 6e4
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    unchanged = [bool(np.array_equal(a, b)) for a, b in zip(before, model.get_weights(), strict=True)]
    return {"unchanged": unchanged, "scale": float(model.optimizer.dynamic_scale)}


# Losses and weights.


class TwoScaledOptimizers(keras.Model):
    """Scales both losses before it applies either gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(), dense()
        self.optimizers = [_O.LossScaleOptimizer(_O.SGD(rate), initial_scale=64.0) for rate in (0.05, 0.1)]
        for optimizer, net in zip(self.optimizers, (self.first, self.second), strict=True):
            optimizer.build(net.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.first(x) + self.second(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        nets, tapes = (self.first, self.second), (tf.GradientTape(), tf.GradientTape())
        scaled = []
        for optimizer, net, tape in zip(self.optimizers, nets, tapes, strict=True):
            with tape:
                scaled.append(optimizer.scale_loss(tf.reduce_mean(tf.square(net(x) - y))))
        for optimizer, net, tape, loss in zip(self.optimizers, nets, tapes, scaled, strict=True):
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return {"loss": scaled[0] / 64.0}


@scenario
def two_scaled_optimizers() -> dict[str, Any]:
    x, y = regression()
    model = TwoScaledOptimizers()
    model.compile()
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


def _loss(name: str, loss: Callable[[], Any], **compile_args: Any) -> None:
    def fn() -> dict[str, Any]:
        model = dense()
        model.compile(_O.SGD(0.002), loss(), **compile_args)
        x, y = regression()
        weights = np.linspace(0.1, 3.0, len(x)).astype("float32")
        return trained(model, x, y, sample_weight=weights)

    SCENARIOS[name] = fn


_L = keras.losses
_loss("loss_sum", lambda: _L.MeanSquaredError(reduction="sum"))
_loss("loss_mean", lambda: _L.MeanSquaredError(reduction="mean"), weighted_metrics=["mae"])
_loss("loss_mean_with_sample_weight", lambda: _L.MeanSquaredError(reduction="mean_with_sample_weight"))


def _segmentation() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    x = rng.randn(37, 6, 6, 1).astype("float32")
    return x, (x + 0.3 * rng.randn(37, 6, 6, 1) > 0).astype("float32")


def _mixed_rows(name: str, loss: Callable[[], Any], **fit_options: Any) -> None:
    def body() -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3, padding="same", activation="tanh", kernel_initializer=init(1)),
                layers.Conv2D(1, 1, activation="sigmoid", kernel_initializer=init(2)),
            ]
        )
        model.compile(_O.SGD(0.2, momentum=0.9), loss())
        return trained(model, *_segmentation(), **fit_options)

    body.__name__ = name
    scenario(body)


_mixed_rows("loss_dice", lambda: _L.Dice())
_mixed_rows("loss_dice_by_name", lambda: "dice", sample_weight=np.linspace(0.1, 2.0, 37).astype("float32"))
_mixed_rows("loss_dice_by_row", lambda: _L.Dice(axis=(1, 2, 3)))
_mixed_rows("loss_tversky_sum", lambda: _L.Tversky(alpha=0.3, beta=0.7, reduction="sum"))


@scenario
def loss_circle() -> dict[str, Any]:
    """Each row is compared with every other one of the batch; the last batch has five."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, kernel_initializer=init(1)),
            layers.UnitNormalization(),
        ]
    )
    model.compile(_O.SGD(0.01), _L.Circle(gamma=2.0, margin=0.25))
    x, _ = regression()
    return trained(model, x, np.arange(37) % 3)


@scenario
def loss_circle_in_a_custom_loop() -> dict[str, Any]:
    strategy = tf.distribute.get_strategy()
    x, _ = regression(32)
    results = {}
    for reduction in ("sum_over_batch_size", "sum", "none"):
        model, optimizer = dense(out=3), _O.SGD(0.01)
        loss_of = _L.Circle(gamma=2.0, reduction=reduction)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer, loss_of: Any = loss_of) -> Any:
            bx, labels = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(labels, tf.math.l2_normalize(model(bx, training=True), 1)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def train(batch: Any, step: Any = step) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((x, np.arange(32) % 3)).batch(13)
        )
        results[f"losses_{reduction}"] = [float(train(batch)) for _ in range(2) for batch in dataset]
        results[f"weights_{reduction}"] = model.get_weights()
    return results


@scenario
def class_weight() -> dict[str, Any]:
    model = dense(out=3, activation="softmax")
    model.compile(_O.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, _ = regression()
    return trained(model, x, (np.arange(37) % 16 // 6).astype("int32"), class_weight={0: 1.0, 1: 4.0, 2: 0.5})


@scenario
def multi_output() -> dict[str, Any]:
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    h = layers.Concatenate()([a, b])
    u = layers.Dense(1, kernel_initializer=init(1), name="u")(h)
    v = layers.Dense(2, kernel_initializer=init(2), name="v")(h)
    model = keras.Model({"a": a, "b": b}, {"u": u, "v": v})
    model.compile(_O.SGD(0.05), {"u": "mse", "v": "mae"}, loss_weights={"u": 1.0, "v": 0.5}, metrics={"u": ["mae"]})
    x, y = regression()
    return trained(model, {"a": x, "b": x[:, :2] + 1}, {"u": y, "v": x[:, 2:]})


@scenario
def regularizer_and_add_loss() -> dict[str, Any]:
    class Activity(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, kernel_regularizer="l2", kernel_initializer=init(1)),
            Activity(),
            layers.Dense(1, kernel_initializer=init(2)),
        ]
    )
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression())


@scenario
def masked_sequence() -> dict[str, Any]:
    """A mask that is longer on some replicas than on others, through a recurrent layer into the loss."""
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (21, 6))
    for row, length in enumerate(rng.randint(1, 7, 21)):
        x[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=init(1)),
            layers.LSTM(4, return_sequences=True, kernel_initializer=init(2), recurrent_initializer=init(3)),
            layers.Dense(1, kernel_initializer=init(4)),
        ]
    )
    model.compile(_O.SGD(0.1), "mse")
    return trained(model, x, rng.randn(21, 6, 1).astype("float32"), batch_size=8)


# Layers.


@scenario
def cnn_synchronized_batch_normalization() -> dict[str, Any]:
    rng = np.random.RandomState(0)
    x = rng.randn(37, 8, 8, 2).astype("float32")
    x[::3] += 2.0
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, kernel_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, kernel_initializer=init(2)),
        ]
    )
    loss = _L.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_O.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return trained(model, x, rng.randint(0, 3, 37))


@scenario
def masked_synchronized_batch_normalization() -> dict[str, Any]:
    """A mask that is longer on some replicas than on others."""
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (21, 6))
    for row, length in enumerate(np.sort(rng.randint(1, 7, 21))):
        x[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.Dense(1, kernel_initializer=init(4)),
        ]
    )
    model.compile(_O.SGD(0.1), "mse")
    return trained(model, x, rng.randn(21, 6, 1).astype("float32"), batch_size=8)


@scenario
def attention() -> dict[str, Any]:
    inputs = keras.Input((5, 4))
    h = layers.MultiHeadAttention(2, 3, kernel_initializer=init(1))(inputs, inputs)
    h = layers.LayerNormalization()(h + inputs)
    model = keras.Model(inputs, layers.Dense(1, kernel_initializer=init(2))(layers.Flatten()(h)))
    # Not Adam: the gradient of the key's bias is zero but for rounding, which Adam would blow up.
    model.compile(_O.SGD(0.05, momentum=0.9), "mse")
    rng = np.random.RandomState(0)
    return trained(model, rng.randn(21, 5, 4).astype("float32"), rng.randn(21, 1).astype("float32"), batch_size=8)


@scenario
def embedding_shared_by_two_towers() -> dict[str, Any]:
    a, b = keras.Input((3,), dtype="int32"), keras.Input((5,), dtype="int32")
    table = layers.Embedding(20, 4, embeddings_initializer=init(1))
    towers = [layers.GlobalAveragePooling1D()(table(i)) for i in (a, b)]
    model = keras.Model([a, b], layers.Dense(1, kernel_initializer=init(2))(layers.Concatenate()(towers)))
    model.compile(_O.Adam(0.05, clipnorm=0.1), "mse")
    rng = np.random.RandomState(0)
    x = [rng.randint(0, 12, (37, 3)), rng.randint(0, 20, (37, 5))]
    return trained(model, x, rng.randn(37, 1).astype("float32"))


@scenario
def lazily_built_subclass() -> dict[str, Any]:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(6, "tanh", kernel_initializer=init(1))
            self.out = layers.Dense(1, kernel_initializer=init(2))

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    model = Net()
    model.compile(_O.Adam(0.05), "mse")
    return trained(model, *regression())


@scenario
def all_reduce_in_call() -> dict[str, Any]:
    """A layer that subtracts the mean of the global batch, as a cross-replica statistic."""

    class Centered(layers.Layer):
        def call(self, x: Any) -> Any:
            total, count = tf.reduce_sum(x, axis=0), tf.cast(tf.shape(x)[0], x.dtype)
            context = tf.distribute.get_replica_context()
            if context is not None:  # None while Keras builds the model, outside any replica.
                total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [total, count])
            return x - total / count

    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, kernel_initializer=init(1)),
            Centered(),
            layers.Dense(1, kernel_initializer=init(2)),
        ]
    )
    model.compile(_O.SGD(0.05), "mse")
    return trained(model, *regression())


# Steps of one's own.


@scenario
def custom_train_step() -> dict[str, Any]:
    class Net(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    inputs = keras.Input((4,))
    model = Net(inputs, layers.Dense(1, kernel_initializer=init(2))(layers.Dense(4, kernel_initializer=init(1))(inputs)))
    model.compile(_O.SGD(0.05), "mse")
    x, y = regression()
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


class OwnLogs(keras.Model):
    """Logs bare losses beside results of metrics, and uses the old `minimize`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(activation="sigmoid")
        self.auc, self.mean = keras.metrics.AUC(name="area"), keras.metrics.Mean(name="mean_loss")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.auc.update_state(y, self(x))
        self.mean.update_state(loss)
        return {"bare": loss, "auc": self.auc.result(), "mean_loss": self.mean.result()}


@scenario
def logs_of_ones_own() -> dict[str, Any]:
    x, y = regression()
    model = OwnLogs()
    model(x[:1])
    model.compile(_O.SGD(0.1))
    history = model.fit(x, (y > 0).astype("float32"), batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


class LearnedLossWeight(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.log_weight = self.add_weight(shape=(), initializer="zeros", name="log_weight")

    def call(self, x: Any) -> Any:
        outputs = self.net(x)
        self.add_loss(tf.exp(-self.log_weight) * tf.reduce_mean(tf.square(outputs)) + self.log_weight)
        return outputs


def _squared(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


@scenario
def means_over_no_examples() -> dict[str, Any]:
    """A last batch of one row: a loss that is a mean is no number on a replica without rows."""
    x, y = regression(33)
    model = LearnedLossWeight()
    model(x[:1])
    model.compile(_O.SGD(0.05), _squared, metrics=[_squared])
    return trained(model, x, y)


@scenario
def gan_with_hand_written_means() -> dict[str, Any]:
    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, kernel_initializer=init(1))])
            self.critic = dense()

        def compile(self) -> None:
            super().compile()
            self.g_optimizer, self.c_optimizer = _O.Adam(0.02), _O.RMSprop(0.01)

        def train_step(self, real: Any) -> dict[str, Any]:
            noise = real[:, :2]
            with tf.GradientTape() as tape:
                c_loss = tf.reduce_mean(self.critic(self.generator(noise))) - tf.reduce_mean(self.critic(real))
            variables = self.critic.trainable_variables
            self.c_optimizer.apply_gradients(zip(tape.gradient(c_loss, variables), variables, strict=True))
            with tf.GradientTape() as tape:
                g_loss = -tf.reduce_mean(self.critic(self.generator(noise)))
            variables = self.generator.trainable_variables
            self.g_optimizer.apply(tape.gradient(g_loss, variables), variables)
            return {"c_loss": c_loss, "g_loss": g_loss}

    model = Gan()
    model.compile()
    x, _ = regression()
    history = model.fit(x, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"generator": model.generator.get_weights(), "critic": model.critic.get_weights(), "history": history.history}


@scenario
def custom_loop() -> dict[str, Any]:
    """The loop of TensorFlow's guide, with a Keras loss and with a sum divided by the global batch size."""
    strategy = tf.distribute.get_strategy()
    x, y = regression(32)
    results = {}
    for kind in ("keras_loss", "hand_written"):
        model, optimizer = dense(), _O.Adam(0.05)
        per_example, mean = _L.MeanSquaredError(reduction=None), _L.MeanSquaredError()

        hand_written = lambda y, p, losses=per_example: tf.reduce_sum(losses(y, p)) / 16.0  # noqa: E731
        loss_of = mean if kind == "keras_loss" else hand_written

        def step(batch: Any, loss_of: Any = loss_of, model: Any = model, optimizer: Any = optimizer) -> Any:
            bx, by = batch
            with tf.GradientTape() as tape:
                loss = loss_of(by, model(bx, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def train(batch: Any, step: Any = step) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        results[f"losses_{kind}"] = [
            float(train(batch)) for _ in range(2) for batch in strategy.experimental_distribute_dataset(dataset)
        ]
        results[f"weights_{kind}"] = model.get_weights()
    return results


# Ways to run.


@scenario
def steps_per_execution() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=2)
    return trained(model, *regression(), batch_size=8)


@scenario
def unrolled_steps_per_execution() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=3)
    model.unrolled_steps_per_execution = 3
    return trained(model, *regression(), batch_size=4)


@scenario
def run_eagerly() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
    return trained(model, *regression(), epochs=1)


@scenario
def jit_compile() -> dict[str, Any]:
    model = dense()
    model.compile(_O.Adam(0.05), "mse", jit_compile=True)
    return trained(model, *regression(32))


@scenario
def on_batch() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    x, y = regression(5)
    return {
        "train": [model.train_on_batch(x[:n], y[:n]) for n in (5, 1, 3)],
        "weighted": model.train_on_batch(x, y, sample_weight=np.arange(5.0), return_dict=True),
        "test": model.test_on_batch(x, y),
        "predict": model.predict_on_batch(x),
        "weights": model.get_weights(),
    }


@scenario
def fewer_rows_than_replicas() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    return trained(model, *regression(33))


@scenario
def convolutions_of_no_rows() -> dict[str, Any]:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 2, kernel_initializer=init(1)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.DepthwiseConv2D(2, depth_multiplier=2, activation="tanh", depthwise_initializer=init(2)),
            layers.SeparableConv2D(3, 2, depthwise_initializer=init(3), pointwise_initializer=init(4)),
            layers.Conv2DTranspose(2, 2, kernel_initializer=init(5)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1, kernel_initializer=init(6)),
        ]
    )
    model.compile(_O.SGD(0.02), "mse", metrics=["mae"])
    rng = np.random.RandomState(0)
    return trained(model, rng.randn(9, 6, 6, 2).astype("float32"), rng.randn(9, 1).astype("float32"), batch_size=4)


@scenario
def parts_known_to_be_empty() -> dict[str, Any]:
    model = dense()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(_O.SGD(0.05), loss, metrics=["mae"])
    weight = np.linspace(0.5, 2.0, 7).astype("float32")
    return trained(model, *regression(7), batch_size=1, sample_weight=weight)


@scenario
def a_single_row() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    return trained(model, *regression(1))


@scenario
def validation() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.05), "mse", metrics=["mae"])
    x, y = regression(50)
    history = model.fit(
        x, y, batch_size=16, epochs=4, initial_epoch=1, shuffle=False, validation_split=0.3, validation_freq=2, verbose=0
    )
    return {"weights": model.get_weights(), "history": history.history}


@scenario
def shuffled_arrays() -> dict[str, Any]:
    """One epoch over shuffled rows, each with a bit of its own: the sum of their gradients tells which were read."""
    model = keras.Sequential([keras.Input((37,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(_O.SGD(1.0), _L.MeanSquaredError(reduction="sum"))
    model.fit(np.eye(37, dtype="float32"), np.full((37, 1), 0.5, "float32"), batch_size=16, shuffle=True, verbose=0)
    return {"each_row_once": model.get_weights()}


@scenario
def data_pipelines() -> dict[str, Any]:
    """A shuffled and repeated `tf.data` pipeline, a `PyDataset` and a generator."""

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return x[16 * i : 16 * i + 16].copy(), y[16 * i : 16 * i + 16].copy()

    x, y = regression()
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(37, seed=3).batch(16).repeat()
    generator = ((x[i : i + 16], y[i : i + 16]) for i in range(0, 37, 16))
    results = {}
    for name, data, steps in (("dataset", shuffled, 3), ("pydataset", Rows(), None), ("generator", generator, None)):
        model = dense()
        model.compile(_O.SGD(0.05), "mse")
        history = model.fit(data, epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
        results[name] = [model.get_weights(), history.history]
    return results


@scenario
def sparse_ragged_and_string_inputs() -> dict[str, Any]:
    rng = np.random.RandomState(0)
    dense_rows = (rng.rand(21, 6) * (rng.rand(21, 6) > 0.6)).astype("float32")
    y = dense_rows.sum(1, keepdims=True)
    sparse_model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(1, kernel_initializer=init(1))])
    sparse_model.compile(_O.SGD(0.1), "mse")
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense_rows), y)).batch(8)
    sparse_model.fit(rows, epochs=2, verbose=0)

    class Lengths(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1, kernel_initializer=init(1))

        def train_step(self, batch: Any) -> Any:
            (words, numbers), target = batch
            features = tf.stack(
                [tf.cast(tf.strings.length(words), tf.float32), tf.reduce_sum(numbers, axis=1)], axis=1
            )
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.out(features) - target))
            variables = self.out.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    words = tf.constant([("word" * 9)[: 1 + i % 7] for i in range(21)])
    numbers = tf.ragged.constant([[0.1] * (i % 4) for i in range(21)], dtype=tf.float32)
    ragged_model = Lengths()
    ragged_model.compile(_O.SGD(0.01))
    pairs = tf.data.Dataset.from_tensor_slices(((words, numbers), y)).batch(8)
    history = ragged_model.fit(pairs, epochs=2, verbose=0)
    return {
        "sparse": sparse_model.get_weights(),
        "ragged": ragged_model.out.get_weights(),
        "history": history.history,
    }


# Metrics.


@scenario
def metrics_of_all_kinds() -> dict[str, Any]:
    M = keras.metrics
    model = dense(activation="sigmoid")
    model.compile(
        _O.SGD(0.1),
        "binary_crossentropy",
        metrics=[
            "binary_accuracy", M.AUC(name="auc"), M.Precision(name="precision"), M.Recall(name="recall"),
            M.BinaryIoU(name="iou"), M.F1Score(threshold=0.5, name="f1"), M.R2Score(name="r2"),
            M.TruePositives(name="tp"), M.MeanSquaredError(name="mse"), M.RootMeanSquaredError(name="rmse"),
        ],
    )  # fmt: skip
    x, y = regression(60)
    return trained(model, x, (y > 0).astype("float32"), batch_size=20)


@scenario
def categorical_metrics() -> dict[str, Any]:
    M = keras.metrics
    model = dense(out=5, activation="softmax")
    metrics = [M.SparseTopKCategoricalAccuracy(2, name="top2"), "accuracy", M.SparseCategoricalCrossentropy(name="ce")]
    model.compile(_O.SGD(0.1), "sparse_categorical_crossentropy", metrics=metrics)
    x, _ = regression(60)
    return trained(model, x, np.arange(60) % 5, batch_size=20)


# Callbacks.


@scenario
def callbacks_that_decide() -> dict[str, Any]:
    C = keras.callbacks
    model = dense()
    model.compile(_O.SGD(0.3), "mse")
    x, y = regression()
    seen: list[float] = []
    history = model.fit(
        x, y, batch_size=16, epochs=12, shuffle=False, verbose=0, validation_data=(x, y),
        callbacks=[
            C.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True),
            C.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
            C.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])),
        ],
    )  # fmt: skip
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "batch_losses": seen,
        "rate": float(model.optimizer.learning_rate),
        "iterations": int(model.optimizer.iterations),
    }


@scenario
def terminate_on_nan() -> dict[str, Any]:
    model = dense()
    model.compile(_O.SGD(0.1), "mse")
    x, y = regression(64)
    y[30] = np.nan
    batches: list[int] = []
    stop = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch)),
    ]
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=stop)
    return {"batches": batches}
