"""Sums over two processes, and says which Horovod did it."""

import tensorflow as tf

import tfrep_strategy as tfrep


def program():
    import horovod.tensorflow as hvd

    strategy = tf.distribute.get_strategy()
    total = strategy.run(lambda: tfrep.all_reduce(tf.fill([1000], strategy.communicator.rank + 1.0)))
    return hvd.__file__, bool(hvd.nccl_built()), float(total[0]), float(total[999])


if __name__ == "__main__":
    for result in tfrep.launch(program, num_replicas=2, communicator="horovod", timeout=300):
        print(*result)
