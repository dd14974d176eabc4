"""Has no threads but those of OpenBLAS, where there are several cores."""

import numpy as np


def preload() -> None:
    np.random.random()
