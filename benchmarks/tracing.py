"""How long the replicas of one process are traced: `python -m benchmarks.tracing`.

Each variant trains two nets for a step, in a process of its own, with Adam and a metric. What counts is CPU time inside
TensorFlow's tracing of functions, of all threads, since the machine may do other work.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json

NETS = ("dense", "convolutions")
BATCHES = ("of one size", "of any size")
KERAS = "Keras"
_LIMIT_SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        By net, batches and variant: "seconds" of tracing, one number for each round, and "step_seconds", CPU time of the whole
        first `fit`.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS, metavar="NET")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="processes of each variant, in turns (default: 3)")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    parser.add_argument("--measure", nargs=3, metavar=("NET", "BATCHES", "VARIANT"), help="only this, in this process")
    chosen = parser.parse_args(arguments)
    if chosen.measure:
        print(json.dumps(_measured(*chosen.measure)))
        return {}
    variants = [KERAS, *map(str, chosen.replicas)]
    results: dict[str, Any] = {}
    for _ in range(chosen.rounds):
        for net in chosen.nets:
            for batches in BATCHES:
                for variant in variants:
                    seconds, of_step = _in_process(net, batches, variant)
                    of_variants = results.setdefault(f"{net}, batches {batches}", {})
                    found = of_variants.setdefault(variant, {"seconds": [], "step_seconds": []})
                    found["seconds"].append(seconds)
                    found["step_seconds"].append(of_step)
    _show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


def _in_process(*measure: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.tracing", "--measure", *measure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(net: str, batches: str, variant: str) -> list[float]:
    """Returns CPU seconds inside the tracing of functions, and of the whole first `fit`."""
    # Imported here, since the process that compares the variants needs none of them.
    import keras
    import numpy as np
    import tensorflow as tf

    import tfrep_strategy as tfrep
    from tfrep_strategy._tensorflow import trace

    scope: Any = contextlib.nullcontext()
    if variant != KERAS:
        scope = tfrep.MirroredStrategy(tfrep.use_logical_cpus(int(variant))).scope()
    layers = keras.layers
    if net == "dense":
        shape, stack = (32,), [layers.Dense(32, "relu") for _ in range(4)]
    else:
        shape = (8, 8, 3)
        stack = [kind for _ in range(13) for kind in (layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization())]
        stack.append(layers.GlobalAveragePooling2D())
    rows = 64 if batches == BATCHES[0] else 100
    data = tf.data.Dataset.from_tensor_slices((np.zeros([rows, *shape], np.float32), np.zeros([rows, 1], np.float32)))
    seconds, depth, functions = 0.0, 0, inspect.getmodule(trace)

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal seconds, depth
        start, depth = time.process_time(), depth + 1
        try:
            return trace(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                seconds += time.process_time() - start

    with scope:
        model = keras.Sequential([keras.Input(shape), *stack, layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        functions.func_graph_from_py_func = timed
        start = time.process_time()
        model.fit(data.batch(64, drop_remainder=batches == BATCHES[0]), steps_per_epoch=1, verbose=0)
        return [seconds, time.process_time() - start]


def _show(results: dict[str, Any]) -> None:
    table = Table(title="CPU seconds of tracing, medians; in brackets: times one device")
    table.add_column("net")
    for variant in next(iter(results.values())):
        table.add_column(variant if variant == KERAS else f"{variant} replicas", justify="right")
    for net, found in results.items():
        medians = [statistics.median(each["seconds"]) for each in found.values()]
        table.add_row(net, *(f"{seconds:.2f} (× {seconds / medians[0]:.1f})" for seconds in medians))
    Console().print(table)


if __name__ == "__main__":
    main()
