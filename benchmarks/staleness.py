"""What staleness changes in convergence, on the digits with 2 workers.

    python -m benchmarks.staleness [--seeds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.parameter_server import run_coordinator
from benchmarks.report import write_json
from benchmarks.staleness_worker import MODES


def main() -> None:
    """Measures, and prints a table.

    Example:
        >>> main()
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--json", help="where to write the result")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for seed in range(options.seeds):
        for mode in options.modes:
            results[mode].append(run_coordinator("benchmarks.staleness_worker", mode, str(seed), workers=2))
    print(f"{'':24s} {'updates':>8s} {'loss, epoch 2':>14s} {'loss, epoch 10':>15s} {'test accuracy':>14s}")
    for mode, runs in results.items():
        early, late = (statistics.mean(run["train_loss"][epoch] for run in runs) for epoch in (1, 9))
        accuracy = statistics.mean(run["accuracy"] for run in runs)
        print(f"{mode:24s} {runs[0]['updates']:8d} {early:14.4f} {late:15.4f} {accuracy:14.4f}")
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
