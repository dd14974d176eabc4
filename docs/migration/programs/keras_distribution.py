"""A transformer whose weights are split between devices by a layout map."""

import json

import keras
from keras import layers
from keras.distribution import (
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    list_devices,
    set_distribution,
)

from tfrep_strategy.contrib.digits import load_digits

devices = list_devices()
mesh = DeviceMesh((1, len(devices)), ["batch", "model"], devices)
layouts = LayoutMap(mesh)
layouts["heads/(query|key|value)/kernel"] = (None, "model", None)
layouts["heads/(query|key|value)/bias"] = ("model", None)
layouts["heads/attention_output/kernel"] = ("model", None, None)
layouts["into/kernel"] = (None, "model")
layouts["into/bias"] = ("model",)
layouts["out/kernel"] = ("model", None)
if len(devices) > 1:
    parallel = ModelParallel(layout_map=layouts, batch_dim_name="batch")
    set_distribution(parallel)

keras.utils.set_random_seed(1)
rows = keras.Input((8, 8))
x = layers.Dense(32)(rows)
x = x + layers.MultiHeadAttention(4, 8, name="heads")(x, x)
x = layers.LayerNormalization()(x)
x = x + layers.Dense(32, name="out")(layers.Dense(64, "gelu", name="into")(x))
x = layers.GlobalAveragePooling1D()(x)
model = keras.Model(rows, layers.Dense(10)(x))
model.compile(
    keras.optimizers.AdamW(1e-3, global_clipnorm=1.0),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

(x, y), test = load_digits()
x, test = x[..., 0], (test[0][..., 0], test[1])
history = model.fit(x, y, batch_size=64, epochs=2, verbose=2).history
loss, accuracy = model.evaluate(*test, verbose=0)
results = {"losses": history["loss"], "test_loss": loss}
print(json.dumps(results | {"test_accuracy": accuracy}))
