"""Writes what `benchmarks.traffic` measured into a page: `python -m benchmarks.traffic_page docs/benchmarks.md RESULTS.json`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pages import markdown_table, measured_on, page_from_command_line, replace_written
from benchmarks.traffic import HEADS, row


def write_page(page: Path, results: Path) -> None:
    """Replaces the tables of a page.

    Args:
        page: Markdown with the marks of this module.
        results: What `benchmarks.traffic` has written.
    """
    written = json.loads(results.read_text("utf-8"))
    parts = [measured_on(written["machine"])]
    for net, communicators in written["results"].items():
        lines = [(f"`{name}`", setting, each) for name, settings in communicators.items() for setting, each in settings.items()]
        table = markdown_table(["", "gradients", *HEADS], [[name, setting, *row(each)] for name, setting, each in lines])
        parts += [f"The net '{net}':", table]
        of_horovod = {setting: each["horovod_ms"] for _, setting, each in lines if "horovod_ms" in each}
        if of_horovod:
            heads = list(next(iter(of_horovod.values())))
            rows = [[setting, *(f"{each[head]:.1f}" for head in heads)] for setting, each in of_horovod.items()]
            parts += ["Horovod's own milliseconds:", markdown_table(["gradients", *heads], rows)]
    replace_written(page, "benchmarks.traffic_page", "\n\n".join(parts))


if __name__ == "__main__":
    page_from_command_line("traffic_page", __doc__, write_page)
