"""The report of a hang as a table: where each rank was, and its last collectives. TensorFlow is not loaded for this."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfrep_strategy.cluster.flight_recorder import Flight, Hang, hang_of, read_flights, read_hang
from tfrep_strategy.errors import ConfigurationError, message

_SHOWN = 5
"""The number of collectives of each rank that the table has."""


def show_hang(folder: Path, *, as_json: bool = False) -> None:
    """Prints the report of a run that hung.

    Args:
        folder: The folder of its logs. Files of several machines may be put into one folder.
        as_json: Whether to print one JSON object, with all collectives that were recorded, instead of a table.

    Raises:
        ConfigurationError: There is no report in the folder.

    Example:
        >>> Hang("Rank 1 is stopped.", {1: "is stopped"}, 1, 0.0).write(Path())
        >>> show_hang(Path(), as_json=True)
        {"what": "Rank 1 is stopped.", "ranks": {"1": "is stopped"}, "lags": 1, "time": 0.0, "flights": {}}
    """
    flights = read_flights(folder)
    hang = read_hang(folder) or _hang_of_flights(flights)
    if hang is None:
        hint = "name the folder of the logs, which the run says at its start. A run that did not hang leaves no report."
        raise ConfigurationError(message("There is no report of a hang.", hint=hint, folder=str(folder)))
    if as_json:
        of_ranks = {rank: [asdict(each) for each in flight.collectives] for rank, flight in flights.items()}
        print(json.dumps({**asdict(hang), "flights": of_ranks}))
        return
    console = Console()
    console.print(escape(hang.what), highlight=False)
    table = Table(title="tfrep doctor --hang", show_lines=True)
    for title in ("", "rank", "where", "last collectives"):
        table.add_column(title, overflow="fold")  # A path has no spaces, and its end has the line.
    for rank, where in hang.ranks.items():
        last = flights[rank].collectives[-_SHOWN:] if rank in flights else ()
        told = "\n".join(f"{each.state}: {each}" for each in last)
        table.add_row("[red]lags[/]" if rank == hang.lags else "", str(rank), escape(where), escape(told))
    console.print(table)
    console.print(escape(hang.last_line), highlight=False)


def _hang_of_flights(flights: dict[int, Flight]) -> Hang | None:
    """Makes the report from the records of ranks, where rank 0 could not write it."""
    if not flights:
        return None
    return hang_of(
        "Rank 0 wrote no report. These are the ranks that did.", {rank: each.where for rank, each in flights.items()}, {}
    )
