"""How the processes keep in step when each reads data of its own, or when nobody knows how long the data is."""

from __future__ import annotations

import sys
from collections.abc import Callable

import tensorflow as tf


class Agreement:
    """How the processes agree on a step whose batches may not be there on all of them.

    Args:
        rank: This process.
        size: How many processes there are.
        sum_over_processes: Sums one int64 vector over all processes, inside a `tf.function` or eagerly.
        stop_together: Whether pipelines of their own end for all as soon as one ends, with a warning. Otherwise those that
            have no more data take part with empty batches until the last has finished.
    """

    def __init__(
        self, rank: int, size: int, sum_over_processes: Callable[[tf.Tensor], tf.Tensor], stop_together: bool
    ) -> None:
        self.rank, self.size, self.stop_together = rank, size, stop_together
        self._sum = sum_over_processes

    def next_step(self, has_batch: tf.Tensor, own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Agrees on the next step of pipelines of their own.

        Args:
            has_batch: bool scalar, whether this process has read a batch for it. A batch may be empty.
            own: int64 scalar, how many examples this process has read for it.

        Returns:
            How many examples the step has over all (int64 scalar), and whether there is such a step (bool scalar).
        """
        if self.size == 1:
            return own, has_batch
        sizes = self._gather(tf.where(has_batch, own, -1))
        there = sizes >= 0
        goes_on = self._all_have(there) if self.stop_together else tf.reduce_any(there)
        return tf.reduce_sum(tf.maximum(sizes, 0)), goes_on

    def all_read(self, has_batch: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Returns whether the next batch of data that every process reads whole is there on all of them.

        Args:
            has_batch: bool scalar, whether this process has read one.
            own: int64 scalar, how many examples are in it.

        Returns:
            bool scalar.

        Raises:
            tf.errors.InvalidArgumentError: when it runs, where processes have read batches of different sizes.
        """
        sizes = self._gather(tf.where(has_batch, own, -1))
        one_size = tf.reduce_all((sizes == tf.reduce_max(sizes)) | (sizes < 0))
        said = "The ranks read different batches: all have to read the same data. Received: examples of each rank="
        with tf.control_dependencies([tf.debugging.Assert(one_size, [said, sizes], summarize=-1)]):
            return self._all_have(sizes >= 0)

    def _gather(self, own: tf.Tensor) -> tf.Tensor:
        return self._sum(tf.one_hot(self.rank, self.size, on_value=own, off_value=tf.constant(0, tf.int64)))

    @staticmethod
    def _all_have(has_data: tf.Tensor) -> tf.Tensor:
        """Returns whether all of a vector over the ranks is true; warns where only some of it is."""
        ended = tf.reshape(tf.where(tf.logical_not(has_data)), [-1])

        def stop() -> tf.Tensor:
            warning = tf.print("Warning: the data of rank", ended, "ended before that of the other ranks, so that the"
                               " epoch ends here for all.", output_stream=sys.stderr)  # fmt: skip
            with tf.control_dependencies([] if warning is None else [warning]):
                return tf.constant(False)

        everyone, anyone = tf.reduce_all(has_data), tf.reduce_any(has_data)
        return tf.cond(everyone == anyone, lambda: everyone, stop)
