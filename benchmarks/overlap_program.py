"""The program of `benchmarks.overlap`: a net whose gradients fill many buckets, as users write it."""

import sys

import keras
import numpy as np

import tfrep_strategy as tfrep


def main() -> None:
    """Trains for twelve steps. The first argument is the size of buckets in bytes, or "measured"."""
    given = sys.argv[1]
    strategy = tfrep.MultiWorkerStrategy(bucket_bytes=int(given) if given.isdigit() else given)
    with strategy.scope():
        hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(8)]
        model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12 * 512, 1024), np.float32), rng.integers(10, size=12 * 512)
    model.fit(x, y, batch_size=512, verbose=0)


if __name__ == "__main__":
    main()
