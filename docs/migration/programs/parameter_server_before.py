"""Trains tf_keras on parameter servers, with TF_USE_LEGACY_KERAS=1."""

import json
import socket

import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits


def free_address():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return f"localhost:{listener.getsockname()[1]}"


jobs = {"worker": [free_address(), free_address()], "ps": [free_address()]}
cluster = tf.train.ClusterSpec(jobs)
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=3)
servers = []
for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
    server = tf.distribute.Server(cluster, job, index, "grpc", config)
    servers.append(server)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster,
    rpc_layer="grpc",
)
strategy = tf.distribute.ParameterServerStrategy(resolver)

(x, y), test = load_digits()


def dataset_fn(context):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(1437).repeat().batch(32)


with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, "tanh"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        tf.keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.3),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
history = model.fit(creator, steps_per_epoch=45, epochs=2, verbose=2).history
iterations = int(model.optimizer.iterations)
print(json.dumps({"losses": history["loss"], "iterations": iterations}))
