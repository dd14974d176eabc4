"""Writes what was found on GPUs into a page: `python -m benchmarks.gpus_page docs/gpus.md benchmarks/results`.

`tfrep doctor --gpus` makes the files. One that is put into the folder, as `gpu-NAME.json`, adds its lines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown_table, page_from_command_line, replace_written
from tfrep_strategy.contrib.gpu_report.report import efficiency


def write_page(page: Path, results: Path) -> None:
    """Replaces the tables in a page.

    Args:
        page: The page, with the marks of this module.
        results: The folder with the files `gpu-NAME.json`.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(results.glob("gpu-*.json"))]
    heads = ["GPUs", "version", "replicas", "programs equal to one device", "not equal"]
    parts = [markdown_table(heads, [line for each in reports for line in _equality(each)])]
    speeds = [line for each in reports for line in _speed(each)]
    if speeds:
        heads = ["GPUs", "replicas are", "replicas", "net", "examples/s", "of as many times plain Keras on one GPU"]
        parts.append(markdown_table(heads, speeds))
    if max((len(each["machine"]["gpus"]) for each in reports), default=0) < 2:
        parts.append(
            "No machine with several GPUs has run it yet. `tfrep doctor --gpus` makes the file that adds it to this table."
        )
    replace_written(page, "benchmarks.gpus_page", "\n\n".join(parts))


def _gpus(report: Mapping[str, Any]) -> str:
    counted = Counter(report["machine"]["gpus"])
    return ", ".join(f"{count} × {name}" for name, count in counted.items()) or "none: logical CPUs"


def _equality(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yields a line for each place in which programs were compared with one device."""
    compared = [each for each in report["findings"] if each["expected"].startswith("one device's numbers")]
    for place in dict.fromkeys(each["place"] for each in compared):
        there = [each for each in compared if each["place"] == place]
        wrong = [each["check"] for each in there if not each["ok"]]
        yield _gpus(report), report["version"], place, f"{len(there) - len(wrong)} of {len(there)}", ", ".join(wrong) or "none"


def _speed(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for each in report.get("scaling", ()):
        part = efficiency(report, each)
        shown = "" if part is None else f"{part:.0%}"
        yield _gpus(report), each["kind"], str(each["replicas"]), each["net"], f"{each['examples_per_second']:,.0f}", shown


if __name__ == "__main__":
    page_from_command_line("gpus_page", __doc__, write_page)
