"""Writes what `benchmarks.growth` measured into a page: `python -m benchmarks.growth_page docs/speed.md RESULTS.json`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.growth import TITLES
from benchmarks.pages import markdown_table, measured_on, page_from_command_line, replace_written


def write_page(page: Path, results: Path) -> None:
    """Replaces the table of a page.

    Args:
        page: Markdown with the marks of this module.
        results: What `benchmarks.growth` has written.
    """
    written = json.loads(results.read_text("utf-8"))
    measured = written["results"]
    heads = ["", *("one device" if n == "1" else f"{n} processes" for n in measured)]
    rows = [[title, *(f"{each[key]:.3g}" for each in measured.values())] for key, title in TITLES.items()]
    replace_written(page, "benchmarks.growth_page", f"{measured_on(written['machine'])}\n\n{markdown_table(heads, rows)}")


if __name__ == "__main__":
    page_from_command_line("growth_page", __doc__, write_page)
