"""How long two processes wait for each other that train one model in step: `python -m benchmarks.waiting`.

Two processes train alone, at the same time, and never meet. The i-th step of one is compared with the i-th of the other:
if they met after each step, such a pair would take as long as the slower one. No strategy whose replicas step together can be
faster than that, however little it adds.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.crews import Crew
from benchmarks.report import write_json
from benchmarks.step import ALONE, BOUND, NETS, variants


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        By net and by how processes run, over all rounds: "mean_ms" and "deviation_ms" of a step, "slower_ms", the mean of the
        slower of two, and "reachable", `mean_ms / slower_ms`: the largest part of the speed of two processes that never meet.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.waiting", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=["convolutions"], metavar="NET", help=str(list(NETS)))
    parser.add_argument("--steps", type=int, default=256, help="steps of one turn (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way gets its turn (default: 3)")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    ways = [each for each in variants() if each.name in (ALONE, ALONE + BOUND)]
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        crews = [stack.enter_context(contextlib.closing(Crew(way, "benchmarks.step_worker"))) for way in ways]
        for net in chosen.nets:
            question = {**NETS[net], "name": net, "steps": chosen.steps, "each": True}
            turns = [[crew.ask_all(question) for crew in crews] for _ in range(chosen.rounds)]
            of_ways = zip(*turns, strict=True)
            results[net] = {way.name: _waits(np.hstack(rounds)) for way, rounds in zip(ways, of_ways, strict=True)}
    _show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


def _waits(seconds: np.ndarray) -> dict[str, float]:
    """Compares steps, [2, steps] in seconds."""
    mean, slower = seconds.mean(), seconds.max(0).mean()
    found = {"mean_ms": 1e3 * mean, "deviation_ms": 1e3 * seconds.std(), "slower_ms": 1e3 * slower, "reachable": mean / slower}
    return {name: float(value) for name, value in found.items()}


def _show(results: dict[str, Any]) -> None:
    table = Table("net", "processes", "step, ms", "deviation", "slower of two", "reachable", title="Two processes that never meet")
    for net, of_ways in results.items():
        for way, found in of_ways.items():
            numbers = [f"{found[name]:.2f}" for name in ("mean_ms", "deviation_ms", "slower_ms", "reachable")]
            table.add_row(net, way, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
