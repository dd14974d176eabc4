"""Examples written to TFRecord shards and read back by a pipeline, in the manner of TensorFlow's TFRecord tutorial."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
tf.keras.utils.set_random_seed(27)


def _bytes_feature(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _int64_feature(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def serialize_example(image, label):
    feature = {"image": _bytes_feature(tf.io.serialize_tensor(image).numpy()), "label": _int64_feature(label)}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write_shards(folder, images, labels, num_shards=3):
    paths = [os.path.join(folder, f"digits-{i:03d}-of-{num_shards:03d}.tfrec") for i in range(num_shards)]
    for i, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for image, label in zip(images[i::num_shards], labels[i::num_shards], strict=True):
                writer.write(serialize_example(image, int(label)))
    return paths


def parse(record):
    description = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, description)
    image = tf.ensure_shape(tf.io.parse_tensor(example["image"], tf.float32), [8, 8])
    return tf.reshape(image, [64]), example["label"]


def get_dataset(pattern, batch_size):
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=AUTOTUNE, deterministic=True)
    return dataset.map(parse, num_parallel_calls=AUTOTUNE).shuffle(256, seed=3).batch(batch_size).prefetch(AUTOTUNE)


with tempfile.TemporaryDirectory() as folder:
    with np.load("digits.npz") as data:
        images, labels = data["images"][:400].astype("float32") / 16, data["labels"][:400]
    write_shards(folder, images, labels)
    dataset = get_dataset(os.path.join(folder, "*.tfrec"), 50)
    print("batches:", sum(1 for _ in dataset))
    model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10, activation="softmax")])
    lr_schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=5, decay_rate=0.9, staircase=True)
    model.compile(tf.keras.optimizers.Adam(lr_schedule), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(dataset, epochs=3, verbose=2)
print(json.dumps(history.history))
