"""Writes what `benchmarks.scale` measured into a page: `python -m benchmarks.speed_page docs/speed.md RESULTS.json`.

Everything between two marks of the page is replaced, and the figures beside it are drawn anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.control_plane import TARGETS, TITLES
from benchmarks.costs import PRIMITIVES, Costs, predicted_collectives
from benchmarks.pages import markdown_table, measured_on, page_from_command_line, replace_written, save_figure

_DRAWN = ("all_reduce sum", "all_gather", "all_to_all")


def write_page(page: Path, results: Path) -> None:
    """Replaces the tables and figures of a page.

    Args:
        page: Markdown with both marks. Figures go to the folder `figures` beside it.
        results: What `benchmarks.scale` has written.
    """
    measured = json.loads(results.read_text("utf-8"))
    save_figure(_collectives(measured), page, "scale_collectives")
    save_figure(_ranks(measured), page, "scale_ranks")
    replace_written(page, "benchmarks.speed_page", _written(measured))


def _written(measured: Mapping[str, Any]) -> str:
    results = measured["results"]
    made = measured_on(measured["machine"])
    parts = [made, "### Collectives", "![Collectives with 2 to 8 processes](figures/scale_collectives.svg)"]
    for communicator, primitives in results["collectives"].items():
        parts += [f'`communicator="{communicator}"`, the most processes:', _tried(primitives)]
    parts += [
        "### Ranks that hear of each other",
        "![Costs of up to 1,024 ranks](figures/scale_ranks.svg)",
        _control(results["control of few"]),
        _control(results["control"]),
    ]
    parts += ["### Predicted for 64 and 1,024 replicas", *_predicted(predicted_collectives())]
    return "\n\n".join(parts)


def _tried(primitives: Mapping[str, Any]) -> str:
    rows = []
    for name, result in primitives.items():
        costs = result["costs"]
        fitted = [f"{1e6 * costs[key]:,.0f}" for key in ("call_s", "wait_s", "message_s")]
        fitted.append(f"{1e9 * costs['byte_s']:.2f}" if max(each["bytes"] for each in result["points"]) > 1000 else "")
        most = max(each["processes"] for each in result["points"])
        tried = [each for each in result["points"] if each["processes"] == most]
        errors = ", ".join(f"{each['error']:+.0%}" for each in tried)
        times = ", ".join(f"{each['measured_ms']:.1f}" for each in tried)
        rows.append([name, *fitted, times, errors, f"{result['median_error']:.0%}"])
    heads = [
        "primitive",
        "call, µs",
        "wait, µs",
        "message, µs",
        "byte, ns",
        "measured, ms",
        "errors",
        "median",
    ]
    return markdown_table(heads, rows)


def _control(control: Mapping[str, Any]) -> str:
    measured, predicted = control["measured"], control["predicted"]
    *_, last = measured
    rows = []
    for key, title in TITLES.items():
        guess = [f"{predicted[key]:.3g}", f"{predicted[key] / measured[last][key] - 1:+.0%}"] if key in predicted else ["", ""]
        wanted = f"< {TARGETS[key]:g}" if key in TARGETS else ""
        rows.append([title, *(f"{each[key]:.3g}" for each in measured.values()), *guess, wanted])
    return markdown_table(["", *(f"{int(n):,} ranks" for n in measured), f"predicted for {int(last):,}", "error", "wanted"], rows)


def _predicted(predicted: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterable[str]:
    for links, messages in predicted.items():
        yield f"{links[0].upper()}{links[1:]}: milliseconds."
        heads = list(dict.fromkeys(head for each in messages.values() for head in each))
        rows = [[name, *(f"{each[head]:.2f}" if head in each else "" for head in heads)] for name, each in messages.items()]
        yield markdown_table(["", *heads], rows)


def _collectives(measured: Mapping[str, Any]) -> Figure:
    cores, collectives = measured["machine"]["cores"], measured["results"]["collectives"]
    figure = Figure(figsize=(4.2 * len(collectives), 3.2))
    for axes, (communicator, primitives) in zip(_axes(figure, len(collectives)), collectives.items(), strict=True):
        for number, name in enumerate(name for name in _DRAWN if name in primitives):
            points = primitives[name]["points"]
            size = max(each["bytes"] for each in points)
            own = sorted((each["processes"], each["measured_ms"]) for each in points if each["bytes"] == size)
            fitted, primitive = Costs(**primitives[name]["costs"]), PRIMITIVES[communicator][name]
            line = range(own[0][0], own[-1][0] + 1)
            axes.plot(*zip(*own, strict=True), "o", color=f"C{number}", label=f"{name}, {size / 1e6:.1f} MB")
            model = [1e3 * fitted.seconds(primitive, n, size, cores) for n in line]
            axes.plot(line, model, color=f"C{number}", linewidth=1)
        axes.set(title=f"{communicator}: measured (dots), model (lines)", xlabel="processes", ylabel="ms", yscale="log")
        axes.legend(fontsize=7, frameon=False)
    return figure


def _ranks(measured: Mapping[str, Any]) -> Figure:
    control = measured["results"]["control"]
    ranks = [int(n) for n in control["measured"]]
    figure = Figure(figsize=(6.0, 3.2))
    (axes,) = _axes(figure, 1)
    for number, (key, unit) in enumerate(
        (("join_cpu_s", 1.0), ("agree_ms", 1e-3), ("death_told_s", 1.0), ("leave_s", 1.0))
    ):
        cost = control["costs"][key]
        title = TITLES[key].partition(":")[0].replace("...", "all have joined")
        axes.plot(
            ranks, [unit * each[key] for each in control["measured"].values()], "o", color=f"C{number}", label=title
        )
        axes.plot(
            ranks, [unit * (cost["constant"] + n * cost["each_rank"]) for n in ranks], color=f"C{number}", linewidth=1
        )
    axes.set(xlabel="ranks", ylabel="seconds", xscale="log", yscale="log")
    axes.legend(fontsize=7, frameon=False)
    return figure


def _axes(figure: Figure, count: int) -> Sequence[Any]:
    return figure.subplots(1, count, squeeze=False)[0]


if __name__ == "__main__":
    page_from_command_line("speed_page", __doc__, write_page)
