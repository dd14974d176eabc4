"""What the notebooks share: devices and a clock, folders of pictures, trained weights, a score, and plots."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError, message

Painter = Callable[[np.random.Generator, int], np.ndarray]
"""Paints a picture, given a source of random numbers and a size: float32 of shape `[size, size, 3]`, between 0 and 1."""


# Devices and a clock.


class EpochClock(keras.callbacks.Callback):
    """Times the epochs of `fit`, without the validation after each.

    Attributes:
        seconds: The duration of each epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = self._last_batch = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last_batch = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(self._last_batch - self._start)

    def examples_per_second(self, examples: int) -> float:
        """Returns the throughput: the median over the epochs without the first, which compiles."""
        return examples / statistics.median(self.seconds[1:])


def replica_devices(n: int) -> list[str]:
    """Returns the devices of `n` replicas: GPUs if there are enough, else logical CPUs that share the cores.

    Fewer GPUs than replicas are hidden, since all replicas need devices of one kind. Call it before TensorFlow is used.
    """
    if len(tf.config.list_physical_devices("GPU")) >= n:
        return [f"GPU:{i}" for i in range(n)]
    tf.config.set_visible_devices([], "GPU")
    return tfrep.use_logical_cpus(n)


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


# Trained weights, and a score.


def load_pretrained(
    application: Callable[..., keras.Model], weights: str | os.PathLike[str] = "imagenet", **arguments: Any
) -> keras.Model:
    """Builds a model of `keras.applications` with trained weights.

    Args:
        application: A function such as `keras.applications.VGG16`.
        weights: `"imagenet"`, which Keras fetches, or the path of a file of weights.
        **arguments: What else the function takes, such as `include_top` and `input_shape`.

    Raises:
        ConfigurationError: The weights cannot be fetched, or do not fit.
    """
    try:
        return application(weights=os.fspath(weights), **arguments)
    except Exception as error:  # Keras raises a bare Exception where it cannot fetch a file.
        hint = "fetch them where there is a network, and pass the path of the file."
        raise ConfigurationError(message("The weights cannot be fetched.", hint=hint, weights=weights)) from error


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


def draw_bars(axes: Any, bars: Mapping[str, float], *, xlabel: str = "examples per second") -> None:
    """Draws horizontal bars from top to bottom, with their values."""
    drawn = axes.barh(list(bars), list(bars.values()), color=[f"C{i}" for i in range(len(bars))])
    axes.bar_label(drawn, labels=[f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in bars.values()], padding=3)
    axes.margins(x=0.18)
    axes.set(xlabel=xlabel)
    axes.invert_yaxis()


def draw_spread(
    axes: Any, runs: Mapping[str, Sequence[Sequence[float]]], *, x: Sequence[float], xlabel: str, ylabel: str
) -> None:
    """Draws means over several seeds, a row of values for each, with their standard errors as bars."""
    for i, (name, rows) in enumerate(runs.items()):
        values = np.asarray(rows, np.float64)
        errors = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(len(x))
        axes.errorbar(x, values.mean(0), yerr=errors, marker="o", capsize=4, color=f"C{i}", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()


def draw_pictures(axes: Any, pictures: np.ndarray, *, columns: int = 8, title: str = "") -> None:
    """Draws pictures of shape `[n, height, width, 1 or 3]`, between 0 and 1, as one grid. One channel is ink on paper."""
    n, height, width, channels = pictures.shape
    rows = -(-n // columns)
    grid = np.full([rows * (height + 1) - 1, columns * (width + 1) - 1, channels], 0.5)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        grid[top : top + height, left : left + width] = picture
    axes.imshow(np.clip(grid if channels == 3 else grid[..., 0], 0, 1), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[], title=title)


def draw_confusion(axes: Any, matrix: np.ndarray, class_names: Sequence[str], *, title: str = "") -> None:
    """Draws how many examples of each class (row) were taken for each class (column)."""
    matrix = np.asarray(matrix)
    axes.imshow(matrix, cmap="Blues", vmin=0)
    for (row, column), count in np.ndenumerate(matrix):
        color = "white" if count > matrix.max() / 2 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    places = range(len(class_names))
    axes.set(xticks=places, xticklabels=class_names, yticks=places, yticklabels=class_names, title=title)
    axes.set(xlabel="predicted class", ylabel="true class (examples)")
