"""The replicas of one process, each on a thread of its own, know what the thread knows that runs the strategy."""

from __future__ import annotations

import contextvars
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")


def draws(strategy: Any) -> list[list[list[float]]]:
    """Three steps of unseeded numbers on each replica: made in a function, in the next one, and eagerly."""
    keras.utils.set_random_seed(5)

    def draw() -> tf.Tensor:
        return keras.random.normal((1, 3))

    in_function = tf.function(lambda: strategy.gather(strategy.run(draw), 0))
    results = [in_function(), in_function(), strategy.gather(strategy.run(tf.function(draw)), 0)]
    assert keras.random.uniform(()) is not None, "the generator is that of the thread that runs the strategy"
    return [result.numpy().tolist() for result in results]


@pytest.mark.lane("short")
def test_unseeded_numbers(worker_pool: Any) -> None:
    alone = draws(tf.distribute.get_strategy())
    found = draws(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    for step, expected in zip(found, alone, strict=True):
        assert step[0] == expected[0], "replica 0 draws what one device draws"
        assert step[1] != step[0]
    assert len({tuple(row) for step in found for row in step}) == 6
    assert worker_pool("tf", 2).run(draws) == [found, found]


class Sampling(keras.layers.Layer):
    def call(self, mean: Any, log_variance: Any) -> Any:
        return mean + keras.ops.exp(0.5 * log_variance) * keras.random.normal(keras.ops.shape(mean))


class VariationalAutoencoder(keras.Model):
    """Draws without a seed, in a step of its own, which makes the global generator while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance, self.decoder = keras.layers.Dense(2), keras.layers.Dense(2), keras.layers.Dense(4)
        self.sampling = Sampling()
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        mean, log_variance = self.mean(x), self.log_variance(x)
        divergence = keras.ops.exp(log_variance) + keras.ops.square(mean) - 1 - log_variance
        self.add_loss(0.5 * keras.ops.mean(divergence))
        return self.decoder(self.dropout(self.sampling(mean, log_variance), training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"total": loss}


@pytest.mark.lane("short")
def test_a_variational_autoencoder_trains() -> None:
    x = np.random.RandomState(0).randn(13, 4).astype("float32")
    keras.utils.set_random_seed(3)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = VariationalAutoencoder()
        model.compile(keras.optimizers.Adam(0.05), "mse")
    losses = model.fit(x, x, batch_size=4, epochs=8, verbose=0).history["total"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert np.ptp([model.predict(x[:3], verbose=0) for _ in range(2)], axis=0).min() > 0, "each call draws anew"


_setting = contextvars.ContextVar("_setting", default="default")


def test_scopes_and_settings_reach_replicas() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    seen: list[tuple[Any, ...]] = []

    def look() -> tf.Tensor:
        with keras.name_scope("inner"):
            # Between this and the end of the scope, the other replica runs.
            total = tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
            variable = keras.Variable(1.0, name="v")
        activation = keras.saving.get_registered_object("doubled")(3.0)
        compute = keras.layers.Dense(1).compute_dtype
        seen.append((variable.path, activation, compute, keras.config.is_interactive_logging_enabled(), _setting.get()))
        return total

    token = _setting.set("own")
    keras.config.set_dtype_policy("mixed_float16")
    keras.config.disable_interactive_logging()
    try:
        with keras.name_scope("outer"), keras.saving.custom_object_scope({"doubled": lambda x: 2 * x}):
            results = strategy.experimental_local_results(strategy.run(look))
    finally:
        keras.config.enable_interactive_logging()
        keras.config.set_dtype_policy("float32")
        _setting.reset(token)
    assert [float(result) for result in results] == [2.0, 2.0]
    assert seen == [("outer/inner/v", 6.0, "float16", False, "own")] * 2


def test_what_a_replica_sets_stays() -> None:
    """The caller has afterwards what one device would have left: names that are taken, settings."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def step() -> tf.Tensor:
        keras.config.disable_flash_attention()
        return tf.constant(float(keras.layers.Dense(1).name.rpartition("_")[2]))

    keras.utils.clear_session(free_memory=False)  # Names count from one again.
    keras.layers.Dense(1)
    try:
        numbers = strategy.experimental_local_results(strategy.run(step))
        assert [float(number) for number in numbers] == [1.0, 1.0]
        assert keras.layers.Dense(1).name == "dense_2"
        assert keras.config.is_flash_attention_enabled() is False
    finally:
        keras.config.enable_flash_attention()


def test_summaries_in_a_custom_loop(tmp_path: Path) -> None:
    """TensorFlow's threads take the writer, the step and the condition, and the first replica alone writes."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    written = []
    for record in (True, False):
        folder = tmp_path / str(record)
        writer = tf.summary.create_file_writer(str(folder))

        @tf.function
        def step(step_number: tf.Tensor, writer: Any = writer, record: bool = record) -> None:
            def write() -> None:
                tf.summary.scalar("loss", 1.0)

            with writer.as_default(step=step_number), tf.summary.record_if(record):
                strategy.run(write)

        step(tf.constant(7, tf.int64))
        writer.close()
        (file,) = folder.iterdir()
        events = list(tf.compat.v1.train.summary_iterator(str(file)))
        written.append([event.step for event in events if event.summary.value])
    assert written == [[7], []]
