"""What pages that are written from results have in common: what is replaced in them, figures, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def replace_written(page: Path, writer: str, text: str) -> None:
    """Replaces what a module has written into a page before.

    Args:
        page: Markdown, with two marks that name the module.
        writer: The module, such as "benchmarks.step_page".
        text: What stands between the marks afterwards.
    """
    begin, end = f"<!-- written by {writer} -->", "<!-- end of what it has written -->"
    before, found, rest = page.read_text("utf-8").partition(begin)
    if not found:
        raise ValueError(f"{page} has no line {begin}")
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", "utf-8")


def save_figure(figure: Figure, page: Path, name: str) -> None:
    """Writes a figure to the folder `figures` beside a page. The same numbers give the same file."""
    mpl.rcParams["svg.hashsalt"] = "tfrep"
    (page.parent / "figures").mkdir(exist_ok=True)
    figure.savefig(page.parent / "figures" / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def page_from_command_line(name: str, description: str | None, write_page: Callable[[Path, Path], None]) -> None:
    """Writes the page that the command line names, from the results that it names.

    Args:
        name: Of the module that writes the page.
        description: What it writes.
        write_page: Gets the page and the results.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=description)
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path)
    chosen = parser.parse_args()
    write_page(chosen.page, chosen.results)


def measured_on(machine: Mapping[str, Any]) -> str:
    """Says what `report.machine` has found, in a sentence."""
    return (
        f"Measured on {machine['cores']} cores ({machine['machine']}, Python {machine['python']}) at commit {machine['commit']};"
        f" the load average of the minute before the end was {machine['load_1min']:.1f}."
    )


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ratios_table(what: str, ratios: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the ratios of times that a benchmark has goals for, each with its interval.

    Args:
        what: The heading of what was measured.
        ratios: As `benchmarks.turns` writes them.
    """
    rows = []
    for each in ratios:
        low, high = each["interval"]
        goal = f"{each['target']:.2f}" + ("" if each["ratio"] <= each["target"] else " (missed)")
        rows.append([each["this"], each["other"], f"{each['ratio']:.2f}", f"{low:.2f} to {high:.2f}", goal])
    return markdown_table([what, "against", "ratio", "95 % interval", "goal"], rows)
