"""Agreement between processes that each read their own data, and the comparison of data that should be equal."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.errors import message

_OF_RANKS = ("the data of rank", "ended before that of the other ranks, so the epoch ends here for all.")


class Agreement:
    """Lets the processes agree on each step, also if some of them have no batch for it.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        sum_over_processes: Sums an int64 vector over all processes, inside a `tf.function` or eagerly.
        stop_together: Whether the data ends for all processes as soon as it ends for one, with a warning. Otherwise a process
            without data takes part with empty batches until the last process has read its data.
    """

    def __init__(self, rank: int, size: int, sum_over_processes: Callable[[tf.Tensor], tf.Tensor], stop_together: bool) -> None:
        self.rank, self.size, self.stop_together = rank, size, stop_together
        self._sum = sum_over_processes

    def has_step(self, there: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns whether this process has read the data of a step: if all stop together, a batch for each of its replicas.

        Args:
            there: For each pipeline of this process a bool scalar: whether it had another batch.

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
            alike: bool scalar, whether all its tensors have equally many rows.
            open_sizes: Sizes of the batch in other dimensions, as an int64 vector; zeros if there is no batch.

        Returns:
            The number of examples of all processes (int64 scalar), whether there is a step (bool scalar), whether the tensors of
            each batch are alike, and the largest of the open sizes.
        """
        if self.size == 1:
            return own, has_batch, alike, open_sizes
        gathered = self._gather(tf.concat([[tf.where(has_batch, own, -1), tf.cast(alike, tf.int64)], open_sizes], 0))
        there = gathered[:, 0] >= 0
        goes_on = self._all_have(there, *_OF_RANKS) if self.stop_together else tf.reduce_any(there)
        alike = tf.reduce_all(gathered[:, 1] > 0)
        return tf.reduce_sum(tf.maximum(gathered[:, 0], 0)), goes_on, alike, tf.reduce_max(gathered[:, 2:], 0)

    def all_read(self, has_batch: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Returns whether all processes have read the next batch, if each of them reads all data.

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
        """Returns whether a bool vector is true everywhere. If it is true only in some places, a warning names the others."""
        ended = tf.reshape(tf.where(tf.logical_not(has_data)), [-1])

        def stop() -> tf.Tensor:
            printed = tf.print("Warning:", before, ended, after, output_stream=sys.stderr)
            with tf.control_dependencies([] if printed is None else [printed]):
                return tf.constant(False)

        everyone, anyone = tf.reduce_all(has_data), tf.reduce_any(has_data)
        return tf.cond(everyone == anyone, lambda: everyone, stop)


_SINGLES, _RUNS, _RUN = 254, 8, 512
_TEXT = 1024
_GOLDEN = 0.6180339887498949
HINT = (
    "give all ranks the same data: each trains on its part of every batch. Usual causes: an order that follows a `set`,"
    " generators without a seed (PyTorch's, too: torch.manual_seed), `x[rank::size]`. If each rank should read its own data, use"
    ' MultiWorkerStrategy(rank_data="own"), AutoShardPolicy.OFF, or strategy.distribute_datasets_from_function. If the data'
    ' differs only by random augmentation, use rank_data="unchecked".'
)


class Leaf(NamedTuple):
    """A sample of one array.

    Attributes:
        name: Path of the array in its nest, such as `x['image']`.
        kind: Its dtype and shape, or the type of a value that is not an array.
        shape: Its shape; empty if there are no `positions`.
        positions: int64, the positions of `sample` in the flat array.
        sample: Some of its values.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    positions: Any
    sample: Any

    def update(self, digest: Any) -> None:
        """Adds this leaf to a digest of `hashlib`."""
        digest.update(f"{self.name}\0{self.kind}\0".encode())
        if isinstance(self.sample, np.ndarray) and not self.sample.dtype.hasobject:
            digest.update(np.ascontiguousarray(self.sample).tobytes())
        else:
            for value in self.sample:
                digest.update(_text(value) + b"\0")


class Fingerprint:
    """A sample of arrays whose size does not grow with them.

    Args:
        given: Nests (dicts, lists and tuples) of arrays, tensors, data frames and plain values, by name. All pipelines have
            the same fingerprint; `FirstBatch` compares their content.

    Example:
        >>> Fingerprint({"x": np.zeros(3)}).digest == Fingerprint({"x": np.zeros(3)}).digest
        True
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.leaves = [_leaf(*leaf) for name, value in given.items() for leaf in _leaves(value, name)]

    @property
    def digest(self) -> bytes:
        """A hash of all leaves, of 16 bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for leaf in self.leaves:
            leaf.update(digest)
        return digest.digest()


def difference(ranks: Sequence[Sequence[Leaf]]) -> str:
    """Describes the first difference between the ranks' data, for an error.

    Args:
        ranks: The leaves of each rank.
    """
    for leaves in itertools.zip_longest(*ranks):
        differ = [rank for rank, leaf in enumerate(leaves) if _digest(leaf) != _digest(leaves[0])]
        if differ:
            received = {f"rank_{rank}": _description(leaves[rank], leaves[0], leaves[differ[0]]) for rank in (0, differ[0])}
            name = next(leaf.name for leaf in leaves if leaf is not None)
            return message(
                f"Ranks {differ} were given other data than rank 0: {name} differs.", hint=HINT, code="TFREP-E020", **received
            )
    return message("The ranks were given different data.", hint=HINT, code="TFREP-E020")


def _digest(leaf: Leaf | None) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    if leaf is not None:
        leaf.update(digest)
    return digest.digest()


def _description(leaf: Leaf | None, first: Leaf | None, other: Leaf | None) -> str:
    if leaf is None:
        return "nothing"
    if first is None or other is None or (first.name, first.kind) != (other.name, other.kind):
        return f"{leaf.name}: {leaf.kind}"
    differs = (i for i, pair in enumerate(zip(first.sample, other.sample, strict=False)) if _text(pair[0]) != _text(pair[1]))
    index = next(differs, None)
    if index is None or not len(leaf.positions):
        return f"{leaf.name}: {leaf.sample}"
    place = [int(i) for i in np.unravel_index(int(leaf.positions[index]), leaf.shape)]
    return f"{leaf.name}{place if place else ''} = {leaf.sample[index]!s:.100}"


def _text(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return str(len(text)).encode() + text[:_TEXT]
    if isinstance(value, np.ndarray):
        return value.tobytes()[:_TEXT]
    return value.tobytes() if isinstance(value, np.generic) else repr(value)[:_TEXT].encode()


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nest with their names."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{name}[{i}]")
    elif isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        for i, part in enumerate(tf.nest.flatten(value, expand_composites=True)):
            yield f"{name} (part {i})", part
    elif hasattr(value, "nnz") and hasattr(value, "tocoo"):  # SciPy's sparse matrices.
        yield f"{name} (shape)", value.shape
        for part in ("data", "indices", "indptr", "row", "col"):
            if isinstance(getattr(value, part, None), np.ndarray):
                yield f"{name}.{part}", getattr(value, part)
    else:
        yield name, value


def _leaf(name: str, value: Any) -> Leaf:
    if tf.is_tensor(value) and not tf.is_symbolic_tensor(value):
        return _of_array(name, value, value.dtype.name, lambda at: tf.gather(tf.reshape(value, [-1]), at).numpy())
    if isinstance(value, np.ndarray):
        return _of_array(name, value, str(value.dtype), lambda at: _values(np.asarray(value), at))
    if hasattr(value, "iloc"):
        return _of_rows(name, value, f"columns {list(getattr(value, 'columns', []))[:100]} ", lambda at: value.iloc[at].to_numpy())
    if hasattr(value, "__array__") and hasattr(value, "__getitem__") and getattr(value, "shape", None):
        return _of_rows(name, value, f"{value.dtype} ", lambda at: [_row(value[int(i)]) for i in at])
    if value is None or isinstance(value, bool | int | float | str | tuple | np.generic):
        return Leaf(name, type(value).__name__, (), (), [value])
    return Leaf(name, "data of a kind that is compared when it is read", (), (), [])


def _of_array(name: str, value: Any, dtype: str, take: Callable[[np.ndarray], Any]) -> Leaf:
    shape = tuple(map(int, value.shape))
    is_text = dtype in ("object", "string")
    positions = _positions(int(np.prod(shape, dtype=np.int64)), 0 if is_text else _RUNS)
    return Leaf(name, f"{dtype} of shape {shape}", shape, positions, take(positions))


def _of_rows(name: str, value: Any, dtype: str, take: Callable[[np.ndarray], Sequence[Any]]) -> Leaf:
    """Samples a few rows of an object that may be costly to convert to an array."""
    shape = tuple(map(int, value.shape))
    positions = _positions(shape[0], 0)
    positions = positions[:: -(-len(positions) // 16) or 1]
    return Leaf(name, f"{dtype}of shape {shape}", shape[:1], positions, [_first_values(row) for row in take(positions)])


def _first_values(row: Any) -> Any:
    flat = np.atleast_1d(np.asarray(row))
    values = _values(flat, _positions(flat.size, 1))
    return repr(values.tolist()) if values.dtype.hasobject else values


def _row(row: Any) -> Any:
    return row.detach().cpu() if hasattr(row, "detach") else row  # PyTorch's tensors, which may be on a GPU.


def _values(array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    # Flattening an array that is not contiguous would copy it.
    return array.reshape(-1)[positions] if array.flags.c_contiguous else array[np.unravel_index(positions, array.shape)]


@functools.lru_cache(256)
def _positions(size: int, runs: int) -> np.ndarray:
    """Chooses positions in a flat array: single ones, without a period, and runs, for data that is mostly zero."""
    if size <= _SINGLES + runs * _RUN:
        return np.arange(size)
    parts = np.modf(np.arange(1, _SINGLES + runs + 1) * _GOLDEN)[0]
    singles = (parts[:_SINGLES] * size).astype(np.int64)
    starts = (parts[_SINGLES:] * (size - _RUN)).astype(np.int64)
    return np.concatenate([[0, size - 1], singles, (starts[:, np.newaxis] + np.arange(_RUN)).ravel()]).astype(np.int64)


class FirstBatch:
    """Records the first batch of a pipeline while it is read, and lets the ranks compare it once.

    Args:
        compare: Called with the fingerprint on every rank.
    """

    def __init__(self, compare: Callable[[Fingerprint], None]) -> None:
        self._compare: Callable[[Fingerprint], None] | None = compare
        self._noted: dict[str, Any] = {}
        self._number = 0

    def noted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a data set with the same elements that records its first batch, without reading the batch twice."""
        names: list[str] = []
        self._number += 1
        batch_name = "the first batch" if self._number == 1 else f"the first batch of data set {self._number}"

        def note(*leaves: Any) -> np.bool_:
            if self._compare is not None:
                self._noted |= zip(names, leaves, strict=True)
            return np.bool_(True)

        @tf.autograph.experimental.do_not_convert
        def passed_on(index: tf.Tensor, batch: Any) -> Any:
            leaves = [leaf for path in _leaves(batch, batch_name) for leaf in _tensors(*path)]
            names[:] = [name for name, _ in leaves]
            tensors = [tensor for _, tensor in leaves]
            tf.cond(index == 0, lambda: tf.numpy_function(note, tensors, tf.bool), lambda: tf.constant(False))
            return batch

        return dataset.enumerate().map(passed_on)

    def noted_rows(self, index: tf.Tensor, rows: tf.data.Dataset, number: tf.Tensor) -> tf.Tensor:
        """Records the first batch before its examples are batched.

        Args:
            index: int64 scalar, the number of the batch.
            rows: Its examples, which are read a second time only if `index` is 0.
            number: Any tensor that is needed for the batch.

        Returns:
            `number`, which is available after the batch has been recorded.
        """
        names: list[str] = []

        def note(row: Any, *leaves: Any) -> np.int64:
            self._noted |= {f"row {row} of {name}": leaf for name, leaf in zip(names, leaves, strict=True)}
            return np.int64(row)

        @tf.autograph.experimental.do_not_convert
        def note_row(_: Any, numbered: tuple[tf.Tensor, Any]) -> tf.Tensor:
            row, example = numbered
            leaves = [leaf for path in _leaves(example, "the first batch") for leaf in _tensors(*path)]
            names[:] = [name for name, _ in leaves]
            return tf.ensure_shape(tf.numpy_function(note, [row, *(tensor for _, tensor in leaves)], tf.int64), [])

        start = tf.constant(0, tf.int64)

        def note_once() -> tf.Tensor:
            wanted = tf.ensure_shape(tf.numpy_function(lambda: np.bool_(self._compare is not None), [], tf.bool), [])
            return tf.cond(wanted, lambda: rows.enumerate().reduce(start, note_row), lambda: start)

        done = tf.cond(index == 0, note_once, lambda: start)
        with tf.control_dependencies([done]):
            return tf.identity(number)

    @property
    def is_compared(self) -> bool:
        """Whether the ranks have compared the batch, so that it need not be recorded any more."""
        return self._compare is None

    def check(self) -> None:
        """Compares the recorded batches of the ranks on the first call. All ranks must call it.

        Raises:
            DesyncError: The batches differ.
        """
        compare, self._compare = self._compare, None
        if compare is not None:
            compare(Fingerprint(self._noted))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, tf.Tensor]]:
    for tensor in tf.nest.flatten(value, expand_composites=True):
        if tf.is_tensor(tensor) and tensor.dtype not in (tf.variant, tf.resource):
            yield name, tensor
