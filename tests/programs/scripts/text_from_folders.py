"""Texts in a folder per class, a vectorizer and a saved end-to-end model, in the manner of Keras's "text from scratch"."""

import json
import os
import re
import string
import sys

import keras
import tensorflow as tf
from keras import layers


@keras.saving.register_keras_serializable()
def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, f"[{re.escape(string.punctuation)}]", "")


def main():
    archive = keras.utils.get_file("reviews.tar.gz", sys.argv[1], extract=True, cache_dir=".", cache_subdir="")
    folder = os.path.join(archive, "reviews")
    options = dict(batch_size=16, validation_split=0.2, seed=1337)
    train = keras.utils.text_dataset_from_directory(folder, subset="training", **options)
    val = keras.utils.text_dataset_from_directory(folder, subset="validation", **options)

    keras.utils.set_random_seed(1)
    vectorize = layers.TextVectorization(
        standardize=custom_standardization, max_tokens=50, output_mode="int", output_sequence_length=12
    )
    vectorize.adapt(train.map(lambda x, y: x))
    train_ds = train.map(lambda x, y: (vectorize(tf.expand_dims(x, -1)), y)).cache().prefetch(10)
    val_ds = val.map(lambda x, y: (vectorize(tf.expand_dims(x, -1)), y)).cache().prefetch(10)

    inputs = keras.Input(shape=(None,), dtype="int64")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.Conv1D(16, 3, padding="valid", activation="relu", strides=2)(x)
    x = layers.GlobalMaxPooling1D()(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    history = model.fit(train_ds, validation_data=val_ds, epochs=3, verbose=2).history

    # End to end: raw strings in, probabilities out.
    strings = keras.Input(shape=(1,), dtype="string")
    end_to_end = keras.Model(strings, model(vectorize(strings)))
    end_to_end.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    scores = end_to_end.evaluate(val, verbose=0)
    new = end_to_end.predict(tf.constant([["a funny bright film"], ["a boring film"], ["dull"]]), verbose=0)
    print(json.dumps({"history": history, "scores": scores, "new": new.tolist()}))


if __name__ == "__main__":
    main()
