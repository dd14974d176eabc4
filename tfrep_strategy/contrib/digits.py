"""A small data set of handwritten digits, for the demo, the tests, the notebooks and the benchmarks."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import numpy as np

_TEST_EXAMPLES = 360
_BRIGHTEST = 16


class Examples(NamedTuple):
    """Images of digits and their labels.

    Attributes:
        images: float32 of shape `[n, 8, 8, 1]`, between 0 (paper) and 1 (ink).
        labels: int64 of shape `[n]`, the digits 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray


def load_digits() -> tuple[Examples, Examples]:
    """Loads the UCI "optical recognition of handwritten digits" set that comes with the package.

    Returns:
        1,437 training examples, and the last 360 as test examples, in the order of the source. `digits.txt`, beside this file,
        names the source and the licence.

    Example:
        >>> train, test = load_digits()
        >>> train.images.shape, test.labels[:4].tolist()
        ((1437, 8, 8, 1), [2, 3, 4, 5])
    """
    with (files("tfrep_strategy") / "contrib" / "digits.npz").open("rb") as file, np.load(file) as archive:
        images = archive["images"][..., np.newaxis].astype(np.float32) / _BRIGHTEST
        labels = archive["labels"].astype(np.int64)
    return (
        Examples(images[:-_TEST_EXAMPLES], labels[:-_TEST_EXAMPLES]),
        Examples(images[-_TEST_EXAMPLES:], labels[-_TEST_EXAMPLES:]),
    )
