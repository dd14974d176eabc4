"""One process of `benchmarks.collectives`. Imports only what its variant needs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.crews import work

Primitive = Callable[[tf.Tensor], tf.Tensor]


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Sets a process up.

    Args:
        settings: "transport": "horovod", "tensorflow" or "ours", with "communicator".

    Returns:
        A function that calls a primitive some times, each time after the one before, and returns the seconds per time; 0
        for a primitive that the transport does not have. Its question has "primitive", "floats", "times" and, where they are
        not two, the number of "processes".
    """
    transport = settings["transport"]
    if transport == "ours":
        primitives = _ours(settings["communicator"])
    else:
        primitives = _bare_horovod() if transport == "horovod" else _bare_tensorflow()
    functions = {name: tf.function(primitive, autograph=False) for name, primitive in primitives.items()}

    def measure(question: dict[str, Any]) -> float:
        name, times = question["primitive"], question["times"]
        if name not in functions:
            return 0.0
        value = tf.ones([question["floats"]])
        result = functions[name](value)
        processes = float(question.get("processes", 2))
        expected = {"all_reduce sum": processes, "reduce_scatter": processes, "map_reduce": 3.0}.get(name, 1.0)
        if name != "barrier" and float(result[0]) != expected:
            raise RuntimeError(f"The result of {name} is wrong.")
        start = time.perf_counter()
        for _ in range(times):
            result = functions[name](value)
        result.numpy()
        return (time.perf_counter() - start) / times

    return measure


def _ours(communicator: str) -> dict[str, Primitive]:
    import tfrep_strategy as tfrep

    strategy = tfrep.MultiWorkerStrategy(communicator)

    def barrier(x: tf.Tensor) -> tf.Tensor:
        tfrep.barrier()
        return tf.zeros([])

    in_step: dict[str, Primitive] = {
        "all_reduce sum": tfrep.all_sum,
        "all_reduce max": lambda x: tfrep.all_reduce(x, "max"),
        "all_gather": tfrep.all_gather,
        "broadcast": tfrep.broadcast,
        "reduce_scatter": tfrep.reduce_scatter,
        "all_to_all": tfrep.all_to_all,
        "map_gather": lambda x: tfrep.map_gather(lambda factor: factor * x, [1.0, 2.0])[0],
        "map_reduce": lambda x: tfrep.map_reduce(lambda factor: factor * x, [1.0, 2.0]),
        "barrier": barrier,
    }
    return {name: lambda x, call=call: strategy.run(call, (x,)) for name, call in in_step.items()}


def _bare_horovod() -> dict[str, Primitive]:
    import horovod.tensorflow as hvd

    hvd.init()
    factor = float(hvd.rank() + 1)
    return {
        "all_reduce sum": lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum"),
        "all_reduce max": lambda x: hvd.allreduce(x, op=hvd.Max, name="max"),
        "all_gather": lambda x: hvd.allgather(x, name="gather"),
        "broadcast": lambda x: hvd.broadcast(x, 0, name="broadcast"),
        "reduce_scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="scatter"),
        "all_to_all": lambda x: hvd.alltoall(x, name="exchange"),
        "map_gather": lambda x: hvd.allgather(factor * x, name="map"),
        "map_reduce": lambda x: hvd.allreduce(factor * x, op=hvd.Sum, name="map_reduce"),
        # Of a constant, TensorFlow would work the result out once, before the function runs.
        "barrier": lambda x: hvd.allreduce(tf.cast(x[0], tf.int32), op=hvd.Sum, name="barrier"),
    }


def _bare_tensorflow() -> dict[str, Primitive]:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Connects the processes.
    rank = strategy.cluster_resolver.task_id
    device = strategy.extended.worker_devices[0]
    numbers = itertools.count(1)

    def call(operation: Callable[..., tf.Tensor], x: tf.Tensor, **options: Any) -> tf.Tensor:
        # Two processes that trace the same primitives in the same order count alike.
        with tf.device(device):
            return operation(
                input=x, group_size=2, group_key=77, instance_key=next(numbers), communication_hint="ring", **options
            )

    def reduce(x: tf.Tensor, merge_op: str) -> tf.Tensor:
        return call(tf.raw_ops.CollectiveReduceV2, x, merge_op=merge_op, final_op="Id", ordering_token=[])

    def broadcast(x: tf.Tensor) -> tf.Tensor:
        options = {"group_size": 2, "group_key": 77, "instance_key": next(numbers), "communication_hint": "auto"}
        with tf.device(device):
            if rank == 0:
                return tf.raw_ops.CollectiveBcastSendV2(input=x, **options)
            return tf.raw_ops.CollectiveBcastRecvV2(shape=tf.shape(x), T=x.dtype, **options)

    def gather(x: tf.Tensor) -> tf.Tensor:
        return call(tf.raw_ops.CollectiveGatherV2, x, ordering_token=[])

    return {
        "all_reduce sum": lambda x: reduce(x, "Add"),
        "all_reduce max": lambda x: reduce(x, "Max"),
        "all_gather": gather,
        "broadcast": broadcast,
        "map_gather": lambda x: gather((rank + 1.0) * x),
        "map_reduce": lambda x: reduce((rank + 1.0) * x, "Add"),
        "barrier": lambda x: reduce(tf.cast(x[0], tf.int32), "Add"),
    }


if __name__ == "__main__":
    main()
