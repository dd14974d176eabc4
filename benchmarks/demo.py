"""The demo's training beside one device: `python -m benchmarks.demo`.

Its steps are short: 64 pictures of 8 x 8 pixels, two convolutions, two dense layers, and synchronized batch normalization, by which
replicas meet twice more in each step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.report import show, summarize, write_json
from tfrep_strategy.demo import ONE_DEVICE, run_demo
from tfrep_strategy.digits import load_digits

_WANTED = 2.0
"""How many times as long as on one device an epoch of two replicas may take: they share the cores that it has to itself."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        Under "demo" the summary: medians and samples of an epoch, in milliseconds, by variant, and ratios to one device.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="K", help="demos, one after the other (default: 5)")
    parser.add_argument("--epochs", type=int, default=12, metavar="K", help="epochs of each; the first is not timed (default: 12)")
    parser.add_argument("--examples", type=int, metavar="K", help="examples of an epoch (default: all)")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    examples = len(load_digits()[0].labels[: chosen.examples])
    seconds: dict[str, list[float]] = {}
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for _ in range(chosen.rounds):
            for result in run_demo(None, epochs=chosen.epochs, examples=chosen.examples, console=Console(file=nowhere)):
                seconds.setdefault(result.variant, []).append(examples / result.examples_per_second)
    wanted = {(variant, ONE_DEVICE): _WANTED for variant in seconds if variant != ONE_DEVICE}
    results = {"demo": summarize(seconds, wanted)}
    show("An epoch of the demo", results["demo"], ONE_DEVICE, per_step=examples)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
