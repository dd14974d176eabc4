"""Members in a grid; prints what each gets, as JSON by operation. Its argument is their number."""

import json
import sys

import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.communicators.ring import RingCommunicator

SIZE, FLOATS = int(sys.argv[1]), 500
tf.config.threading.set_inter_op_parallelism_threads(4 * SIZE)
tfrep.use_logical_cpus(SIZE)
members = [RingCommunicator(rank, SIZE, f"CPU:{rank}", 77, "grid/", place=lambda kind: kind) for rank in range(SIZE)]
for member in members:
    member.grid_from = 1


@tf.function
def reduced(op: str) -> list[tf.Tensor]:
    totals = []
    for rank, member in enumerate(members):
        with tf.device(f"CPU:{rank}"):
            own = tf.random.stateless_normal([FLOATS], [rank, 0]) + 2.0
            totals.append(member.all_reduce([own, tf.constant(rank + 1)], op))
    return totals


def kinds(op: str) -> list[str]:
    operations = reduced.get_concrete_function(op).graph.get_operations()
    return sorted({each.type for each in operations if each.type.startswith("Collective")})


ops = ("sum", "mean", "min", "max", "product")
print(json.dumps({op: [kinds(op), [[t.numpy().tolist() for t in each] for each in reduced(op)]] for op in ops}))
