"""Makes Keras 3 work under the strategies of this package; the only room that touches Keras's internals.

Importing it replaces the few Keras methods that decide how replicas work together. Under any other strategy, and under
none, each of them does what Keras wrote.
"""

import keras
from packaging.version import Version

from tfrep_strategy.errors import UnsupportedVersionError

MINIMUM_KERAS = "3.13"

if Version(keras.__version__) < Version(MINIMUM_KERAS):
    raise UnsupportedVersionError(
        f"tfrep_strategy needs Keras {MINIMUM_KERAS} or newer. Received: keras {keras.__version__}\n"
        f"Hint: pip install --upgrade 'keras>={MINIMUM_KERAS}'"
    )
if keras.backend.backend() != "tensorflow":
    raise UnsupportedVersionError(
        f"tfrep_strategy works with Keras's TensorFlow backend. Received: backend={keras.backend.backend()!r}\n"
        "Hint: set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from tfrep_strategy.keras_integration import (  # noqa: E402
    batch_callbacks,
    callbacks,
    dataset_creator,
    downloads,
    empty_parts,
    layers,
    losses,
    made_in_scope,
    metrics,
    optimizer,
    parameter_server,
    partitioned,
    placement,
    saving,
    server_optimizers,
    server_state,
    session,
    stateful_rnn,
    thread_state,
    trainer,
    whole_batch,
)

__all__ = [
    "batch_callbacks",
    "callbacks",
    "dataset_creator",
    "downloads",
    "empty_parts",
    "layers",
    "losses",
    "made_in_scope",
    "metrics",
    "optimizer",
    "parameter_server",
    "partitioned",
    "placement",
    "saving",
    "server_optimizers",
    "server_state",
    "session",
    "stateful_rnn",
    "thread_state",
    "trainer",
    "whole_batch",
]
