"""Every way to save a model, each loaded again and asked about one row, in the manner of Keras's guide to saving."""

import json
import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(23)
rng = np.random.default_rng(23)
x = rng.normal(size=(256, 8)).astype("float32")
y = np.tanh(x @ rng.normal(size=(8, 2))).astype("float32")


def get_model():
    inputs = keras.Input(shape=(8,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    hidden = keras.layers.Add()([inputs, hidden])
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mean_squared_error")
    return model


model = get_model()
model.fit(x, y, epochs=2, batch_size=32, verbose=0)
row = x[:1]
expected = model.predict(row, verbose=0)
answers = {}

models = pathlib.Path("models")
models.mkdir(parents=True, exist_ok=True)
model.save(models / "model.keras")
answers["keras"] = keras.models.load_model(models / "model.keras").predict(row, verbose=0)

model.save("models/legacy.h5")
answers["h5"] = keras.models.load_model("models/legacy.h5").predict(row, verbose=0)

model.save_weights("models/only.weights.h5")
fresh = get_model()
fresh.load_weights("models/only.weights.h5")
answers["weights"] = fresh.predict_on_batch(row)

with open("models/architecture.json", "w") as f:
    f.write(model.to_json())
clone = keras.models.model_from_json(model.to_json())
clone.set_weights(model.get_weights())
answers["json"] = clone(row).numpy()

model.export("models/served")
served = tf.saved_model.load("models/served")
answers["export"] = served.serve(tf.constant(row)).numpy()
answers["layer"] = keras.layers.TFSMLayer("models/served", call_endpoint="serve")(row).numpy()

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.keras")
    keras.saving.save_model(model, path)
    going_on = keras.saving.load_model(path)
more = going_on.fit(x, y, epochs=1, batch_size=32, verbose=0).history["loss"]

for way, answer in answers.items():
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6, err_msg=way)
print(json.dumps({"answer": expected.tolist(), "ways": sorted(answers), "more": more}))
