"""How many bytes of gradients travel at once.

Small buckets begin to travel early in the backward pass, and each costs a message. A bucket has the bytes that take ten times as
long as a message without any, by two short measurements on the run's own transport.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator

SMALLEST_BUCKET = 1 << 20
_LARGEST_BUCKET = 32 << 20
_PROBES = (1 << 10, 4 << 20)
"""Bytes of the short and of the long sum that are measured."""
_TURNS = 5
_MESSAGES = 10

_log = logging.getLogger(__name__)


def can_be_found(communicator: Communicator) -> bool:
    """Returns whether sums have the same bits in buckets of any size, so that two runs may take different ones."""
    return communicator.size == 2 or communicator.adds_in_order  # There is one way to add two numbers.


def bucket_for(short: float, long: float) -> int:
    """Returns the size of a bucket in bytes, a power of two from 1 to 32 MiB.

    Args:
        short: Seconds of a sum of 1 KiB.
        long: Seconds of a sum of 4 MiB.

    Example:
        >>> bucket_for(0.001, 0.005) >> 20
        8
    """
    a_byte = max(long - short, 0.0) / (_PROBES[1] - _PROBES[0])
    wanted = _MESSAGES * short / a_byte if a_byte else _LARGEST_BUCKET
    return 1 << round(math.log2(min(max(wanted, SMALLEST_BUCKET), _LARGEST_BUCKET)))


def find_bucket_bytes(communicator: Communicator, all_reduce: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]) -> int:
    """Measures sums, and returns the size of a bucket that suits the slowest rank. All ranks must call it.

    Args:
        communicator: Connects the ranks.
        all_reduce: Its sum, as a step calls it.
    """
    seconds = [_fastest(all_reduce, tf.zeros([size // tf.float32.size])) for size in _PROBES]
    (found,) = communicator.all_reduce([tf.constant(bucket_for(*seconds))], "max")
    if communicator.rank == 0:
        _log.info("Gradients travel in buckets of %d MiB. A sum of 4 MiB takes %.2f ms.", int(found) >> 20, 1e3 * seconds[1])
    return int(found)


def _fastest(all_reduce: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]], tensor: tf.Tensor) -> float:
    taken = []
    for _ in range(1 + _TURNS):  # The first one is traced.
        start = time.perf_counter()
        all_reduce([tensor])[0][0].numpy()
        taken.append(time.perf_counter() - start)
    return min(taken)
