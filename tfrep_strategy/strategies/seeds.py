"""One random state for all processes, so that what they draw outside a step (an order of examples) is the same."""

from __future__ import annotations

import random

import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import random_state, set_random_state
from tfrep_strategy.communicators import Communicator


def share_random_state(communicator: Communicator) -> None:
    """Gives Python's, NumPy's and TensorFlow's random generators the state of rank 0.

    Rank 0's own state stays as it is, so that a seeded run draws what one device draws. Where rank 0 has no TensorFlow
    seed, all ranks get a random one.
    """
    if communicator.size == 1:
        return
    if random_state()[0] is None and communicator.rank == 0:
        tf.random.set_seed(random.SystemRandom().randrange(2**31))
    states = random.getstate(), np.random.get_state(), random_state()
    python_state, numpy_state, tensorflow_state = communicator.broadcast_object(states)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    set_random_state(*tensorflow_state)


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Lists the seeds of the shuffles that a data set consists of; equal lists on all ranks mean an equal order.

    Args:
        dataset: Any data set.

    Returns:
        A pair of seeds for each `shuffle`; `(0, 0)` is one that was made without any seed, which no two ranks draw alike.
    """
    found, waiting = [], [dataset]
    while waiting:
        current = waiting.pop()
        if hasattr(current, "_seed2"):
            found.append((int(current._seed), int(current._seed2)))
        waiting.extend(current._inputs())
    return found
