"""Says what it talks through; the rest is done by `tfrep run`."""

import tensorflow as tf

import tfrep_strategy as tfrep

strategy = tf.distribute.get_strategy()
total = float(strategy.run(lambda: tfrep.all_sum(1.0 + strategy.rank)))
print(f"{strategy.communicator.name} {strategy.rank} of {strategy.num_replicas_in_sync}, sum {total}")
