"""Values of the ranks that are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.strategies.extended import gathered


def _joined(strategy: Any) -> np.ndarray:
    """Gathers sparse rows, which are as wide on each rank as its own rows need."""
    own = [[[1.0, 0.0, 2.0]], [[0.0, 0.0, 0.0, 0.0, 3.0], [4.0, 0.0, 0.0, 0.0, 0.0]]][strategy.rank]
    joined = gathered(tf.sparse.from_dense(own), strategy.communicator)
    return tf.sparse.to_dense(joined).numpy()


def test_sparse_rows_of_other_widths(worker_pool: Any) -> None:
    for found in worker_pool("tf", 2).run(_joined):
        np.testing.assert_array_equal(found, [[1, 0, 2, 0, 0], [0, 0, 0, 0, 3], [4, 0, 0, 0, 0]])
