"""Large batches by accumulation, clipping and averaged weights, in the manner of scripts that imitate a bigger machine."""

import json
import pickle

import keras
import numpy as np

keras.utils.set_random_seed(19)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64).astype("float32") / 16, data["labels"]

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)])
schedule = keras.optimizers.schedules.CosineDecay(0.002, decay_steps=30, warmup_target=0.01, warmup_steps=5)
optimizer = keras.optimizers.AdamW(
    schedule,
    weight_decay=0.004,
    global_clipnorm=1.0,
    gradient_accumulation_steps=4,
    use_ema=True,
    ema_momentum=0.9,
)
optimizer.exclude_from_weight_decay(var_names=["bias"])
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
history = model.fit(
    x[:1200],
    y[:1200],
    batch_size=25,
    epochs=2,
    validation_data=(x[1200:], y[1200:]),
    callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    verbose=2,
)
optimizer.finalize_variable_values(model.trainable_variables)
score = model.evaluate(x[1200:], y[1200:], verbose=0)
with open("history.pkl", "wb") as f:
    pickle.dump(history.history, f)
print("updates:", int(optimizer.iterations), "learning rate:", float(optimizer.learning_rate))
print(json.dumps({"history": history.history, "score": score, "updates": int(optimizer.iterations)}))
