"""The setting `rank_data`: either all ranks pass the same data and each takes its part, or each passes its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.data import ReplicaDataset
from tfrep_strategy.errors import DesyncError, warn
from tfrep_strategy.fingerprints import Fingerprint, FirstBatch, difference

_POLICIES = tf.data.experimental.AutoShardPolicy


def compare(communicator: Communicator, given: Fingerprint) -> None:
    """Refuses data that differs between the ranks. Every rank must call it."""
    own = np.frombuffer(given.digest, np.int32)[np.newaxis]
    refuse_difference(communicator, given, [row.tobytes() for row in communicator.all_gather_equal(tf.constant(own)).numpy()])


def refuse_difference(communicator: Communicator, given: Fingerprint, digests: Sequence[bytes]) -> None:
    """Raises a DesyncError that names the first difference, on every rank, unless all digests are equal."""
    if len(set(digests)) > 1:
        raise DesyncError(difference(communicator.all_gather_object(given.leaves)))


def shortest(sizes: Sequence[int]) -> int:
    """Returns the smallest number of batches of a rank, given the number of each; warns if the numbers differ.

    Infinite and unknown numbers are `tf.data`'s negative cardinalities. If one number is unknown, so is the result.
    """
    known = [size for size in sizes if size >= 0]
    if tf.data.UNKNOWN_CARDINALITY in sizes:
        return int(tf.data.UNKNOWN_CARDINALITY)
    if len(set(sizes)) == 1 or not known:
        return sizes[0]
    ranks = [rank for rank, size in enumerate(sizes) if size == min(known)]
    warn(
        f"The data of rank {ranks} ends after {min(known)} batches, before that of the other ranks, so an epoch ends"
        f" there for all. Received: batches={sizes}",
    )
    return min(known)


def distribute(
    strategy: Any,
    dataset: tf.data.Dataset,
    in_one_order: Callable[[tf.data.Dataset], tf.data.Dataset],
    distribute_whole: Callable[..., ReplicaDataset],
) -> ReplicaDataset:
    """Distributes a data set, of which every rank has one.

    Args:
        strategy: The strategy, with its `rank_data`.
        dataset: A data set of global batches.
        in_one_order: Returns the data set with its elements in the same order on all ranks.
        distribute_whole: Distributes the data set by its `auto_shard_policy`, and notes its first batch in `first_batch`.

    Returns:
        The distributed data set. If all ranks should read the same data, its first batch is compared.
    """
    if strategy.communicator.size == 1:
        return distribute_whole(dataset)
    if strategy.rank_data == "own":
        each_its_own = tf.data.Options()
        each_its_own.experimental_distribute.auto_shard_policy = _POLICIES.OFF
        dataset = dataset.with_options(each_its_own)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICIES.OFF:
        return distribute_whole(dataset)
    dataset = in_one_order(dataset)
    if policy == _POLICIES.FILE or strategy.rank_data == "unchecked" or not strategy.extended.notes_first_batch:
        return distribute_whole(dataset)
    return distribute_whole(dataset, first_batch=FirstBatch(strategy.extended.check_same))
