"""The program of `benchmarks.startup`: it says when it has begun and when it has made a step, and waits to be counted."""

import json
import sys
import time
from pathlib import Path


def _reached(folder: Path, what: str, rank: int) -> None:
    """Says that something is done, and waits until the CPU time of all processes is counted."""
    path = folder / f"{what}{rank}"
    path.with_suffix(".new").write_text(json.dumps(time.monotonic()), "utf-8")
    path.with_suffix(".new").rename(path)
    while not (folder / f"{what}-counted").exists():
        time.sleep(0.005)


def main() -> None:
    """Trains a small network for one step, as users write it."""
    import keras
    import numpy as np

    import tfrep_strategy as tfrep

    folder, rank = Path(sys.argv[1]), tfrep.MultiWorkerStrategy().rank
    _reached(folder, "line", rank)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.fit(np.zeros([64, 28, 28, 1], "float32"), np.zeros([64], "int64"), batch_size=64, verbose=0)
    _reached(folder, "step", rank)


if __name__ == "__main__":
    main()
