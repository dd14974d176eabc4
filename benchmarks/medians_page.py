"""Writes the medians of a benchmark into a page: `python -m benchmarks.medians_page docs/collectives.md RESULTS.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown_table, measured_on, page_from_command_line, ratios_table, replace_written


def write_page(page: Path, results: Path) -> None:
    """Replaces the tables in a page.

    Args:
        page: The page, with the marks of this module.
        results: The JSON of a benchmark whose variants took turns.
    """
    written = json.loads(results.read_text("utf-8"))
    parts = [f"`benchmarks/results/{results.name}`. {measured_on(written['machine'])}", _table(written["results"])]
    goals = [
        {**line, "this": f"{workload}: {line['this']}"}
        for workload, summary in written["results"].items()
        for line in summary["ratios"]
        if "target" in line
    ]
    if goals:
        parts.append(ratios_table("what", goals))
    replace_written(page, "benchmarks.medians_page", "\n\n".join(parts))


def _table(workloads: Mapping[str, Any]) -> str:
    """Returns a table with a line for each workload: median milliseconds, and how many times as long as another variant."""
    names = list(dict.fromkeys(name for summary in workloads.values() for name in summary["median_ms"]))
    rows = []
    for workload, summary in workloads.items():
        times = {line["this"]: f" (× {line['ratio']:.2f})" for line in reversed(summary["ratios"])}
        medians = summary["median_ms"]
        rows.append([workload, *(f"{medians[name]:.2f}{times.get(name, '')}" if name in medians else "-" for name in names)])
    return markdown_table(["", *names], rows)


if __name__ == "__main__":
    page_from_command_line("medians_page", __doc__, write_page)
