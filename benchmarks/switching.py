"""Why collectives over common memory take longer where ranks share cores: `python -m benchmarks.switching`.

In a collective, ranks of one core take turns. Each turn finds the caches full of what another rank has used. The benchmark counts
CPU time, so that waiting does not count: of the messages of a collective alone, of a call of Python from a function alone, of both
in turns, and of a sum, which is both.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfrep_strategy as tfrep
from benchmarks.report import write_json

_LIMIT_SECONDS = 300.0
_KINDS = ("messages", "call", "messages and call", "sum")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        By the number of processes and the kind of work, means over the ranks: "cpu_us", microseconds of CPU time of one of them,
        and "switches", how often a rank gave its core away in it.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.switching", description=__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 3, 4, 8], metavar="N")
    parser.add_argument("--times", type=int, default=500, metavar="K", help="how often each is done (default: 500)")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    results = {str(processes): _means(processes, chosen.times) for processes in chosen.processes}
    _show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


def _means(processes: int, times: int) -> dict[str, dict[str, float]]:
    options = {"communicator": "shared_memory", "strategy": None, "timeout": _LIMIT_SECONDS}
    ranks = tfrep.launch(_work, (times,), num_replicas=processes, **options)
    means = {kind: np.mean([rank[kind] for rank in ranks], axis=0).tolist() for kind in _KINDS}
    return {kind: {"cpu_us": 1e6 * seconds, "switches": switches} for kind, (seconds, switches) in means.items()}


def _work(times: int) -> dict[str, tuple[float, float]]:
    """Returns what each kind costs a rank: seconds of CPU time, and switches."""
    communicator: Any = tfrep.MultiWorkerStrategy("shared_memory").communicator
    numbers, links = tf.zeros([24]), communicator.inner._links
    total = tf.function(lambda x: communicator.all_reduce([x])[0], autograph=False)
    local = tf.function(lambda x: tf.numpy_function(np.copy, [x], tf.float32), autograph=False)

    def greet() -> None:
        links.exchange(bytes(108))  # As long as the message of the sum.

    def both() -> None:
        greet()
        local(numbers)

    kinds = (greet, lambda: local(numbers), both, lambda: total(numbers))
    return {name: _cost(kind, times, communicator.barrier) for name, kind in zip(_KINDS, kinds, strict=True)}


def _cost(work: Callable[[], Any], times: int, barrier: Callable[[], None]) -> tuple[float, float]:
    for _ in range(times // 10 + 1):
        work()
    barrier()
    cpu, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(times):
        work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (time.process_time() - cpu) / times, (after.ru_nvcsw - before.ru_nvcsw) / times


def _show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title=f"CPU time of a rank, µs ({os.cpu_count()} cores); in brackets: how often it gave its core away")
    table.add_column("processes", justify="right")
    for kind in _KINDS:
        table.add_column(kind, justify="right")
    for processes, kinds in results.items():
        table.add_row(processes, *(f"{kinds[kind]['cpu_us']:,.0f} ({kinds[kind]['switches']:.1f})" for kind in _KINDS))
    Console().print(table)


if __name__ == "__main__":
    main()
