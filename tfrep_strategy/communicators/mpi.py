"""MPI's collectives, through `mpi4py`: for ranks that `mpirun` or `srun --mpi` started, without a build of Horovod."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.base import Communicator, carry, mean_of_sum, outside_xla, uncarry
from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.limits import timeout_seconds

_SPIN_SECONDS, _SLEEP_SECONDS = 0.002, 0.0002
"""For how long a wait asks without a pause, and its pauses afterwards. Ranks may share cores."""


class MpiCommunicator(Communicator):
    """Runs collectives over MPI, on the CPU. Tensors of a GPU are copied.

    Waits ask MPI again and again whether a collective has ended, and do not block in it. So `abort` can end them.

    Args:
        environment: Knows `local_rank` and `local_size`. MPI itself knows the rank and the others.
        group: An `mpi4py.MPI.Comm`, for a subgroup. Default: a copy of MPI's world, so that messages of the program's own cannot
            meet these.

    Raises:
        ConfigurationError: `mpi4py` is not installed, finds no MPI, or was started for one thread only.
        PeerError: Not all ranks make the communicator in time.
    """

    name = "mpi"
    _aborted: ClassVar[str] = ""
    """Why waits end, those of all communicators of this process."""
    _unfinished: ClassVar[list[Any]] = []
    """Requests that were given up. MPI may still write to the memory that they refer to."""

    def __init__(self, environment: Any, group: Any = None) -> None:
        self._mpi = mpi = _loaded()
        if group is None:
            group, request = mpi.COMM_WORLD.Idup()
            late = f"Not all {mpi.COMM_WORLD.size} ranks of MPI have made the communicator."
            self._finish([request], within=timeout_seconds(), late=late)
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._ops = {"sum": mpi.SUM, "mean": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD}

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        # MPI has no numbers of two bytes.
        wide = [tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor for tensor in tensors]
        reduced = self._call(functools.partial(self._reduce, op=op), [carry(tensor, op) for tensor in wide])
        results = []
        for tensor, carrier in zip(tensors, reduced, strict=True):
            result = mean_of_sum(carrier, self.size) if op == "mean" else carrier
            results.append(tf.ensure_shape(uncarry(result, tensor.dtype, op), tensor.shape))
        return results

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return tf.ensure_shape(self._call(self._gather, [tensor])[0], [None, *tensor.shape[1:]])

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        received = self._call(functools.partial(self._send, root=root), tensors)
        return [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(received, tensors, strict=True)]

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        # The members alone make it, and wait for nobody else.
        return MpiCommunicator(self, self._group.Create_group(self._group.Get_group().Incl(ranks)))

    def abort(self, reason: str) -> None:
        MpiCommunicator._aborted = reason

    def _call(self, talk: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds an operation that talks to the other ranks. Those of a function run in program order, unused ones too."""
        if not tensors:
            return []
        with outside_xla(), tf.device("CPU:0"):
            dtypes = [tensor.dtype for tensor in tensors]
            operation = lambda *arrays: talk([np.asarray(array, order="C") for array in arrays])  # noqa: E731
            return tf.nest.flatten(tf.numpy_function(operation, tensors, dtypes))

    def _reduce(self, arrays: list[np.ndarray], op: str) -> list[np.ndarray]:
        results = [np.empty_like(array) for array in arrays]
        pairs = list(zip(arrays, results, strict=True))
        if op in ("min", "max"):  # Which of 0.0 and -0.0 is the smaller one may depend on the order: one rank decides.
            self._finish([self._group.Ireduce(*pair, self._ops[op]) for pair in pairs])
            self._finish([self._group.Ibcast(result) for result in results])
        else:
            self._finish([self._group.Iallreduce(*pair, self._ops[op]) for pair in pairs])
        return results

    def _gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        (array,) = arrays
        rows = np.empty(self.size, np.int64)
        self._finish([self._group.Iallgather(np.array([len(array)], np.int64), rows)])
        result = np.empty((rows.sum(), *array.shape[1:]), array.dtype)
        if result.nbytes:
            row = self._mpi.BYTE.Create_contiguous(result.nbytes // len(result)).Commit()
            try:
                self._finish([self._group.Iallgatherv([_bytes(array), len(array), row], [_bytes(result), rows, row])])
            finally:
                row.Free()
        return [result]

    def _send(self, arrays: list[np.ndarray], root: int) -> list[np.ndarray]:
        results = [array.copy() for array in arrays]
        self._finish([self._group.Ibcast(_bytes(result), root) for result in results])
        return results

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


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _loaded() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            message(
                f"mpi4py does not load: {error}",
                hint="`pip install 'tfrep-strategy[mpi]'` installs it; the library of an MPI has to be installed, too.",
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
