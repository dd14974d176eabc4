"""What each primitive costs beside the bare operation underneath: `python -m benchmarks.collectives`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.crews import Variant
from benchmarks.report import ratio, summarize, write_json
from benchmarks.turns import take_turns, turns_parser
from tfrep_strategy.processes.identity import horovod_is_installed

PRIMITIVES = ("all_reduce sum", "all_reduce max", "all_gather", "broadcast", "reduce_scatter", "all_to_all",
              "map_gather", "map_reduce", "barrier")  # fmt: skip
SIZES = {"1 MB": {"floats": 250_000, "times": 20}, "40 bytes": {"floats": 10, "times": 50}}
PAIRS = [("ours, horovod", "Horovod, bare"), ("ours, tf", "TensorFlow, bare"), ("ours, shared memory", "Horovod, bare")]


def variants() -> list[Variant]:
    """Lists what can be measured here.

    Returns:
        The variants, two processes each.
    """
    listed = [
        Variant("Horovod, bare", {"transport": "horovod"}, 2, "horovod"),
        Variant("ours, horovod", {"transport": "ours", "communicator": "horovod"}, 2, "horovod"),
        Variant("TensorFlow, bare", {"transport": "tensorflow"}, 2),
        Variant("ours, tf", {"transport": "ours", "communicator": "tf"}, 2),
        Variant("ours, shared memory", {"transport": "ours", "communicator": "shared_memory"}, 2),
    ]
    return [variant for variant in listed if variant.communicator == "tf" or horovod_is_installed()]


def show(results: Mapping[str, Any]) -> None:
    """Prints one table: a line for each primitive and size.

    Args:
        results: By workload, from `main`.
    """
    names = [variant.name for variant in variants()]
    table = Table(title="Two processes: median milliseconds, and how many times as long as the bare operation")
    table.add_column("primitive")
    for name in names:
        table.add_column(name, justify="right")
    for workload, summary in results.items():
        times = {line["this"]: f" (x {line['ratio']:.2f})" for line in summary["ratios"]}
        medians = summary["median_ms"]
        table.add_row(workload, *(f"{medians[n]:.2f}{times.get(n, '')}" if n in medians else "-" for n in names))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by workload.
    """
    parser = turns_parser("collectives", __doc__, rounds=9)
    parser.add_argument("--times", type=int, help="how many calls make a turn")
    parser.add_argument("--primitives", nargs="+", choices=PRIMITIVES, default=PRIMITIVES, metavar="NAME")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    chosen = parser.parse_args(arguments)
    workloads = {
        f"{primitive} of {size}": {"primitive": primitive, **SIZES[size], "times": chosen.times or SIZES[size]["times"]}
        for size in chosen.sizes
        for primitive in chosen.primitives
    }
    results = {}
    for name, samples in take_turns(variants(), "benchmarks.collectives_worker", workloads, chosen.rounds):
        # TensorFlow has no exchange, and scatters no reductions, between CPUs.
        measured = {variant: seconds for variant, seconds in samples.items() if min(seconds) > 0}
        results[name] = summarize(measured, {})
        results[name]["ratios"] = [
            {"this": this, "other": other, "ratio": ratio(measured, this, other)}
            for this, other in PAIRS
            if this in measured and other in measured
        ]
    show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
