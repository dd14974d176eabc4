"""Checks that values are equal on all replicas, and the random state that processes share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import pickle
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.core.tf import (
    NO_SEED,
    SyncOnReadVariable,
    operations_seeded,
    random_state,
    set_random_state,
    shuffle_seeds,
    unordered_operations,
)
from tfrep_strategy.errors import ConfigurationError, DesyncError, message

_Description = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a variable."""


class Checksum(NamedTuple):
    """The checksum of one variable, which replicas compare.

    Attributes:
        name: Path of the variable.
        dtype: Name of its dtype.
        shape: Its shape.
        crc: CRC-32 of its bytes, which is compared.
        total: Sum of its elements in float64, for error messages; None for strings.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc: int
    total: float | None

    def __str__(self) -> str:
        total = "" if self.total is None else f"sum {self.total:.17g}, "
        return f"{total}crc32 {self.crc:08x}, {self.dtype}{list(self.shape)}"


def checksum(name: str, value: Any) -> Checksum:
    """Makes the checksum of one array.

    Example:
        >>> checksum("kernel", np.ones([2, 3], "float32")).total
        6.0
    """
    array = np.ascontiguousarray(value)
    if array.dtype == object:  # Strings.
        data, total = repr(array.tolist()).encode(), None
    else:
        data, total = array.tobytes(), float(array.astype(np.float64).sum())
    return Checksum(name, str(array.dtype), np.shape(value), zlib.crc32(data), total)


def variables_of(model_or_variables: Any) -> list[Any]:
    """Returns the variables of a model and its optimizer, or the given variables, each once."""
    variables = model_or_variables
    if hasattr(variables, "variables"):
        optimizer = getattr(variables, "optimizer", None)
        variables = [*variables.variables, *(optimizer.variables if optimizer is not None else ())]
    return list({id(each): each for each in variables}.values())


def of_tensorflow(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable behind a Keras variable, or the given TensorFlow variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def replica_checksums(variables: Sequence[Any], num_local_replicas: int) -> list[list[Checksum]]:
    """Makes the checksums of the copies that the replicas of this process hold.

    Args:
        variables: Keras or TensorFlow variables. Variables that each replica keeps for itself, such as the totals of
            metrics, are left out.
        num_local_replicas: Number of copies of a variable in this process.

    Returns:
        A list of the checksums of all variables, in order, for each replica of this process.
    """
    replicas: list[list[Checksum]] = [[] for _ in range(num_local_replicas)]
    for variable in variables:
        inner = of_tensorflow(variable)
        if isinstance(inner, SyncOnReadVariable):
            continue
        copies = getattr(inner, "values", None) or [inner] * num_local_replicas
        for checksums, copy in zip(replicas, copies, strict=True):
            checksums.append(checksum(getattr(variable, "path", variable.name), copy.numpy()))
    return replicas


def places_of_differing(replicas: Sequence[Sequence[Checksum]]) -> list[int]:
    """Returns the indices of variables whose checksums differ between replicas."""
    return [i for i, copies in enumerate(zip(*replicas, strict=True)) if any(copy.crc != copies[0].crc for copy in copies)]


def compare(replicas: Sequence[Sequence[Checksum]]) -> None:
    """Raises unless all replicas have the same checksums.

    Args:
        replicas: The checksums of each replica, in order of their ids.

    Raises:
        DesyncError: A variable differs. The message names the first one, and its checksum on each replica.

    Example:
        >>> compare([[checksum("w", np.ones(2))], [checksum("w", np.ones(2))]])
    """
    lengths = [len(checksums) for checksums in replicas]
    if len(set(lengths)) > 1:
        raise DesyncError(
            message(
                "Replicas hold different numbers of variables.",
                hint="build the same model on every replica.",
                code="TFREP-E022",
                held=lengths,
            )
        )
    for copies in zip(*replicas, strict=True):
        if any(copy[1:4] != copies[0][1:4] for copy in copies):
            lines = "\n".join(f"  replica {replica}: {copy}" for replica, copy in enumerate(copies))
            raise DesyncError(
                message(
                    f"Variable {copies[0].name!r} differs between the replicas.\n{lines}",
                    hint="look for code that changes it on one replica only, or with values of one replica only.",
                    code="TFREP-E022",
                )
            )


def described(variable: Any) -> _Description:
    """Returns the name, the shape and the dtype of a variable."""
    return variable.name, tuple(variable.shape), variable.dtype.name


def are_in_other_orders(ranks: Sequence[Sequence[_Description]]) -> bool:
    """Returns whether ranks made variables of the same names in different orders.

    Args:
        ranks: The descriptions of each rank's variables; see `described`.

    Raises:
        DesyncError: They made different variables. The message names the first difference.
    """
    if any(other != ranks[0] for other in ranks) and all(sorted(other) == sorted(ranks[0]) for other in ranks):
        return True
    for r, other in enumerate(ranks):
        for first, found in itertools.zip_longest(ranks[0], other):
            if first is None or found is None or first[1:] != found[1:]:
                raise DesyncError(
                    message(
                        f"Ranks 0 and {r} made different variables.",
                        hint="build the same model on every rank. Sizes from a generator without a seed are a usual cause:"
                        " write numpy.random.default_rng(0), random.Random(0).",
                        code="TFREP-E021",
                        **{"rank_0": _in_words(first), f"rank_{r}": _in_words(found)},
                    )
                )
    return False


def _in_words(variable: _Description | None) -> str:
    return "no variable" if variable is None else f"{variable[0]} of shape {variable[1]}, {variable[2]}"


_GOLDEN = 0x9E3779B1
_thread = threading.local()
_drawn_seed = 0  # The seed of random operations in a step, if the user set none.


def share_random_state(communicator: Communicator, digest: bytes = b"") -> list[bytes]:
    """Gives Python's, NumPy's and TensorFlow's random generators the state of rank 0.

    Rank 0's state does not change, so that a seeded run draws the numbers of one device. If rank 0 has no TensorFlow seed,
    operations with their own seed draw as on one device; other operations draw random numbers, equal on all ranks.

    Args:
        communicator: The communicator of the ranks.
        digest: Bytes that this rank sends to the others: equally many on all ranks, a multiple of four.

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
    gathered = [row.tobytes() for row in rows]
    _drawn_seed = int.from_bytes(gathered[0][16:20], sys.byteorder)
    if any(row[:16] != gathered[0][:16] for row in gathered):  # In the first call only: ranks that draw alike stay equal.
        python_state, numpy_state, tensorflow_state = communicator.broadcast_object(states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_random_state(*tensorflow_state)
    return [row[20:] for row in gathered]


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
                    code="TFREP-E021",
                    **{"rank_0": seeds[0], f"rank_{rank}": other},
                )
            )
    unordered = unordered_operations(dataset)
    if unordered:
        raise ConfigurationError(
            message(
                "The ranks would read this data set in different orders and miss examples.",
                hint="remove deterministic=False.",
                code="TFREP-E021",
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
    """Gives operations with their own seed, such as `tf.random.uniform(shape, seed=3)`, a different one on each mirrored replica.

    Args:
        replica_id: The replica that this thread runs; the first one draws the numbers of one device.
    """
    _thread.replica_id = replica_id
    try:
        yield
    finally:
        del _thread.replica_id


def with_seeds_of_replica(get_seed: Callable[[int | None], tuple[int | None, int | None]]) -> Callable[[int | None], object]:
    """Wraps the function that chooses the seeds of an operation, so that they differ between replicas."""

    @functools.wraps(get_seed)
    def seeds_of_operation(op_seed: int | None) -> tuple[int | None, int | None]:
        of_all, of_operation = get_seed(op_seed)
        replica_id = getattr(_thread, "replica_id", 0)
        if not replica_id or op_seed is None or of_all is None:  # Operations without a seed are numbered in one order.
            return of_all, of_operation
        return (of_all + replica_id * _GOLDEN) % 2**31, of_operation

    return seeds_of_operation
