"""Each rank says three things, and the last rank fails when all have said them."""

import sys

import tensorflow as tf

import tfrep_strategy as tfrep

strategy = tf.distribute.get_strategy()
rank, size = strategy.rank, strategy.num_replicas_in_sync
print(f"rank {rank}: first")
print(f"rank {rank}: second, to stderr", file=sys.stderr)
print(f"rank {rank}: no end", end="", flush=True)
tfrep.barrier()
if rank == size - 1:
    sys.exit(3)
