"""Trains a net that `tests/contrib/test_estimate.py` knows, for some steps: `estimated.py NET [BATCH] [SETTING]`.

With `PEAK_FILE` it writes there how many bytes its tensors took at a time.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

net, batch, setting = [*sys.argv[1:], "", ""][:3]
layers, settings = keras.layers, {}
if setting == "mixed_float16":
    keras.config.set_dtype_policy(setting)
if setting == "accumulation":
    settings = {"gradient_accumulation_steps": 4}
if setting == "sharded":
    import tfrep_strategy as tfrep

    tfrep.MultiWorkerStrategy(shard_optimizer_state=True)
elif setting == "weights":
    import tfrep_strategy as tfrep

    tfrep.MultiWorkerStrategy(shard_optimizer_state=True, shard_weights=True)
elif setting in ("layouts", "mesh"):
    import tfrep_strategy as tfrep

    tfrep.enable_keras_distribution()
    devices = keras.distribution.list_devices()
    shape = (1, len(devices)) if setting == "layouts" else (2, len(devices) // 2)
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ["batch", "model"], devices))
    layouts["sequential/dense/kernel"], layouts["sequential/dense/bias"] = (None, "model"), ("model",)
    layouts["sequential/dense_1/kernel"] = ("model", None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
if net == "convnet":
    shape, count, optimizer = (48, 48, 3), 32, keras.optimizers.SGD(0.1, momentum=0.9, **settings)
    hidden = [
        layers.Conv2D(16, 3, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.GlobalAveragePooling2D(),
    ]
elif net == "lstm":
    shape, count, optimizer, hidden = (20, 32), 2048, keras.optimizers.Adam(**settings), [layers.LSTM(128)]
elif net in ("embedding", "many words"):  # The latter gathers much more than the weights take.
    words, count = (20_000, 512) if net == "embedding" else (1_000, 4096)
    shape, optimizer = (24,), keras.optimizers.Adam(**settings)
    hidden = [layers.Embedding(words, 64), layers.GlobalAveragePooling1D()]
else:
    shape, count, optimizer = (512,), 1024, keras.optimizers.Adam(**settings)
    hidden = [layers.Dense(1024, "relu") for _ in range(2)]
count = int(batch or count)
model = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x, y = np.ones((count, *shape), "float32"), np.zeros(count, "int32")


class Peak(keras.callbacks.Callback):
    """Notes how much memory the later steps take."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            tf.config.experimental.reset_memory_stats("CPU:0")
        self.peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]


if net == "loop":

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    for _ in range(4):
        step(tf.constant(x), tf.constant(y))
elif net != "nothing":
    model.compile(optimizer, loss, jit_compile=False)
    noted = Peak()
    model.fit(tf.data.Dataset.from_tensors((x, y)).repeat(4), verbose=0, callbacks=[noted])
    if "PEAK_FILE" in os.environ:
        with open(os.environ["PEAK_FILE"], "w", encoding="utf-8") as file:
            json.dump(noted.peak, file)
print("The script has ended.")
