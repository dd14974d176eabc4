"""What Keras code asks of a strategy, and what a replica knows while Keras drives it, such as its share of the batch.

`keras_integration` knows strategies through this module alone, so that strategies import it and not the other way round.

The rule by which the values of the replicas make up the value of one device.
One device computes the mean over the `n` examples of a batch. Replica r has `n_r` of them, and computes the mean over these. Its
*share* is `share_r = n_r / n`, and

    value of one device = sum over replicas of share_r * value of replica r

This holds however the batch is cut. A replica without examples has a share of 0 and adds nothing, even if its own mean is 0/0.
The rule holds for all that is linear in means over examples: losses, gradients and logs.
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
    """The part of a batch's examples that a replica has, with the forms that the rule takes.

    Make it with `of_batch` or `equal`.

    Attributes:
        value: float32 scalar between 0 and 1.

    Example:
        >>> uneven = [Share.of_batch(tf.constant(n, tf.int64), tf.constant(4, tf.int64)) for n in (3, 1, 0)]
        >>> means = [tf.constant(2.0), tf.constant(6.0), tf.constant(float("nan"))]
        >>> sum(float(share.weigh(mean)) for share, mean in zip(uneven, means))
        3.0
    """

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value

    @classmethod
    def of_batch(cls, num_examples: tf.Tensor, total: tf.Tensor) -> Share:
        """Makes the share of a replica. What is known while a step is traced costs no operations in it.

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
        """Makes the share of replicas that have as many examples each, such as the whole batch."""
        return cls(tf.constant(1 / num_replicas))

    # The rule.

    def weigh(self, value: Gradient) -> Gradient:
        """Multiplies a mean over the replica's examples, or a gradient of one, by the share. The sum over replicas is global.

        Args:
            value: A floating or complex `tf.Tensor`, `tf.IndexedSlices` or None.

        Returns:
            A value of the same type, dtype and shape. With a share of 0 it is 0, even if the given one is not finite.
        """
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weigh(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.multiply_no_nan, value, self.value)

    def as_weight(self, dtype: Any) -> tf.Tensor:
        """Returns the share as the weight of a value in a weighted mean, as metrics compute it."""
        return tf.cast(self.value, dtype)

    # What follows from it where a value is weighed later.

    def unweigh(self, value: Gradient) -> Gradient:
        """Divides a part of a global sum by the share, so that weighing it leaves the part. The quotient by 0 is 0."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.unweigh(value.values), value.indices, value.dense_shape)
        return _rounded_once(tf.math.divide_no_nan, value, self.value)

    def through(self, send: Callable[[list[tf.Tensor]], list[tf.Tensor]], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends gradients back through a collective, in a step that weighs its gradients after backward.

        A gradient that flows back through a collective comes from the loss of another replica. It has the share of the replica
        that it comes from, and will be multiplied by that of the replica where it arrives.

        Args:
            send: The collective's gradient, which brings the tensors of this replica to others, and theirs here.
            gradients: The gradients of this replica's results of the collective.

        Returns:
            The gradients of what this replica gave to the collective.
        """
        arrived = send([self.weigh(gradient) for gradient in gradients])
        return [self.unweigh(gradient) for gradient in arrived]

    # Where there are no examples.

    def silenced(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns values, or zeros for a replica without examples, whose means over nothing are NaN."""
        if not values:
            return []
        has_examples = self.value > 0
        return [tf.where(has_examples, value, tf.zeros_like(value)) for value in values]


def _rounded_once(operation: Callable[..., tf.Tensor], tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Computes 16-bit floats in float32, since a share of 1/3 has an error of 0.2 percent in bfloat16.

    Moreover, TensorFlow has no `multiply_no_nan` of bfloat16 on GPUs, and would copy the tensor to the CPU.
    """
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(operation(tf.cast(tensor, tf.float32), weight), tensor.dtype)
    return operation(tensor, tf.cast(weight, tensor.dtype))


class Shards(NamedTuple):
    """One global batch, cut for the replicas of this process.

    Attributes:
        parts: One batch (any nest of tensors) for each replica of this process, in replica order.
        total: int64 scalar, how many examples the global batch has over all replicas.
        alike: bool scalar, whether all tensors of the global batch that are no scalars have one number of rows.
    """

    parts: tuple[Any, ...]
    total: tf.Tensor
    alike: tf.Tensor


class KnownRows(NamedTuple):
    """What is known of the rows of global batches before one is read. All processes have to know the same.

    Attributes:
        alike: Whether all tensors of a batch have one number of rows; None if its `Shards` tell.
        total: How many rows each batch has; None if batches differ, or nobody knows.
        are_even: Whether each replica has the part of a batch that `batches.bounds` tells, so that all know where it begins.
        are_apart: Whether replicas read batches of their own whose tensors may have other numbers of rows, so that nothing of them
            belongs together: there is no global batch.
    """

    alike: bool | None = None
    total: int | None = None
    are_even: bool = False
    are_apart: bool = False

    @staticmethod
    def common(each: Iterable[KnownRows]) -> KnownRows:
        """Returns what is known if each of these is known of some of the batches, or by one of the processes."""
        alike, totals, even, apart = map(set, zip(*each, strict=True))
        total = totals.pop() if len(totals) == 1 else None
        return KnownRows(alike.pop() if len(alike) == 1 else None, total, False not in even, True in apart)


class Whole:
    """What a step has returned that was run as one device's: results of the global batch, which nobody has to put together.

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
    """The `extended` of such a strategy, which does what Keras's users need not see."""

    keras_driver: Any
    """What Keras asks instead of doing by itself."""

    is_chief: bool
    """Whether this process writes files and draws progress bars."""

    num_local_replicas: int
    """How many replicas this process has."""

    collectives_in_branches: bool
    """Whether a replica may call collectives inside `tf.cond`, which needs one program per process."""

    def refuse_fork(self) -> None:
        """Refuses a process that was forked from the one that has made the strategy."""

    def merge_replica_state(self) -> None:
        """Makes state that every replica keeps for itself (moving statistics) one value everywhere."""

    def take_from_first(self, model: Any) -> None:
        """Gives all replicas what replica 0 has of the variables of a model, when a step has failed for want of data."""

    compiles_whole_steps: bool
    """Whether XLA may compile a whole step, because no collective is in it."""

    resumes_at: tuple[int, int]
    """How many epochs, and batches of the one after them, the next `fit` passes over: an interrupted run has done them."""

    validations_done: int
    """How many validations of the next `fit` an interrupted run has done."""

    def shard(self, batch: Any) -> Shards:
        """Cuts a whole global batch."""

    def sum_over_replicas(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas; called inside a replica."""

    def aggregate_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Makes replica gradients, which their shares have weighed, global: their sum; in a replica."""

    def bucket_bytes_for(self, tensors: Sequence[Any]) -> int:
        """Returns the size in bytes of the buckets in which gradients like these travel; in a replica."""

    def mean_over_processes(self, own_gradients: Sequence[Any]) -> list[Any]:
        """Averages gradients that every process computed outside replicas."""

    def transform_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Applies what the user wants done to the global gradients."""

    def gather_outputs(self, outputs: Any) -> Any:
        """Concatenates what the replicas returned, in replica order, on every process."""

    def kept_outputs(self, outputs: Any) -> Any:
        """Returns those rows of a batch's outputs that this process keeps until `predict` returns."""

    cut_of_new_variables: Setting[Any]
    """Of which part each replica is to hold of the variables that are made: a `sharding.Cut`, or None."""

    def own_communicator(self) -> Any:
        """Returns the communicator of the calling replica."""

    def collect_parts(self, reads: bool = True) -> None:
        """Lets single processes read variables of which every process holds a part."""

    def release_parts(self) -> None:
        """Frees what `collect_parts` has gathered."""

    def summed_at_once(self, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which reading variables that are summed over processes costs one collective for all of them."""

    def any_process(self, wish: bool) -> bool:
        """Returns whether it is true on any process. Every process has to call it."""

    def mark_state_changed(self) -> None:
        """Says that replicas have run a step since their state was merged."""

    def synchronize_new_variables(self) -> None:
        """Gives variables made since the last call the values of rank 0."""

    def acting_alone(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this process may make variables that the others do not make."""

    first_batch: Any
    """What compares the first batch of the data that is being read, until that is done; else None."""

    given_beside: dict[str, Any]
    """What the next `begin_call` compares besides its arguments."""

    notes_first_batch: bool
    """Whether data sets that are distributed now are to be compared by their first batch."""

    def known_rows(self, batch: Any) -> KnownRows:
        """Returns what is known of the rows of a batch. All processes find the same."""

    def partitioned_by(self, steps: Any, compiled: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which steps are run as one device's, by what `new_partitioned_steps` has made.

        Args:
            steps: That, or None.
            compiled: Whether XLA compiles what lies between collectives.
        """

    def new_partitioned_steps(self, builds: bool, known: KnownRows, model: Any, phase: str) -> Any:
        """Makes what runs the steps of a phase of a model, such as "train", as one device's; see `PartitionedSteps`."""

    reads_at_most: Setting[int | None]
    """How many steps will be read of the data sets that are distributed now; None where nobody knows."""

    def begin_call(self, settings: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Gives the random generators of all processes rank 0's state, and refuses arguments that differ between them."""

    def check_same(self, given: Any) -> None:
        """Refuses a `Fingerprint` that differs between the processes. Every process has to call it."""

    def shortest_epoch(self, num_batches: int) -> int:
        """Returns how many batches all processes have, given how many this one has; negative where nobody knows."""

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's picklable object on every process."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every process's picklable object, in rank order."""

    def first_with(self, values: Sequence[Any]) -> list[bool]:
        """Tells of each value whether no process before this one gives it. Every process has to call it."""

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives these Keras variables the values of rank 0."""

    def barrier(self) -> None:
        """Returns when every process has called it."""

    def watching_peers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the error of a collective says which process has ended, where one has."""

    def count_steps(self, model: Any, count: int) -> None:
        """Hears how many steps a model has done."""


_share: Setting[Share | None] = Setting(None)


def current_share() -> Share | None:
    """Returns the share of all examples that this replica's thread has in a step that weighs by examples; None outside one."""
    return _share.value


def in_step(
    strategy: KerasStrategy, step_function: Callable[[Any], Any], num_examples: Callable[[Any], tf.Tensor]
) -> Callable[[Any, tf.Tensor], Any]:
    """Wraps a step so that it knows, on each replica, which share of all examples it has."""

    def replica_step(part: Any, total: tf.Tensor) -> Any:
        share = Share.of_batch(num_examples(part), total)
        with _share.to(share):
            return step_function(part)

    return replica_step
