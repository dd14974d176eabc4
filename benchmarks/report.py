"""Medians and ratios of what was measured in turns."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Samples = Mapping[str, Sequence[float]]


def ratio(samples: Samples, this: str, other: str) -> float:
    """Compares two variants round by round.

    Args:
        samples: Seconds, by variant; the i-th of all were measured one after the other. Some may have more than others.
        this: A variant.
        other: Another one.

    Returns:
        The median over rounds of `this / other`.

    Example:
        >>> ratio({"a": [1.0, 2.0, 9.0], "b": [2.0, 4.0, 3.0]}, "a", "b")
        0.5
    """
    return float(np.median(_ratios(samples, this, other)))


def interval(samples: Samples, this: str, other: str) -> tuple[float, float]:
    """Says how sure `ratio` is.

    Args:
        samples: As for `ratio`.
        this: A variant.
        other: Another one.

    Returns:
        The 95 % bootstrap interval of the ratio (Efron, 1979): rounds are drawn anew 10,000 times.
    """
    ratios = _ratios(samples, this, other)
    drawn = np.random.default_rng(0).choice(ratios, [10_000, len(ratios)])
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def _ratios(samples: Samples, this: str, other: str) -> np.ndarray:
    rounds = min(len(samples[this]), len(samples[other]))
    return np.divide(samples[this][:rounds], samples[other][:rounds])


def summarize(samples: Samples, targets: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Gives what is written as JSON for one workload.

    Args:
        samples: Seconds, by variant.
        targets: The largest ratio that is wanted, by pairs of variants; pairs that were not measured are left out.

    Returns:
        Medians, all samples, and the ratios with their targets.
    """
    return {
        "median_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in samples.items()},
        "samples_ms": {name: [1e3 * s for s in seconds] for name, seconds in samples.items()},
        "ratios": [
            {
                "this": this,
                "other": other,
                "ratio": ratio(samples, this, other),
                "interval": interval(samples, this, other),
                "target": target,
            }
            for (this, other), target in targets.items()
            if this in samples and other in samples
        ],
    }


def show(title: str, summary: Mapping[str, Any], reference: str, per_step: int | None = None) -> None:
    """Prints one workload.

    Args:
        title: What it is.
        summary: From `summarize`.
        reference: Variant with which the others are compared.
        per_step: Examples per step, to show throughput.
    """
    console = Console(width=100)
    table = Table(title=title)
    headings = ["median ms", "fastest ms", *(["examples/s"] if per_step else []), f"times {reference}"]
    table.add_column("variant")
    for heading in headings:
        table.add_column(heading, justify="right")
    samples = summary["samples_ms"]
    for name, median in summary["median_ms"].items():
        throughput = [f"{1e3 * per_step / median:,.0f}"] if per_step else []
        times = f"{ratio(samples, name, reference):.2f}" if reference in samples else ""
        table.add_row(name, f"{median:.2f}", f"{min(samples[name]):.2f}", *throughput, times)
    console.print(table)
    for line in summary["ratios"]:
        verdict = "reached" if line["ratio"] <= line["target"] else "NOT reached"
        low, high = line["interval"]
        text = f"{line['this']} takes {line['ratio']:.2f} ({low:.2f} to {high:.2f}) times as long as {line['other']}"
        console.print(f"  {text}; wanted: at most {line['target']:.2f}: {verdict}", soft_wrap=True)


def machine() -> dict[str, Any]:
    """Says what the numbers were measured on, and how busy it was.

    Returns:
        Versions, the processor and its cores, the load average of the last minute, and the commit; "changed" if files differ
        from it.
    """
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras")},
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "commit": _git("rev-parse", "--short", "HEAD") + (", changed" if status else ""),
    }


def _processor() -> str:
    """Returns what the processor is called; nothing where that is not known."""
    with contextlib.suppress(OSError):  # Not Linux.
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_json(path: str, results: Mapping[str, Any]) -> None:
    """Writes everything to a file.

    Args:
        path: Where.
        results: By workload.
    """
    Path(path).write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n", "utf-8")
