"""Uses the package beside a Keras of another backend."""

import keras

keras.backend.backend = lambda: "jax"
import tfrep_strategy  # noqa: E402

try:
    print(tfrep_strategy.MirroredStrategy)
except ImportError as error:
    print(str(error).replace("\n", " "))
