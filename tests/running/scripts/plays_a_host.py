"""The launcher of a host, without ranks. The run's program says how often host 0 wants to be asked to end: ["script", "2"]."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(given: dict[str, Any]) -> None:
    """Loses host 1 at the first start, and lets the second end well."""
    rank, start = given["node"]["rank"], given["restarts"]
    Path(f"started-{start}-{rank}").write_text(str(time.monotonic()))
    said = orders()
    tell(given, "hello", {"address": "", "seen_from": "127.0.0.1", "port": 1})
    next(said)  # The rendezvous.
    if start == 0 and rank == 1:
        os._exit(255)  # As ssh ends when the connection breaks.
    if start:
        tell(given, "report", None)
        next(said)
        return
    for number in range(int(given["program"][1])):
        next(said)
        Path(f"asked-{number}").touch()


def tell(given: dict[str, Any], kind: str, content: Any) -> None:
    os.write(1, f"{given['mark']}{json.dumps([kind, content, time.monotonic()])}\n".encode())


def orders() -> Iterator[Any]:
    with open(0, "rb", 0, closefd=False) as pipe:
        yield from (content for content in map(json.loads, pipe) if content is not None)
