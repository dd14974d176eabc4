"""Folders with a folder of JPEG files for each class: made on the spot, and listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from tfrep_strategy.errors import ConfigurationError, check_count, message

Painter = Callable[[np.random.Generator, int], np.ndarray]
"""Paints a picture, given a source of random numbers and a size: float32 of shape `[size, size, 3]`, between 0 and 1."""

_JPEG_MARK = b"\xff\xd8\xff"
_SUFFIXES = {".jpg", ".jpeg"}


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
    """Paints pictures and writes them as JPEG files, `folder/CLASS/NUMBER.jpeg`.

    Args:
        folder: Is made if it is missing.
        painters: What paints the pictures of each class, by its name, such as `SHAPES` and `RETINA` in `pictures.py`.
        per_class: How many pictures each class gets: one number, or a number for each name.
        size: Their width and height, in pixels.
        seed: The same seed gives the same pictures.

    Returns:
        The folder.

    Raises:
        ConfigurationError: `size` or a number of `per_class` is below 1, or its names are not those of the painters.

    Example:
        >>> grey = lambda random, size: np.full([size, size, 3], random.uniform(), "float32")
        >>> list_image_folder(write_image_folder("greys", {"grey": grey}, per_class=2, size=8)).labels.tolist()
        [0, 0]
    """
    counts = dict(per_class) if isinstance(per_class, Mapping) else dict.fromkeys(painters, per_class)
    if set(counts) != set(painters):
        hint = f"give a number for each of {sorted(painters)}."
        raise ConfigurationError(message("The numbers are not for these classes.", hint=hint, per_class=per_class))
    for count in counts.values():
        check_count("Each class needs at least one picture.", per_class=count)
    check_count("A picture has at least one pixel.", size=size)
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

    Args:
        folder: The folder, on which all processes of a run must agree.

    Returns:
        Paths, labels and the names of the classes.

    Raises:
        ConfigurationError: The folder has no classes, a class has no pictures, or a file is no JPEG picture.

    Example:
        >>> list_image_folder("no such folder")
        Traceback (most recent call last):
            ...
        tfrep_strategy.errors.ConfigurationError: The folder has no folders of classes. Received: folder='no such folder'
        Hint: put the pictures of each class into a folder of its own: FOLDER/CLASS/NAME.jpeg.
    """
    root = Path(folder)
    classes = sorted(each for each in root.iterdir() if _is_meant(each) and each.is_dir()) if root.is_dir() else []
    if not classes:
        hint = "put the pictures of each class into a folder of its own: FOLDER/CLASS/NAME.jpeg."
        raise ConfigurationError(message("The folder has no folders of classes.", hint=hint, folder=str(folder)))
    paths: list[str] = []
    labels: list[int] = []
    for label, of_class in enumerate(classes):
        files = sorted(path for path in of_class.iterdir() if _is_meant(path) and path.suffix.lower() in _SUFFIXES)
        if not files:
            hint = "add JPEG files, or remove the folder."
            raise ConfigurationError(message("A class has no pictures.", hint=hint, folder=str(of_class)))
        for path in files:
            with path.open("rb") as file:
                if file.read(len(_JPEG_MARK)) != _JPEG_MARK:
                    hint = "remove the file, or convert it."
                    raise ConfigurationError(message("A file is no JPEG picture.", hint=hint, file=str(path)))
        paths += map(str, files)
        labels += [label] * len(files)
    return ImageFolder(paths, np.asarray(labels, np.int64), [each.name for each in classes])


def _is_meant(path: Path) -> bool:
    return not path.name.startswith(".")  # File managers and Jupyter leave hidden ones.
