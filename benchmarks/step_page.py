"""Writes what `benchmarks.step` measured into a page: `python -m benchmarks.step_page docs/benchmarks.md RESULTS.json`.

Everything between two marks of the page is replaced, and the figure beside it is drawn anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pages import measured_on, page_from_command_line, ratios_table, replace_written, save_figure
from benchmarks.step import NETS

_OURS, _PEERS = "C0", "0.7"


def write_page(page: Path, results: Path) -> None:
    """Replaces the tables and the figure of a page.

    Args:
        page: Markdown with the marks of this module. The figure goes to the folder `figures` beside it.
        results: What `benchmarks.step` has written.
    """
    measured = json.loads(results.read_text("utf-8"))
    save_figure(_bars(measured["results"]), page, "steps")
    parts = [measured_on(measured["machine"]), "![Examples per second of each net](figures/steps.svg)"]
    for name, summary in measured["results"].items():
        parts += [f"The net '{name}', batches of {NETS[name]['batch']}:", ratios_table("a step of", summary["ratios"])]
    replace_written(page, "benchmarks.step_page", "\n\n".join(parts))


def _bars(results: Mapping[str, Any]) -> Figure:
    """One panel below the other, of the width of a page, so that names and numbers can be read there."""
    heights = [len(summary["median_ms"]) for summary in results.values()]
    figure = Figure(figsize=(7.4, 0.24 * sum(heights) + 0.8 * len(heights)))
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (name, summary) in zip(panels, results.items(), strict=True):
        variants = list(summary["median_ms"])[::-1]
        rates = [1e3 * NETS[name]["batch"] / summary["median_ms"][variant] for variant in variants]
        bars = axes.barh(variants, rates, color=[_OURS if "ours" in variant else _PEERS for variant in variants])
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        axes.set(title=f"{name}: examples per second", xmargin=0.1)
        axes.tick_params(labelsize=9)
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    page_from_command_line("step_page", __doc__, write_page)
