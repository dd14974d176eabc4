"""The interface of a strategy for Keras code, and a replica's share of the batch while Keras drives it.

`keras_integration` knows strategies only through this module, so strategies import it and not the other way round.

The rule for combining the values of the replicas: One device computes the mean over the `n` examples of a batch. Replica r has
`n_r` of them, and computes the mean over these. Its *share* is `share_r = n_r / n`, and

    value of one device = sum over replicas of share_r * value of replica r

This holds however the batch is cut. A replica without examples has a share of 0 and adds nothing, even if its own mean is 0/0.
The rule holds for everything that is linear in means over examples: losses, gradients and logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.scoped import Setting

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


class Share:
    """A replica's part of a batch's examples, and the forms of the rule.

    Make it with `of_batch` or `equal`.

    Attributes:
        value: float32 scalar between 0 and 1.

    Example:
        >>> uneven = [Share.of_batch(tf.constant(n, tf.int64), tf.constant(4, tf.int64)) for n in (3, 1, 0)]
        >>> means = [tf.constant(2.0), tf.constant(6.0), tf.constant(float("nan"))]
        >>> sum(float(share.weighted(mean)) for share, mean in zip(uneven, means))
        3.0
    """

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value

    @classmethod
    def of_batch(cls, num_examples: tf.Tensor, total: tf.Tensor) -> Share:
        """Makes the share of a replica. Values that are known at trace time cost no operations.

        Args:
            num_examples: int64 scalar, the examples of this replica.
            total: int64 scalar, the examples of all replicas.
        """
        rows, all_rows = tf.get_static_value(num_examples), tf.get_static_value(total)
        if rows is not None and all_rows:
            return cls(tf.constant(np.float32(rows) / np.float32(all_rows)))
        return cls(tf.math.divide_no_nan(tf.cast(num_examples, tf.float32), tf.cast(total, tf.float32)))

    @classmethod
    def equal(cls, num_replicas: int) -> Share:
        """Makes the share of replicas that have equally many examples, such as the whole batch."""
        return cls(tf.constant(1 / num_replicas))

    # The rule.

    def weighted(self, value: Gradient) -> Gradient:
        """Multiplies a mean over the replica's examples, or a gradient of one, by the share. The sum over replicas is global.

        Args:
            value: A floating or complex `tf.Tensor`, `tf.IndexedSlices` or None.

        Returns:
            A value of the same type, dtype and shape. With a share of 0 it is 0, even if the given one is not finite.
        """
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weighted(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.multiply_no_nan, value, self.value)

    def as_weight(self, dtype: Any) -> tf.Tensor:
        """Returns the share as a weight in a weighted mean, as in metrics."""
        return tf.cast(self.value, dtype)

    # Consequences for values that are weighted later.

    def unweighted(self, value: Gradient) -> Gradient:
        """Divides a part of a global sum by the share, so that weighing it leaves the part. The quotient by 0 is 0."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.unweighted(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.divide_no_nan, value, self.value)

    def through(self, send: Callable[[list[tf.Tensor]], list[tf.Tensor]], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends gradients back through a collective, in a step that weights its gradients after backward.

        A gradient that flows back through a collective comes from the loss of another replica. It has the share of that
        replica, and will be multiplied by the share of this one.

        Args:
            send: The collective's gradient, which sends the tensors of this replica to others, and theirs here.
            gradients: The gradients of this replica's results of the collective.

        Returns:
            The gradients of this replica's arguments of the collective.
        """
        arrived = send([self.weighted(gradient) for gradient in gradients])
        return [self.unweighted(gradient) for gradient in arrived]

    # No examples.

    def silenced(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns values, or zeros for a replica without examples, whose means over nothing are NaN."""
        if not values:
            return []
        has_examples = self.value > 0
        return [tf.where(has_examples, value, tf.zeros_like(value)) for value in values]


def _rounded_once(operation: Callable[..., tf.Tensor], tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Computes 16-bit floats in float32, since a share of 1/3 has an error of 0.2 percent in bfloat16.

    TensorFlow also lacks `multiply_no_nan` of bfloat16 on GPUs, and would copy the tensor to the CPU.
    """
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(operation(tf.cast(tensor, tf.float32), weight), tensor.dtype)
    return operation(tensor, tf.cast(weight, tensor.dtype))


class Shards(NamedTuple):
    """One global batch, cut for the replicas of this process.

    Attributes:
        parts: One batch (any nest of tensors) for each replica of this process, in replica order.
        total: int64 scalar, the number of examples of the global batch over all replicas.
        alike: bool scalar, whether all tensors of the global batch, except scalars, have the same number of rows.
    """

    parts: tuple[Any, ...]
    total: tf.Tensor
    alike: tf.Tensor


class KnownRows(NamedTuple):
    """The rows of global batches, as far as they are known before one is read. All processes must know the same.

    Attributes:
        alike: Whether all tensors of a batch have the same number of rows; None if its `Shards` tell.
        total: The number of rows of each batch; None if batches differ, or it is unknown.
        are_even: Whether each replica has the part of a batch given by `batches.bounds`, so that all know where it begins.
        are_apart: Whether replicas read local batches whose tensors may have different numbers of rows, so that they do not form
            a global batch.
    """

    alike: bool | None = None
    total: int | None = None
    are_even: bool = False
    are_apart: bool = False

    @staticmethod
    def common(each: Iterable[KnownRows]) -> KnownRows:
        """Returns what holds for all batches, given the knowledge about some of them, or of each process."""
        alike, totals, even, apart = map(set, zip(*each, strict=True))
        total = totals.pop() if len(totals) == 1 else None
        return KnownRows(alike.pop() if len(alike) == 1 else None, total, False not in even, True in apart)


class Whole:
    """The results of a one-device step: they are those of the global batch, and need not be combined.

    Args:
        results: A nest of tensors.
    """

    def __init__(self, results: Any) -> None:
        self.results = results


class KerasStrategy(Protocol):
    """A strategy whose replicas train in step, as the Keras integration sees it."""

    num_replicas_in_sync: int
    extended: KerasExtended
    gradient_transformers: Sequence[Any]
    gradient_aggregator: Any
    shard_optimizer_state: bool
    batch_statistics: str

    def scope(self) -> Any:
        """Returns the context manager in which variables belong to this strategy."""


class KerasExtended(Protocol):
    """The `extended` of such a strategy, with methods that users do not need."""

    keras_driver: Any
    """The driver that Keras's replaced functions call."""

    is_chief: bool
    """Whether this process writes files and draws progress bars."""

    num_local_replicas: int
    """Number of replicas of this process."""

    model_size: int
    """Number of consecutive replicas that compute with the same rows of a batch, and with parts of the weights."""

    collectives_in_branches: bool
    """Whether a replica may call collectives inside `tf.cond`, which needs a separate program for each process."""

    def refuse_fork(self) -> None:
        """Refuses a process that was forked after the strategy was made."""

    def merge_replica_state(self) -> None:
        """Merges state that every replica keeps for itself (moving statistics) to one value."""

    def take_from_first(self, model: Any) -> None:
        """Copies the variables of a model from replica 0 to all, after a step has failed because data ended."""

    compiles_whole_steps: bool
    """Whether XLA may compile a whole step, because it has no collectives."""

    resumes_at: tuple[int, int]
    """The epochs, and batches of the next epoch, that the next `fit` skips because an interrupted run has done them."""

    validations_done: int
    """The number of validations of the next `fit` that an interrupted run has done."""

    def shard(self, batch: Any) -> Shards:
        """Cuts a global batch."""

    def sum_over_replicas(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas; called inside a replica."""

    def aggregate_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums gradients of replicas, weighted by their shares, to global gradients; called inside a replica."""

    def bucket_bytes_for(self, tensors: Sequence[Any]) -> int:
        """Returns the size in bytes of the buckets for such gradients; called inside a replica."""

    def mean_over_processes(self, own_gradients: Sequence[Any]) -> list[Any]:
        """Averages gradients that every process computed outside replicas."""

    def transform_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Applies the user's transformers to the global gradients."""

    def gather_outputs(self, outputs: Any) -> Any:
        """Concatenates the outputs of the replicas, in replica order, on every process."""

    def kept_outputs(self, outputs: Any) -> Any:
        """Returns the rows of a batch's outputs that this process keeps until `predict` returns."""

    cut_of_new_variables: Setting[Any]
    """The part of new variables that each replica holds: a `sharding.Cut`, or None."""

    def own_communicator(self) -> Any:
        """Returns the communicator of the calling replica."""

    def collect_parts(self, reads: bool = True) -> None:
        """Lets single processes read variables that are spread over the processes."""

    def release_parts(self) -> None:
        """Frees the values that `collect_parts` has gathered."""

    def summed_at_once(self, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which variables that are summed over processes are read with one collective for all of them."""

    def any_process(self, wish: bool) -> bool:
        """Returns whether `wish` is true on any process. Every process must call it."""

    def mark_state_changed(self) -> None:
        """Records that replicas have run a step since their state was merged."""

    def synchronize_new_variables(self) -> None:
        """Gives variables made since the last call the values of rank 0."""

    def acting_alone(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this process may make variables that the others do not make."""

    first_batch: Any
    """Compares the first batch of the data that is being read, until that is done; else None."""

    given_beside: dict[str, Any]
    """Values that the next `begin_call` compares besides its arguments."""

    notes_first_batch: bool
    """Whether data sets that are distributed now are compared by their first batch."""

    def known_rows(self, batch: Any) -> KnownRows:
        """Returns what is known about the rows of a batch. All processes get the same result."""

    def partitioned_by(self, steps: Any, compiled: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which steps run as the given partitioned steps.

        Args:
            steps: The result of `new_partitioned_steps`, or None.
            compiled: Whether XLA compiles the operations between collectives.
        """

    def new_partitioned_steps(self, builds: bool, known: KnownRows, model: Any, phase: str) -> Any:
        """Makes the `PartitionedSteps` for a phase of a model, such as "train"."""

    reads_at_most: Setting[int | None]
    """The largest number of steps that will be read of the data sets that are distributed now; None if it is unknown."""

    def begin_call(self, settings: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Gives the random generators of all processes rank 0's state, and refuses arguments that differ between them."""

    def check_same(self, given: Any) -> None:
        """Refuses a `Fingerprint` that differs between the processes. Every process must call it."""

    def shortest_epoch(self, num_batches: int) -> int:
        """Returns the number of batches of all processes, given the number of this one; negative if it is unknown."""

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's picklable object on every process."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every process's picklable object, in rank order."""

    def first_with(self, values: Sequence[Any]) -> list[bool]:
        """Returns for each value whether no process of lower rank has passed it. Every process must call it."""

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives these Keras variables the values of rank 0."""

    def barrier(self) -> None:
        """Returns once every process has called it."""

    def watching_peers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which collective errors name a process that has ended."""

    def count_steps(self, model: Any, count: int) -> None:
        """Records the number of steps that a model has done."""


_share: Setting[Share | None] = Setting(None)


def current_share() -> Share | None:
    """Returns the share of this replica's thread in a step that weights by examples; None outside one."""
    return _share.value


def in_step(
    strategy: KerasStrategy, step_function: Callable[[Any], Any], num_examples: Callable[[Any], tf.Tensor]
) -> Callable[[Any, tf.Tensor], Any]:
    """Wraps a step so that each replica knows its share of all examples."""

    def replica_step(part: Any, total: tf.Tensor) -> Any:
        share = Share.of_batch(num_examples(part), total)
        with _share.to(share):
            return step_function(part)

    return replica_step
