"""A MultiWorkerMirroredStrategy whose chief saves where others do not, in the manner of TensorFlow's multi-worker tutorial."""

import json
import os

import numpy as np
import tensorflow as tf

global_batch_size = 64
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def dataset(batch_size):
    with np.load("digits.npz") as data:
        x, y = data["images"] / np.float32(16), data["labels"].astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((x[:640], y[:640])).repeat().batch(batch_size)


def build_and_compile_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(8, 8)),
            tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="tanh"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)


def _get_temp_dir(dirpath, task_id):
    temp_dir = os.path.join(dirpath, f"workertemp_{task_id}")
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, os.path.basename(filepath))


tf.keras.utils.set_random_seed(2)
with strategy.scope():
    multi_worker_model = build_and_compile_model()
callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir="/".join([os.getcwd(), "backup"]))]
history = multi_worker_model.fit(
    dataset(global_batch_size), epochs=2, steps_per_epoch=10, callbacks=callbacks, verbose=2
).history

resolver = strategy.cluster_resolver
task_type, task_id = (resolver.task_type, resolver.task_id) if resolver else (None, None)
model_path = os.path.join(os.getcwd(), "keras-model", "model.keras")
tf.io.gfile.makedirs(os.path.dirname(model_path))
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))
loaded_model = tf.keras.models.load_model(model_path)
scores = loaded_model.evaluate(dataset(global_batch_size), steps=3, verbose=0)
print(json.dumps({"history": history, "scores": scores}))
