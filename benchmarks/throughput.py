"""What `Throughput` adds to each step: `python -m benchmarks.throughput`.

A step that does nothing but read a number runs with and without the operations that measure, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.step_clock import StepClock

_STEPS = 500


def added_seconds(repeats: int = 21) -> float:
    """Returns the time that the operations which measure add to a step: the median over pairs of runs.

    Args:
        repeats: The number of pairs.
    """
    clock = StepClock()

    @tf.function(autograph=False)
    def step(iterator: Any) -> Any:
        return iterator.get_next()

    def seconds_of_a_step(watch: Callable[[Any], Any]) -> float:
        iterator = iter(tf.data.Dataset.range(_STEPS + 1))
        step(watch(iterator))
        start = time.perf_counter()
        for _ in range(_STEPS):
            step(watch(iterator))
        return (time.perf_counter() - start) / _STEPS

    pairs = [(seconds_of_a_step(clock.watching), seconds_of_a_step(lambda iterator: iterator)) for _ in range(repeats)]
    return statistics.median(measured - plain for measured, plain in pairs)


if __name__ == "__main__":
    added = added_seconds()
    print(f"Throughput adds {1e6 * added:.0f} microseconds to a step: 0.5 % of a step of {1e3 * added / 0.005:.1f} ms.")
