"""Starts Horovod, and adds the numbers of the ranks."""

import time

import horovod.tensorflow as hvd
import tensorflow as tf

begun = time.monotonic()
hvd.init()
took = time.monotonic() - begun
print("SUM", int(hvd.allreduce(tf.constant(hvd.rank()), op=hvd.Sum)), f"{took:.3f}", flush=True)
