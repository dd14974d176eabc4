"""Keeps the processes in step if each reads its own data, or if the length of the data is unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tensorflow as tf

_OF_RANKS = ("the data of rank", "ended before that of the other ranks, so the epoch ends here for all.")


class Agreement:
    """Lets the processes agree on each step, also if some of them have no batch for it.

    Args:
        rank: Rank of this process.
        size: How many processes there are.
        sum_over_processes: Sums an int64 vector over all processes, inside a `tf.function` or eagerly.
        stop_together: Whether the data ends for all processes as soon as it ends for one, with a warning. Otherwise a process
            without data takes part with empty batches until the last process has read its data.
    """

    def __init__(self, rank: int, size: int, sum_over_processes: Callable[[tf.Tensor], tf.Tensor], stop_together: bool) -> None:
        self.rank, self.size, self.stop_together = rank, size, stop_together
        self._sum = sum_over_processes

    def has_step(self, there: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns whether this process has read what a step needs: if all stop together, a batch for each of its replicas.

        Args:
            there: For each pipeline of this process a bool scalar, whether it had another batch.

        Returns:
            bool scalar.
        """
        if not self.stop_together:
            return tf.reduce_any(there)
        what = "the data ended in the middle of a step. The step is left out. Replicas without a batch:"
        return self._all_have(tf.stack(there), what)

    def next_step(
        self, has_batch: tf.Tensor, own: tf.Tensor, alike: tf.Tensor, open_sizes: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Agrees on the next step of processes that each read their own data.

        Args:
            has_batch: bool scalar, whether this process has read a batch for the step. A batch may be empty.
            own: int64 scalar, the number of examples in that batch.
            alike: bool scalar, whether all its tensors have as many rows.
            open_sizes: Sizes of the batch in other dimensions, as an int64 vector; zeros if there is no batch.

        Returns:
            The number of examples of all processes (int64 scalar), whether there is a step (bool scalar), whether the tensors of
            each are alike, and the largest of the open sizes.
        """
        if self.size == 1:
            return own, has_batch, alike, open_sizes
        told = self._gather(tf.concat([[tf.where(has_batch, own, -1), tf.cast(alike, tf.int64)], open_sizes], 0))
        there = told[:, 0] >= 0
        goes_on = self._all_have(there, *_OF_RANKS) if self.stop_together else tf.reduce_any(there)
        alike = tf.reduce_all(told[:, 1] > 0)
        return tf.reduce_sum(tf.maximum(told[:, 0], 0)), goes_on, alike, tf.reduce_max(told[:, 2:], 0)

    def all_read(self, has_batch: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Returns whether all processes have read the next batch of data that each of them reads whole.

        Args:
            has_batch: bool scalar, whether this process has read a batch.
            own: int64 scalar, the number of examples in it.

        Returns:
            bool scalar.

        Raises:
            tf.errors.InvalidArgumentError: The processes have read batches of different sizes. Raised when it runs.
        """
        sizes = self._gather(tf.where(has_batch, own, -1)[tf.newaxis])[:, 0]
        one_size = tf.reduce_all((sizes == tf.reduce_max(sizes)) | (sizes < 0))
        said = "The ranks read different batches: all have to read the same data. Received: examples of each rank="
        with tf.control_dependencies([tf.debugging.Assert(one_size, [said, sizes], summarize=-1)]):
            return self._all_have(sizes >= 0, *_OF_RANKS)

    def _gather(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the vectors of all ranks, one in each row."""
        rows = tf.one_hot(self.rank, self.size, dtype=tf.int64)[:, tf.newaxis] * own
        return tf.reshape(self._sum(tf.reshape(rows, [-1])), [self.size, -1])

    @staticmethod
    def _all_have(has_data: tf.Tensor, before: str, after: str = "") -> tf.Tensor:
        """Returns whether a bool vector is true everywhere; if it is true in some places only, warns and names the others."""
        ended = tf.reshape(tf.where(tf.logical_not(has_data)), [-1])

        def stop() -> tf.Tensor:
            printed = tf.print("Warning:", before, ended, after, output_stream=sys.stderr)
            with tf.control_dependencies([] if printed is None else [printed]):
                return tf.constant(False)

        everyone, anyone = tf.reduce_all(has_data), tf.reduce_any(has_data)
        return tf.cond(everyone == anyone, lambda: everyone, stop)
