"""Steps per second on parameter servers: ours, and tf_keras with TensorFlow's own strategy where it is installed.

    python -m benchmarks.parameter_server [--steps 200] [--epochs 3] [--rounds 3] [--json FILE]

Every measurement has servers, workers and a coordinator of its own; the variants take turns in every round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.report import write_json
from tfrep_strategy.clusters.cluster import LocalCluster

_LIMIT_SECONDS = 300


def measure(variant: str, workers: int, steps: int, epochs: int) -> list[float]:
    """Runs one variant on a cluster of its own.

    Args:
        variant: What `benchmarks.parameter_server_worker` takes.
        workers: How many workers.
        steps: Steps per epoch.
        epochs: How many epochs are timed.

    Returns:
        Steps per second of each epoch.

    Example:
        >>> measure("ours", workers=2, steps=100, epochs=3)
    """
    seconds = run_coordinator("benchmarks.parameter_server_worker", variant, str(steps), str(epochs), workers=workers)
    return [steps / each for each in seconds]


def run_coordinator(module: str, *arguments: str, workers: int) -> Any:
    """Runs a module as the coordinator of a cluster of its own, with one server.

    Args:
        module: Prints its result as a line of JSON after "RESULT ".
        *arguments: Its arguments.
        workers: How many workers.

    Returns:
        The result.

    Raises:
        RuntimeError: It failed, or printed no result.

    Example:
        >>> run_coordinator("benchmarks.parameter_server_worker", "ours", "100", "3", workers=2)
    """
    cluster = LocalCluster(workers, 1)
    try:
        environ = os.environ | {"BENCHMARK_CLUSTER": json.dumps(cluster.spec), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    finally:
        cluster.stop()
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(results[0].removeprefix("RESULT "))


def main() -> None:
    """Measures, and prints a table.

    Example:
        >>> main()
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write the result")
    options = parser.parse_args()
    variants = [("ours", 1), ("ours", 2), ("ours, fed", 2)]
    if importlib.util.find_spec("tf_keras"):
        variants.insert(0, ("tf_keras", 2))
    samples: dict[str, list[float]] = {f"{variant}, {workers} workers": [] for variant, workers in variants}
    for _ in range(options.rounds):
        for variant, workers in variants:
            samples[f"{variant}, {workers} workers"] += measure(variant, workers, options.steps, options.epochs)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, median in medians.items():
        low, high = min(samples[name]), max(samples[name])
        print(f"{name:24s} {median:7.1f} steps/s   (from {low:.1f} to {high:.1f})")
    print(f"2 workers against 1: {medians['ours, 2 workers'] / medians['ours, 1 workers']:.2f} times as fast")
    if "tf_keras, 2 workers" in medians:
        ratio = medians["ours, 2 workers"] / medians["tf_keras, 2 workers"]
        print(f"ours against tf_keras, 2 workers: {ratio:.2f} times as fast")
    if options.json:
        write_json(options.json, {"samples": samples, "medians": medians})


if __name__ == "__main__":
    main()
