"""One random state for all processes, so that what they draw outside a step (an order of examples) is the same."""

from __future__ import annotations

import random

import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import global_seed
from tfrep_strategy.communicators import Communicator


def share_random_state(communicator: Communicator) -> None:
    """Gives Python's, NumPy's and TensorFlow's random generators the state of rank 0.

    Rank 0's own state stays as it is, so that a seeded run draws what one device draws. Where rank 0 has no TensorFlow
    seed, all ranks get a random one.
    """
    if communicator.size == 1:
        return
    seed = global_seed()
    fresh = random.SystemRandom().randrange(2**31)
    state = random.getstate(), np.random.get_state(), fresh if seed is None else seed
    python_state, numpy_state, tensorflow_seed = communicator.broadcast_object(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if seed is None or communicator.rank != 0:
        tf.random.set_seed(tensorflow_seed)
