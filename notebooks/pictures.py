"""Painters of pictures for `write_image_folder`: simple shapes, layers with features, and cross-sections of a retina."""

from __future__ import annotations

import numpy as np
from helpers import Painter


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coordinates of the pixels, x to the right and y down, between -1 and 1."""
    line = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = np.meshgrid(line, line)
    return x, y


# Shapes: one of random place, size, turn and colours, on noise.


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    radius = np.hypot(x, y)
    if shape == "disc":
        return radius < 0.9
    if shape == "ring":
        return (radius > 0.55) & (radius < 0.95)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) < 0.75
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 0.95)
    if shape == "stripes":
        return (np.sin(9 * x) > 0) & (np.maximum(abs(x), abs(y)) < 0.9)
    return (y < 0.7) & (y > 2 * abs(x) - 0.9)  # A triangle.


def _shape(shape: str) -> Painter:
    def paint(random: np.random.Generator, size: int) -> np.ndarray:
        x, y = _grid(size)
        angle, scale = random.uniform(0, 2 * np.pi), random.uniform(0.4, 0.75)
        x, y = (x - random.uniform(-0.25, 0.25)) / scale, (y - random.uniform(-0.25, 0.25)) / scale
        x, y = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
        back, front = random.uniform(0, 0.45, 3), random.uniform(0.55, 1, 3)
        if random.uniform() < 0.5:
            back, front = front, back
        picture = np.where(_inside(shape, x, y)[..., np.newaxis], front, back)
        return (picture + random.normal(0, 0.06, picture.shape)).astype(np.float32)

    return paint


SHAPES: dict[str, Painter] = {name: _shape(name) for name in ("cross", "disc", "ring", "square", "stripes", "triangle")}
"""Six shapes, in all colours."""


# Layers: bright ones on black, and what may be in them or at their edge.


def _bump(x: np.ndarray, middle: float, width: float) -> np.ndarray:
    return np.exp(-(((x - middle) / width) ** 2))


def _layers(feature: str) -> Painter:
    def paint(random: np.random.Generator, size: int) -> np.ndarray:
        x, y = _grid(size)
        row = x[0]
        edge = random.uniform(-0.4, 0.1) + random.uniform(-0.25, 0.25) * row + random.uniform(-0.15, 0.15) * row**2
        bend = random.uniform(0.25, 0.45) * _bump(row, random.uniform(-0.6, 0.6), random.uniform(0.2, 0.35))
        edge = edge + {"hump": -bend, "dent": bend}.get(feature, 0)
        if feature == "teeth":
            for _ in range(random.integers(4, 8)):
                edge = edge - random.uniform(0.07, 0.15) * _bump(row, random.uniform(-0.9, 0.9), random.uniform(0.05, 0.1))
        depth = (y - edge) / random.uniform(0.5, 0.9)
        picture = np.where((depth > 0) & (depth < 1), 0.35 + 0.12 * np.sin(depth * random.uniform(10, 20)), 0.05)
        picture = picture + random.uniform(0.2, 0.6) * _bump(depth, 0.0, 0.07)
        for _ in range(random.integers(2, 6) if feature in ("holes", "grains") else 0):
            i, level = random.integers(size // 8, size - size // 8), random.uniform(0.2, 0.6)
            spot = _bump(np.hypot((x - row[i]) / 1.4, y - edge[i] - level * 0.6), 0, random.uniform(0.06, 0.12))
            picture = picture * (1 - 0.9 * spot) + (0.9 * spot if feature == "grains" else 0)
        picture = picture * random.uniform(0.7, 1.2) * (1 + random.normal(0, 0.25, picture.shape))
        picture = picture[::-1] if random.uniform() < 0.5 else picture
        return np.repeat(picture[..., np.newaxis], 3, axis=-1).astype(np.float32)

    return paint


LAYERS: dict[str, Painter] = {name: _layers(name) for name in ("dent", "grains", "holes", "hump", "plain", "teeth")}
"""Six features of layers, at either side. A network that tells them apart has learned something about retinas."""


# Retinas, as optical coherence tomography shows them. What differs between the classes is local.


def _retina(finding: str) -> Painter:
    def paint(random: np.random.Generator, size: int) -> np.ndarray:
        x, y = _grid(size)
        row = x[0]
        bottom = random.uniform(0.15, 0.4) + random.uniform(-0.2, 0.2) * row + random.uniform(-0.15, 0.15) * row**2
        top = bottom - random.uniform(0.55, 0.75)
        middle = random.uniform(-0.3, 0.3)
        top = top + random.uniform(0.15, 0.3) * _bump(row, middle, 0.25)  # The fovea, a dip.
        lesions = random.integers(2, 6)
        if finding == "DRUSEN":  # Small bumps under the lowest layer.
            for _ in range(lesions + 2):
                bottom = bottom - random.uniform(0.07, 0.15) * _bump(row, random.uniform(-0.9, 0.9), random.uniform(0.05, 0.1))
        if finding == "CNV":  # A large one, which lifts the layer.
            place = random.uniform(-0.5, 0.5)
            bottom = bottom - random.uniform(0.25, 0.4) * _bump(row, place, random.uniform(0.2, 0.35))
            top = top - random.uniform(0.05, 0.2) * _bump(row, place, 0.4)
        depth = (y - top) / np.maximum(bottom - top, 0.05)
        picture = np.where((depth > 0) & (depth < 1), 0.35 + 0.12 * np.sin(depth * random.uniform(14, 18)), 0.05)
        picture = picture + 0.5 * _bump(depth, 1.0, 0.07) + 0.15 * _bump(depth, 0.03, 0.05)
        picture = picture + np.where(depth > 1, 0.25 * np.exp(-2.5 * (depth - 1)), 0)
        if finding == "DME":  # Dark cysts between the layers.
            for _ in range(lesions):
                i, level = random.integers(size // 8, size - size // 8), random.uniform(0.35, 0.7)
                centre = top[i] + level * (bottom[i] - top[i])
                cyst = _bump(np.hypot((x - row[i]) / 1.4, y - centre), 0, random.uniform(0.06, 0.12))
                picture = picture * (1 - 0.9 * cyst)
        picture = picture * random.uniform(0.7, 1.2) * (1 + random.normal(0, 0.25, picture.shape))  # Speckle.
        return np.repeat(picture[..., np.newaxis], 3, axis=-1).astype(np.float32)

    return paint


RETINA: dict[str, Painter] = {name: _retina(name) for name in ("CNV", "DME", "DRUSEN", "NORMAL")}
"""Invented cross-sections, with the classes of the retinal OCT set of Kermany et al. They are no medical data."""
