"""MPI's collectives, through `mpi4py`: for ranks that `mpirun` or `srun --mpi` started, without a build of Horovod."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tfrep_strategy.communicators.base import Arrays, Communicator, HostCommunicator
from tfrep_strategy.communicators.wire import from_ordered_array, to_ordered_array
from tfrep_strategy.core.limits import timeout_seconds
from tfrep_strategy.errors import ConfigurationError, PeerError, install_hint, message

_SPIN_SECONDS, _SLEEP_SECONDS = 0.002, 0.0002
"""The time in which a wait polls without a pause, and its pauses afterwards. Ranks may share cores."""


class MpiCommunicator(HostCommunicator):
    """Runs collectives over MPI, on the CPU. Tensors of a GPU are copied.

    Waits poll MPI, and do not block in it, so that `abort` can end them.

    Args:
        environment: Provides `local_rank` and `local_size`. MPI itself knows the rank and the size.
        group: An `mpi4py.MPI.Comm`, for a subgroup. Default: a copy of MPI's world, so that the program's own messages do not
            interfere.

    Raises:
        ConfigurationError: `mpi4py` is not installed, finds no MPI, or was started for one thread only.
        PeerError: Not all ranks make the communicator in time.
    """

    name = "mpi"
    _aborted: ClassVar[str] = ""
    """The reason for which waits end, for all communicators of this process."""
    _unfinished: ClassVar[list[Any]] = []
    """Abandoned requests. MPI may still write to their memory."""

    def __init__(self, environment: Any, group: Any = None) -> None:
        self._mpi = mpi = loaded_mpi()
        if group is None:
            group, request = mpi.COMM_WORLD.Idup()
            late = f"Not all {mpi.COMM_WORLD.size} ranks of MPI have made the communicator."
            self._finish([request], within=timeout_seconds(), late=late)
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._ops = {"sum": mpi.SUM, "mean": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD}

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        # Only the members call it, so it does not wait for others.
        return MpiCommunicator(self, self._group.Create_group(self._group.Get_group().Incl(ranks)))

    def abort(self, reason: str) -> None:
        MpiCommunicator._aborted = reason

    def reduce_arrays(self, arrays: Arrays, op: str) -> Arrays:
        sent = [to_ordered_array(array, op) for array in arrays]  # MPI's own reductions may lose NaN, or reorder 0.0 and -0.0.
        results = [np.empty_like(array) for array in sent]
        self._finish([self._group.Iallreduce(*pair, self._ops[op]) for pair in zip(sent, results, strict=True)])
        return [from_ordered_array(result, array.dtype, op) for result, array in zip(results, arrays, strict=True)]

    def gather_array(self, array: np.ndarray) -> np.ndarray:
        rows = np.empty(self.size, np.int64)
        self._finish([self._group.Iallgather(np.array([len(array)], np.int64), rows)])
        result = np.empty((rows.sum(), *array.shape[1:]), array.dtype)
        if _width(array):
            with self._row_of(array) as row:
                self._finish([self._group.Iallgatherv([_bytes(array), len(array), row], [_bytes(result), rows, row])])
        return result

    def scatter_array(self, array: np.ndarray, rows: Sequence[int], op: str) -> np.ndarray:
        sent = to_ordered_array(array, op)
        result = np.empty((rows[self.rank], *array.shape[1:]), sent.dtype)
        if _width(array):
            self._finish([self._group.Ireduce_scatter(sent, result, [_width(array) * own for own in rows], self._ops[op])])
        return from_ordered_array(result, array.dtype, op)

    def exchange_rows(self, array: np.ndarray, splits: np.ndarray) -> Arrays:
        counts = np.empty(self.size, np.int32)
        self._finish([self._group.Ialltoall(splits, counts)])
        result = np.empty((counts.sum(), *array.shape[1:]), array.dtype)
        if _width(array):
            with self._row_of(array) as row:
                self._finish([self._group.Ialltoallv([_bytes(array), splits, row], [_bytes(result), counts, row])])
        return [result, counts]

    def broadcast_arrays(self, arrays: Arrays, root: int) -> Arrays:
        results = [array.copy() for array in arrays]
        pieces = [flat[i : i + _PIECE] for flat in map(_bytes, results) for i in range(0, len(flat), _PIECE)]
        self._finish([self._group.Ibcast(piece, root) for piece in pieces])
        return results

    @contextlib.contextmanager
    def _row_of(self, array: np.ndarray) -> Iterator[Any]:
        """Yields MPI's type for a row of an array. The array may exceed 2 GiB."""
        row = self._mpi.BYTE.Create_contiguous(array.itemsize * _width(array)).Commit()
        try:
            yield row
        finally:
            row.Free()

    def _finish(self, requests: list[Any], within: float = float("inf"), late: str = "") -> None:
        start = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            waited = time.monotonic() - start
            if self._aborted or waited > within:
                self._give_up(requests)
                raise PeerError(self._aborted or late)
            time.sleep(_SLEEP_SECONDS if waited > _SPIN_SECONDS else 0)

    def _give_up(self, requests: list[Any]) -> None:
        from mpi4py.run import set_abort_status

        self._unfinished.append(requests)
        set_abort_status(1)  # At its end this process would wait for the others, which may wait for it.


def _width(array: np.ndarray) -> int:
    return math.prod(array.shape[1:])


_PIECE = 1 << 30
"""The number of bytes in one broadcast: MPI counts in 32 bits."""


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def loaded_mpi() -> Any:
    """Loads MPI, which starts it if the program has not.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        ConfigurationError: `mpi4py` is not installed, finds no MPI, or was started for one thread only.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            message(
                f"mpi4py does not load: {error}",
                hint=f"{install_hint('mpi')}; the library of an MPI has to be installed, too.",
                code="TFREP-E005",
                communicator="mpi",
            )
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigurationError(
            message(
                "MPI was started for one thread only, and TensorFlow has several.",
                hint="do not set mpi4py.rc.threads or mpi4py.rc.thread_level.",
                thread_level=MPI.Query_thread(),
            )
        )
    return MPI
