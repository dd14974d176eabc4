"""For how long TensorFlow's servers are open to everybody until they are confined: `python -m benchmarks.open_ports`.

This process looks for the servers of ranks all the time, in the table of the kernel. They tell when they were confined.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tfrep_strategy as tfrep

_LISTENS = "0A"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a line, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON.
    """
    parser = argparse.ArgumentParser("open_ports", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many runs of two processes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    chosen = parser.parse_args(arguments)
    seen: dict[int, float] = {}
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(seen, is_over))
    watch.start()
    try:
        confined = [each for _ in range(chosen.runs) for each in tfrep.launch(_confined_at, communicator="tf")]
    finally:
        is_over.set()
        watch.join()
    # Zero: confined before the first look at it.
    found = [max(0.0, 1000 * (at - seen.get(port, at))) for each in confined for port, at in each.items()]
    summary = {"servers": len(found), "median_ms": statistics.median(found), "longest_ms": max(found)}
    print("{servers} servers: open for {median_ms:.1f} ms (median), {longest_ms:.1f} ms (longest)".format(**summary))
    if chosen.json:
        chosen.json.write_text(json.dumps({"results": summary}), "utf-8")
    return summary


def _watch(seen: dict[int, float], is_over: threading.Event) -> None:
    """Notes when each port began to listen."""
    while not is_over.wait(0.0005):
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            now = time.monotonic()
            for _, own, _, state, *_ in (line.split(maxsplit=4) for line in Path(table).read_text().splitlines()):
                if state == _LISTENS:
                    seen.setdefault(int(own.rpartition(":")[2], 16), now)


def _confined_at() -> dict[int, float]:
    from tfrep_strategy.communicators.tf_collective import TensorFlowCommunicator

    return TensorFlowCommunicator.confined_at


if __name__ == "__main__":
    main()
