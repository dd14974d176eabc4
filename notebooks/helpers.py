"""The notebooks share devices, folders of pictures, a score, and plots."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

Painter = Callable[[np.random.Generator, int], np.ndarray]
"""Paints a picture, given a source of random numbers and a size: float32 of shape `[size, size, 3]`, between 0 and 1."""

_MIB_OF_A_PART = 3072
"""The memory of a replica that shares a GPU. It is enough for each notebook."""

plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})


# Devices.


def replica_devices(n: int) -> list[str]:
    """Returns the devices of `n` replicas: one GPU each, else parts of a GPU, else logical CPUs that share the cores.

    Call it before TensorFlow is used.

    Args:
        n: The number of replicas.

    Returns:
        Their names, such as `["GPU:0", "GPU:1"]`.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return tfrep.use_logical_cpus(n)
    if len(gpus) < n:
        tf.config.set_visible_devices(gpus[0], "GPU")
        part = tf.config.LogicalDeviceConfiguration(memory_limit=_MIB_OF_A_PART)
        tf.config.set_logical_device_configuration(gpus[0], [part] * n)
    return [f"GPU:{i}" for i in range(n)]


# Folders with a folder of JPEG files for each class.


class ImageFolder(NamedTuple):
    """The files of a folder.

    Attributes:
        paths: The path of each picture.
        labels: int64 of shape `[n]`: the number of its class.
        class_names: The names of the classes, in alphabetical order.
    """

    paths: list[str]
    labels: np.ndarray
    class_names: list[str]


def write_image_folder(
    folder: str | os.PathLike[str],
    painters: Mapping[str, Painter],
    per_class: int | Mapping[str, int],
    *,
    size: int = 64,
    seed: int = 0,
) -> Path:
    """Paints pictures and writes them as JPEG files, `folder/CLASS/NUMBER.jpeg`. The same seed gives the same pictures.

    Args:
        folder: Is made if it is missing.
        painters: What paints the pictures of each class, by its name, such as `SHAPES` and `RETINA` in `pictures.py`.
        per_class: How many pictures each class gets: one number, or a number for each name.
        size: Their width and height, in pixels.
        seed: Of the random numbers.
    """
    counts = dict(per_class) if isinstance(per_class, Mapping) else dict.fromkeys(painters, per_class)
    for number, (name, paint) in enumerate(sorted(painters.items())):
        random = np.random.default_rng([seed, number])
        of_class = Path(folder) / name
        of_class.mkdir(parents=True, exist_ok=True)
        for i in range(counts[name]):
            pixels = np.clip(paint(random, size), 0, 1) * 255
            keras.utils.save_img(of_class / f"{i:05}.jpeg", pixels, data_format="channels_last", scale=False)
    return Path(folder)


def list_image_folder(folder: str | os.PathLike[str]) -> ImageFolder:
    """Lists the JPEG files of a folder that has a folder for each class, in the same order everywhere.

    Raises:
        FileNotFoundError: The folder has no classes, or a class has no pictures.
    """
    classes = sorted(each for each in Path(folder).iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [sorted(each.glob("[!.]*.jp*g")) for each in classes]
    if not files or not all(files):
        raise FileNotFoundError(f"Put the JPEG files of each class into a folder of its own: {folder}/CLASS/NAME.jpeg.")
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(each) for each in files])
    return ImageFolder([str(path) for each in files for path in each], labels, [each.name for each in classes])


# A score.


def inception_score(probabilities: np.ndarray) -> float:
    """Scores samples by what a classifier sees in them: `exp(mean KL(p(class | sample) || p(class)))`.

    It is high if the classifier is sure of each sample, and sees all classes equally often.

    Args:
        probabilities: Of shape `[samples, classes]`, where each row adds up to 1.

    Returns:
        Between 1 and the number of classes.
    """
    p = np.asarray(probabilities, np.float64)
    ratio = np.divide(p, p.mean(0), out=np.ones_like(p), where=p > 0)
    return float(np.exp((p * np.log(ratio)).sum(1).mean()))


# Plots. Each function draws into axes that matplotlib has made.


def draw_curves(
    axes: Any, curves: Mapping[str, Sequence[float]], *, x: Sequence[float] | None = None, xlabel: str = "epoch", ylabel: str
) -> None:
    """Draws curves over each other. The first is the widest, so that curves that coincide are all visible."""
    for i, (name, values) in enumerate(curves.items()):
        places = range(1, len(values) + 1) if x is None else x
        axes.plot(places, values, linewidth=2.0 * (len(curves) - i), color=f"C{i}", label=name)
    if x is None:
        axes.locator_params(axis="x", integer=True)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()


def draw_bars(axes: Any, bars: Mapping[str, float], *, xlabel: str, color: str = "C0") -> None:
    """Draws horizontal bars from top to bottom, with their values."""
    drawn = axes.barh(list(bars), list(bars.values()), color=color)
    axes.bar_label(drawn, labels=[f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in bars.values()], padding=3)
    axes.margins(x=0.18)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=xlabel)
    axes.invert_yaxis()


def draw_spread(
    axes: Any,
    runs: Mapping[str, Sequence[Sequence[float]]],
    *,
    x: Sequence[float],
    xlabel: str,
    ylabel: str,
    first_color: int = 0,
) -> None:
    """Draws means over several seeds, a row of values for each, with their standard errors as bars."""
    for i, (name, rows) in enumerate(runs.items(), start=first_color):
        values = np.asarray(rows, np.float64)
        errors = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(len(x))
        axes.errorbar(x, values.mean(0), yerr=errors, marker="os^D"[i % 4], capsize=4, color=f"C{i}", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()


def draw_pictures(axes: Any, pictures: np.ndarray, *, columns: int = 8, title: str = "") -> None:
    """Draws pictures of shape `[n, height, width, 1 or 3]`, between 0 and 1, as one grid. One channel is ink on paper."""
    n, height, width, channels = pictures.shape
    rows = -(-n // columns)
    axes.grid(False)
    grid = np.full([rows * (height + 1) - 1, columns * (width + 1) - 1, channels], 0.5)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        grid[top : top + height, left : left + width] = picture
    axes.imshow(np.clip(grid if channels == 3 else grid[..., 0], 0, 1), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[], title=title)


def draw_confusion(axes: Any, matrix: np.ndarray, class_names: Sequence[str], *, title: str = "") -> None:
    """Draws how many examples of each class (row) were taken for each class (column)."""
    matrix = np.asarray(matrix)
    axes.grid(False)
    axes.imshow(matrix, cmap="Blues", vmin=0)
    for (row, column), count in np.ndenumerate(matrix):
        color = "white" if count > matrix.max() / 2 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    places = range(len(class_names))
    axes.set(xticks=places, xticklabels=class_names, yticks=places, yticklabels=class_names, title=title)
    axes.set(xlabel="predicted class", ylabel="true class (examples)")
