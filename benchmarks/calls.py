"""What Python and graphs do in a step of `fit`: `python -m benchmarks.calls`.

These are counts. They are the same on every machine, and tell what a replica adds to a step where a clock tells mostly noise.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfrep_strategy as tfrep
from benchmarks.crews import Crew, Variant
from benchmarks.report import write_json

STRATEGIES: dict[str, Callable[[], Any]] = {
    "Keras": lambda: None,
    "MirroredStrategy, 1 replica": lambda: tfrep.MirroredStrategy(["CPU:0"]),
    "MultiWorkerStrategy, 1 replica": tfrep.MultiWorkerStrategy,
}
PROCESSES = [
    Variant(f"MultiWorkerStrategy, 2 processes, {name}", {"communicator": name}, 2) for name in ("tf", "shared_memory")
]
_STEPS = 50


def counts_of_a_step(strategy: Any) -> dict[str, float]:
    """Counts what a step of a tiny net does.

    Args:
        strategy: The strategy under which it trains; None for plain Keras.

    Returns:
        "python": calls of Python functions between two steps' ends. "nodes": operations of the compiled step, those of the
        functions that it calls included.
    """
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    x, y = np.zeros([64 * 3 * _STEPS, 32], np.float32), np.zeros([64 * 3 * _STEPS])

    def calls(steps: int) -> int:
        counted = 0

        def count(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            model.fit(x[: 64 * steps], y[: 64 * steps], batch_size=64, shuffle=False, verbose=0)
        finally:
            sys.setprofile(None)
        return counted

    calls(_STEPS)  # Traces the step.
    # What begins and ends an epoch is in both.
    python = (calls(3 * _STEPS) - calls(_STEPS)) / (2 * _STEPS)
    return {"python": python, "nodes": _nodes_of(model.train_function)}


def _nodes_of(train_function: Any) -> int:
    """Counts the operations of the function that is compiled for a step, and of those that it calls."""
    graph = _compiled(train_function)._list_all_concrete_functions()[0].graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in graph.library.function}

    def count(nodes: Any) -> int:
        called = [
            node.attr["f"].func.name for node in nodes if node.op in ("PartitionedCall", "StatefulPartitionedCall")
        ]
        return len(nodes) + sum(count(bodies[name]) for name in called)

    return count(graph.node)


def _compiled(function: Any) -> Any:
    """Returns the nearest `tf.function` that a Python function calls."""
    near = [function]
    while not isinstance(near[0], tf.types.experimental.PolymorphicFunction):
        cells = getattr(near.pop(0), "__closure__", None) or ()
        near += [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return near[0]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Counts, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by strategy; of several processes, the counts of rank 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="also write all counts there")
    chosen = parser.parse_args(arguments)
    results = {name: counts_of_a_step(make()) for name, make in STRATEGIES.items()}
    for variant in PROCESSES:
        with contextlib.closing(Crew(variant, "benchmarks.calls_worker")) as crew:
            results[variant.name] = crew.ask(None)
    table = Table("", "Python calls per step", "operations of the step")
    for name, counts in results.items():
        table.add_row(name, f"{counts['python']:.0f}", str(counts["nodes"]))
    Console(width=100).print(table)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
