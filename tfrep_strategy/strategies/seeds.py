"""Shares one random state between all processes, so that they shuffle alike and draw the same numbers outside a step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import (
    NO_SEED,
    operations_seeded,
    random_state,
    set_random_state,
    shuffle_seeds,
    unordered_operations,
)
from tfrep_strategy.communicators import Communicator
from tfrep_strategy.errors import ConfigurationError, message

_GOLDEN = 0x9E3779B1
_thread = threading.local()
_drawn_seed = 0  # The seed of random operations in a step, if the user set none.


def share_random_state(communicator: Communicator, digest: bytes = b"") -> list[bytes]:
    """Gives Python's, NumPy's and TensorFlow's random generators the state of rank 0.

    Rank 0's state does not change, so that a seeded run draws the numbers of one device. If rank 0 has no TensorFlow seed,
    operations with their own seed draw as on one device; other operations draw random numbers, equal on all ranks.

    Args:
        communicator: The communicator of the ranks.
        digest: Bytes that this rank sends along to the others: as many on all ranks, and a multiple of four.

    Returns:
        The digest of each rank.
    """
    global _drawn_seed
    if communicator.size == 1:
        return [digest]
    if random_state()[0] is None and communicator.rank == 0:
        set_random_state(NO_SEED, random.Random().getstate())
    states = random.getstate(), np.random.get_state(), random_state()
    own = hashlib.blake2b(pickle.dumps(states), digest_size=16).digest()
    drawn = random.SystemRandom().randrange(2**31).to_bytes(4, sys.byteorder)
    rows = communicator.all_gather_equal(tf.constant(np.frombuffer(own + drawn + digest, np.int32)[np.newaxis])).numpy()
    told = [row.tobytes() for row in rows]
    _drawn_seed = int.from_bytes(told[0][16:20], sys.byteorder)
    if any(row[:16] != told[0][:16] for row in told):  # At first. Ranks that draw alike have the same states later.
        python_state, numpy_state, tensorflow_state = communicator.broadcast_object(states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_random_state(*tensorflow_state)
    return [row[20:] for row in told]


def check_order(dataset: tf.data.Dataset, communicator: Communicator) -> None:
    """Refuses a data set whose elements would come in different orders on the ranks.

    Args:
        dataset: A data set.
        communicator: The communicator of the ranks.

    Raises:
        ConfigurationError: It shuffles with different seeds on the ranks, or was made with `deterministic=False`.
    """
    seeds = communicator.all_gather_object(shuffle_seeds(dataset))
    for rank, other in enumerate(seeds):
        if other != seeds[0] or (0, 0) in other:
            raise ConfigurationError(
                message(
                    "The ranks would shuffle this data set in different orders and miss examples.",
                    hint="make the strategy before the data set, or use the same shuffle(..., seed=...) on all ranks.",
                    **{"rank_0": seeds[0], f"rank_{rank}": other},
                )
            )
    unordered = unordered_operations(dataset)
    if unordered:
        raise ConfigurationError(
            message(
                "The ranks would read this data set in different orders and miss examples.",
                hint="remove deterministic=False.",
                operations=unordered,
            )
        )


@contextlib.contextmanager
def own_random_operations(rank: int) -> Iterator[None]:
    """Makes TensorFlow's random operations draw different numbers on each rank. Rank 0 draws the numbers of one device.

    Args:
        rank: The rank of this process.
    """
    shared = random_state()[0]
    if shared == NO_SEED:
        shared = _drawn_seed
    elif rank == 0 or shared is None:
        yield
        return
    with operations_seeded((shared + rank * _GOLDEN) % 2**31):
        yield


@contextlib.contextmanager
def seeds_of_replica(replica_id: int) -> Iterator[None]:
    """Gives operations with a seed of their own, such as `tf.random.uniform(shape, seed=3)`, another one on each mirrored replica.

    Args:
        replica_id: The replica that this thread runs; the first one draws the numbers of one device.
    """
    _thread.replica_id = replica_id
    try:
        yield
    finally:
        del _thread.replica_id


def with_seeds_of_replica(get_seed: Callable[[int | None], tuple[int | None, int | None]]) -> Callable[[int | None], object]:
    """Returns what chooses the seeds of an operation, in a replica too."""

    @functools.wraps(get_seed)
    def seeds_of_operation(op_seed: int | None) -> tuple[int | None, int | None]:
        of_all, of_operation = get_seed(op_seed)
        replica_id = getattr(_thread, "replica_id", 0)
        if not replica_id or op_seed is None or of_all is None:  # Without a seed, operations are numbered in one order.
            return of_all, of_operation
        return (of_all + replica_id * _GOLDEN) % 2**31, of_operation

    return seeds_of_operation
