import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
throughput = tfrep.callbacks.Throughput()
model.fit(np.ones((4, 2)), np.ones(4), callbacks=[throughput])


@tfrep.partition
def step(x: tf.Tensor) -> tf.Tensor:
    return tfrep.all_reduce(x, "mean")


def main(replicas: int) -> None:
    if tfrep.is_chief():
        print(tfrep.broadcast_object(replicas), strategy.num_replicas_in_sync)


main(2)
