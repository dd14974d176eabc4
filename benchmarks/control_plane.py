"""What it costs ranks to hear of each other, with real messages over loopback: `python -m benchmarks.control_plane`.

The ranks are threads of a few processes. Each uses the package's own rendezvous and monitor; rank 0 has a process of its own. They
train nothing. The objects of monitors and callbacks go through a binary tree of connections, which stands for the transport.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.crews import Crew, Variant
from benchmarks.report import write_json
from tfrep_strategy.cluster.rendezvous.connections import free_ports

TARGETS = {"join_s": 20.0, "death_told_s": 2.0, "training_core_percent": 1.0}
"""The most that is wanted of each at 1,024 ranks."""
TITLES = {
    "join_s": "all have joined: seconds",
    "join_cpu_s": "... CPU seconds of rank 0's process",
    "agree_ms": "all have agreed on a collective: ms",
    "agree_cpu_ms": "... CPU ms of rank 0's process",
    "compare_ms": "the state of a callback is compared, and alike: ms",
    "compare_unlike_ms": "... that of one rank differs: ms",
    "training_core_percent": "training: percent of a core in rank 0's process",
    "death_told_s": "all have heard of a death: seconds",
    "leave_s": "all have left: seconds",
}
_CALLS = 10


def measure(ranks: int, processes: int, seconds: float) -> dict[str, float]:
    """Lets ranks join, agree, train, lose one of them, and end.

    Args:
        ranks: How many; 2 or more.
        processes: How many processes the ranks other than rank 0 share.
        seconds: How long they train. Each tells its state every 30 seconds.

    Returns:
        The measurements, by the keys of the table.
    """
    [port] = free_ports(1)
    processes = max(1, min(processes, (ranks - 1) // 2))  # The last loses one of its ranks, and keeps another if it can.
    bounds = [0, *(1 + (ranks - 1) * i // processes for i in range(processes + 1))]
    shares = [list(range(start, end)) for start, end in zip(bounds, bounds[1:], strict=False)]
    variants = [
        Variant(f"ranks {share[0]} to {share[-1]}", {"ranks": share, "size": ranks, "address": f"127.0.0.1:{port}"})
        for share in shares
    ]
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(variants)))
        crews = list(pool.map(lambda variant: Crew(variant, "benchmarks.control_plane_crowd"), variants))
        for crew in crews:
            stack.callback(crew.close)

        def ask(method: str, *arguments: Any) -> list[Any]:
            return list(pool.map(lambda crew: crew.ask((method, arguments)), crews))

        joined = ask("join")
        agreed = ask("agree", _CALLS)
        _, alike, unlike = (ask("compare", _CALLS, differs) for differs in (False, False, True))  # TensorFlow starts in the first.
        trained = ask("train", seconds)
        died = crews[-1].ask(("lose", [ranks - 1]))
        told = ask("heard", ranks - 1)
        left = ask("leave")
    return {
        "join_s": max(each["ended"] for each in joined) - min(each["began"] for each in joined),
        "join_cpu_s": joined[0]["cpu"],
        "agree_ms": 1000 * agreed[0][0],
        "agree_cpu_ms": 1000 * agreed[0][1],
        "compare_ms": 1000 * max(alike),
        "compare_unlike_ms": 1000 * max(unlike),
        "training_core_percent": 100 * trained[0] / seconds,
        "death_told_s": max(told) - died,
        "leave_s": max(seconds for seconds, _ in left),
    }


def show(results: dict[str, dict[str, float]]) -> None:
    """Prints a table.

    Args:
        results: By the number of ranks.
    """
    table = Table(title="Ranks that hear of each other, over loopback")
    for heading in ("", *(f"{ranks} ranks" for ranks in results), "wanted"):
        table.add_column(heading, justify="right" if heading else "left")
    for key, title in TITLES.items():
        wanted = f"< {TARGETS[key]:g}" if key in TARGETS else ""
        table.add_row(title, *(f"{measured[key]:.3g}" for measured in results.values()), wanted)
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by the number of ranks.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="how many ranks; one run each")
    parser.add_argument("--processes", type=int, default=3, help="how many processes they share, beside that of rank 0")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they train")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    chosen = parser.parse_args(arguments)
    results = {str(ranks): measure(ranks, chosen.processes, chosen.seconds) for ranks in chosen.ranks}
    show(results)
    if chosen.json:
        write_json(chosen.json, results)
    return results


if __name__ == "__main__":
    main()
