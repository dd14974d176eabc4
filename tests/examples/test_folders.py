"""Folders of pictures, written and listed; and whether one can learn from them."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.examples.folders import list_image_folder, write_image_folder
from tfrep_strategy.examples.pictures import LAYERS, RETINA, SHAPES

pytestmark = pytest.mark.lane("quick")


@pytest.mark.parametrize("painters", [SHAPES, LAYERS, RETINA], ids=["shapes", "layers", "retina"])
def test_what_is_written_is_listed_and_decoded(tmp_path, painters):
    folder = list_image_folder(write_image_folder(tmp_path / "new" / "set", painters, per_class=3, size=40))
    assert folder.class_names == sorted(painters)
    assert folder.labels.tolist() == [label for label in range(len(painters)) for _ in range(3)]
    pictures = np.stack([tf.io.decode_jpeg(tf.io.read_file(path)) for path in folder.paths])
    assert pictures.shape == (3 * len(painters), 40, 40, 3)
    assert pictures.std(axis=(1, 2, 3)).min() > 5  # Something is on each of them.
    assert len({picture.tobytes() for picture in pictures}) == len(pictures)
    for path, label in zip(folder.paths, folder.labels, strict=True):
        assert Path(path).parent.name == folder.class_names[label]


def test_a_seed_gives_the_same_pictures(tmp_path):
    def written(name, seed):
        folder = write_image_folder(tmp_path / name, SHAPES, per_class=1, size=16, seed=seed)
        return [Path(path).read_bytes() for path in list_image_folder(folder).paths]

    assert written("a", 1) == written("b", 1)
    assert written("a", 1) != written("c", 2)


@pytest.mark.lane("notebooks")
def test_retinas_take_some_learning():
    """Brightness does not tell the classes apart, and a small network does."""
    random = np.random.default_rng(0)
    labels = np.arange(640) % 4
    pictures = np.stack([RETINA[sorted(RETINA)[label]](random, 32) for label in labels])[..., :1]
    brightness = pictures.mean(axis=(1, 2, 3))
    means = np.array([brightness[:480][labels[:480] == label].mean() for label in range(4)])
    assert np.mean(abs(brightness[480:, None] - means).argmin(1) == labels[480:]) < 0.5
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((32, 32, 1)), layers.Conv2D(16, 3, strides=2, activation="relu"), layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2), layers.Conv2D(32, 3, activation="relu"), layers.Flatten(), layers.Dense(4),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    model.fit(pictures[:480], labels[:480], batch_size=32, epochs=20, verbose=0)
    assert model.evaluate(pictures[480:], labels[480:], verbose=0)[1] > 0.6


def test_a_folder_without_classes(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match="no folders of classes"):
            list_image_folder(folder)


def test_an_empty_class(tmp_path):
    write_image_folder(tmp_path, SHAPES, per_class=1, size=8)
    (tmp_path / "hexagon").mkdir()
    with pytest.raises(ConfigurationError, match="A class has no pictures.*hexagon"):
        list_image_folder(tmp_path)


def test_a_file_that_is_no_picture(tmp_path):
    write_image_folder(tmp_path, SHAPES, per_class=1, size=8)
    (tmp_path / "disc" / "notes.txt").write_text("Other files are no matter.", "utf-8")
    (tmp_path / "disc" / "._0.jpeg").write_text("Nor are hidden ones,", "utf-8")
    (tmp_path / ".ipynb_checkpoints").mkdir()  # and hidden folders.
    assert len(list_image_folder(tmp_path).paths) == 6
    (tmp_path / "disc" / "broken.JPG").write_text("no picture", "utf-8")
    with pytest.raises(ConfigurationError, match=r"no JPEG picture.*broken\.JPG"):
        list_image_folder(tmp_path)


def test_a_number_for_each_class(tmp_path):
    counts = {name: 1 + i for i, name in enumerate(sorted(RETINA))}
    folder = list_image_folder(write_image_folder(tmp_path, RETINA, counts, size=8))
    assert np.bincount(folder.labels).tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigurationError, match="not for these classes.*'CNV'"):
        write_image_folder(tmp_path, RETINA, {"CNV": 3}, size=8)


@pytest.mark.parametrize(
    "counts", [{"per_class": 0}, {"per_class": dict.fromkeys(SHAPES, 1) | {"disc": 0}}, {"per_class": 1, "size": 0}]
)
def test_counts_below_one(tmp_path, counts):
    with pytest.raises(ConfigurationError, match="=0"):
        write_image_folder(tmp_path, SHAPES, **counts)
