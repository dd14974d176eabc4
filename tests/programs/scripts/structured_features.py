"""Table columns, numbers and strings, through preprocessing layers in the model, in the manner of Keras's structured data."""

import json

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from keras import layers


def make_frame(n=400):
    rng = np.random.default_rng(6)
    frame = pd.DataFrame(
        {
            "age": rng.integers(29, 77, n),
            "trestbps": rng.normal(130, 17, n).round(),
            "sex": rng.integers(0, 2, n),
            "thal": rng.choice(["fixed", "normal", "reversible"], n),
            "city": rng.choice(["Ghent", "Porto", "Turin", "Graz"], n),
        }
    )
    frame["target"] = ((frame["age"] > 55) & (frame["thal"] != "normal")).astype(int)
    return frame


def dataframe_to_dataset(dataframe):
    dataframe = dataframe.copy()
    labels = dataframe.pop("target")
    ds = tf.data.Dataset.from_tensor_slices((dict(dataframe), labels))
    return ds.shuffle(buffer_size=len(dataframe), seed=1).batch(32)


def encode_numerical(feature, name, dataset):
    normalizer = layers.Normalization(axis=None)
    normalizer.adapt(dataset.map(lambda x, y: x[name]))
    return normalizer(feature)


def encode_categorical(feature, name, dataset, is_string):
    lookup_class = layers.StringLookup if is_string else layers.IntegerLookup
    lookup = lookup_class(output_mode="one_hot")
    lookup.adapt(dataset.map(lambda x, y: x[name]))
    return lookup(feature)


keras.utils.set_random_seed(6)
dataframe = make_frame()
val_dataframe = dataframe.sample(frac=0.2, random_state=1337)
train_dataframe = dataframe.drop(val_dataframe.index)
train_ds, val_ds = dataframe_to_dataset(train_dataframe), dataframe_to_dataset(val_dataframe)

inputs = {
    "age": keras.Input(shape=(1,), name="age"),
    "trestbps": keras.Input(shape=(1,), name="trestbps"),
    "sex": keras.Input(shape=(1,), name="sex", dtype="int64"),
    "thal": keras.Input(shape=(1,), name="thal", dtype="string"),
    "city": keras.Input(shape=(1,), name="city", dtype="string"),
}
encoded = [encode_numerical(inputs[name], name, train_ds) for name in ("age", "trestbps")]
encoded += [encode_categorical(inputs["sex"], "sex", train_ds, False)]
encoded += [encode_categorical(inputs[name], name, train_ds, True) for name in ("thal", "city")]
x = layers.Dense(16, activation="relu")(layers.concatenate(encoded))
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
history = model.fit(train_ds, epochs=3, validation_data=val_ds, verbose=2).history

sample = {"age": 60, "trestbps": 145, "sex": 1, "thal": "fixed", "city": "Graz"}
input_dict = {name: tf.convert_to_tensor([value]) for name, value in sample.items()}
prediction = model.predict(input_dict)
print(f"This patient had a {100 * prediction[0][0]:.1f} percent probability of a disease.")
print(json.dumps({"history": history, "prediction": float(prediction[0][0])}))
