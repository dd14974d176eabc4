"""Fine-tuning by low-rank updates of frozen layers, in the manner of Keras's LoRA guide."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(50)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64).astype("float32") / 16, data["labels"]


def compiled(model, lr):
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=lr, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32, activation="tanh", name="query"),
        keras.layers.Dense(32, activation="tanh", name="value"),
        keras.layers.Dense(10, name="head"),
    ]
)
base = compiled(model, 0.01).fit(x[y < 5], y[y < 5], batch_size=64, epochs=2, verbose=0).history

for layer in model.layers:
    layer.trainable = False
for name in ("query", "value"):
    model.get_layer(name).trainable = True
    model.get_layer(name).enable_lora(rank=4)
trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
frozen = model.get_layer("query").get_weights()[0].copy()
tuned = compiled(model, 0.01).fit(x[y >= 5], y[y >= 5], batch_size=64, epochs=2, verbose=0).history
model.save("merged.keras")
merged = keras.models.load_model("merged.keras")
scores = merged.evaluate(x[y >= 5], y[y >= 5], verbose=0)
print("parameters that are tuned:", trainable)
print(json.dumps({"base": base, "tuned": tuned, "scores": scores, "trainable": trainable, "shape": list(frozen.shape)}))
