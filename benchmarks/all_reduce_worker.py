"""One process of `benchmarks.all_reduce`. Imports only what its variant needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.crews import work

Tensors = list[tf.Tensor]


def main() -> None:
    """Answers questions until the benchmark is over."""
    work(make)


def make(settings: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Sets a process up.

    Args:
        settings: "transport": see `_transports`.

    Returns:
        A function that sums tensors over the processes some times and returns the seconds per time.
    """
    all_reduce = _transports[settings["transport"]]()
    functions: dict[tuple[int, int], Any] = {}

    def measure(question: dict[str, int]) -> float:
        count, size, times = question["count"], question["floats"], question["times"]
        values = [tf.fill([size], float(i)) for i in range(count)]
        if (count, size) not in functions:
            functions[count, size] = tf.function(lambda *tensors: all_reduce(list(tensors)), autograph=False)
        function = functions[count, size]
        summed = function(*values)
        if any(float(total[0]) != 2.0 * i for i, total in enumerate(summed)):
            raise RuntimeError("The sum over two processes is wrong.")
        start = time.perf_counter()
        for _ in range(times):
            summed = function(*values)
        summed[-1].numpy()
        return (time.perf_counter() - start) / times

    return measure


def _ours(communicator: str) -> Callable[[Tensors], Tensors]:
    import tfrep_strategy as tfrep

    return tfrep.MultiWorkerStrategy(communicator).communicator.all_reduce


def _compressed(communicator: str) -> Callable[[Tensors], Tensors]:
    import tfrep_strategy as tfrep
    from tfrep_strategy.communicators.wire import compressed_sum

    own = tfrep.MultiWorkerStrategy(communicator).communicator
    return lambda tensors: compressed_sum(own, tensors, "bf16")


def _bare_horovod() -> Callable[[Tensors], Tensors]:
    import horovod.tensorflow as hvd

    hvd.init()
    return lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="benchmark")


def _stock_ring() -> Callable[[Tensors], Tensors]:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def in_replica(tensors: Tensors) -> Tensors:
        # TensorFlow asks the tensors for their device; those that come in as arguments have none.
        return tf.distribute.get_replica_context().all_reduce("SUM", [tf.identity(t) for t in tensors])

    def all_reduce(tensors: Tensors) -> Tensors:
        return strategy.run(in_replica, (tensors,))

    return all_reduce


_transports: dict[str, Callable[[], Callable[[Tensors], Tensors]]] = {
    "ours, horovod": lambda: _ours("horovod"),
    "ours, tf": lambda: _ours("tf"),
    "ours, shared memory": lambda: _ours("shared_memory"),
    "ours, horovod, bf16": lambda: _compressed("horovod"),
    "ours, tf, bf16": lambda: _compressed("tf"),
    "horovod": _bare_horovod,
    "tensorflow": _stock_ring,
}


if __name__ == "__main__":
    main()
