"""Plots that lay runs over each other. Each function draws into axes that matplotlib has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def draw_curves(
    axes: Any, curves: Mapping[str, Sequence[float]], *, x: Sequence[float] | None = None, xlabel: str = "epoch", ylabel: str
) -> None:
    """Draws curves over each other. The first is the widest, so that curves that coincide are all visible.

    Args:
        axes: Of matplotlib.
        curves: The values of each curve, by its name.
        x: Where the values are; by default at 1, 2, ...
        xlabel: The name of the horizontal axis, with its unit.
        ylabel: The name of the vertical axis, with its unit.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_curves(axes, {"one device": [2.0, 1.0], "2 replicas": [2.0, 1.0]}, ylabel="loss")
        >>> [line.get_linewidth() for line in axes.get_lines()]
        [4.0, 2.0]
    """
    for i, (name, values) in enumerate(curves.items()):
        places = range(1, len(values) + 1) if x is None else x
        axes.plot(places, values, linewidth=2.0 * (len(curves) - i), color=f"C{i}", label=name)
    if x is None:
        axes.locator_params(axis="x", integer=True)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()


def draw_bars(axes: Any, bars: Mapping[str, float], *, xlabel: str = "examples per second") -> None:
    """Draws horizontal bars from top to bottom, with their values.

    Args:
        axes: Of matplotlib.
        bars: The value of each bar, by its name.
        xlabel: What the values are, with their unit.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_bars(axes, {"one device": 900.0, "2 replicas": 850.0})
        >>> axes.get_xlabel()
        'examples per second'
    """
    drawn = axes.barh(list(bars), list(bars.values()), color=[f"C{i}" for i in range(len(bars))])
    axes.bar_label(drawn, labels=[f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in bars.values()], padding=3)
    axes.margins(x=0.18)
    axes.set(xlabel=xlabel)
    axes.invert_yaxis()


def draw_spread(
    axes: Any, runs: Mapping[str, Sequence[Sequence[float]]], *, x: Sequence[float], xlabel: str, ylabel: str
) -> None:
    """Draws means over several seeds, with their standard errors as bars.

    Args:
        axes: Of matplotlib.
        runs: For each name, a row of values for each seed, of shape `[seeds, len(x)]`.
        x: Where the values are.
        xlabel: The name of the horizontal axis, with its unit.
        ylabel: The name of the vertical axis, with its unit.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_spread(axes, {"score": [[1.0, 2.0], [3.0, 2.0]]}, x=[8, 16], xlabel="batch (examples)", ylabel="score")
        >>> [float(v) for v in axes.get_lines()[0].get_ydata()]
        [2.0, 2.0]
    """
    for i, (name, rows) in enumerate(runs.items()):
        values = np.asarray(rows, np.float64)
        errors = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(len(x))
        axes.errorbar(x, values.mean(0), yerr=errors, marker="o", capsize=4, color=f"C{i}", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()


def draw_pictures(axes: Any, pictures: np.ndarray, *, columns: int = 8, title: str = "") -> None:
    """Draws pictures as one grid.

    Args:
        axes: Of matplotlib.
        pictures: Of shape `[n, height, width, 1 or 3]`, between 0 and 1. One channel is drawn as ink on paper.
        columns: How many stand in a row.
        title: Of the grid.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_pictures(axes, np.zeros([6, 8, 8, 1]), columns=3)
        >>> axes.images[0].get_array().shape  # Two rows of three, a pixel apart.
        (17, 26)
    """
    n, height, width, channels = pictures.shape
    rows = -(-n // columns)
    grid = np.full([rows * (height + 1) - 1, columns * (width + 1) - 1, channels], 0.5)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        grid[top : top + height, left : left + width] = picture
    axes.imshow(np.clip(grid if channels == 3 else grid[..., 0], 0, 1), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[], title=title)


def draw_confusion(axes: Any, matrix: np.ndarray, class_names: Sequence[str], *, title: str = "") -> None:
    """Draws a confusion matrix.

    Args:
        axes: Of matplotlib.
        matrix: Of shape `[classes, classes]`: how many examples of each class (row) were taken for each class (column).
        class_names: The names of the classes.
        title: Of the matrix.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_confusion(axes, np.eye(2, dtype=int), ["no", "yes"])
        >>> [text.get_text() for text in axes.texts]
        ['1', '0', '0', '1']
    """
    matrix = np.asarray(matrix)
    axes.imshow(matrix, cmap="Blues", vmin=0)
    for (row, column), count in np.ndenumerate(matrix):
        color = "white" if count > matrix.max() / 2 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    places = range(len(class_names))
    axes.set(xticks=places, xticklabels=class_names, yticks=places, yticklabels=class_names, title=title)
    axes.set(xlabel="predicted class", ylabel="true class (examples)")
