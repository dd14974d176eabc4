"""Files of a checkpoint that all ranks write together, each its own parts.

A checkpoint is a folder. Each rank writes a file of raw bytes, and then a report: a JSON file that says which bytes of which
variables the file has. Rank 0 waits for the reports, and writes the index from them. A folder without an index is no checkpoint.

The bytes of a part are runs of equal length within the whole variable, at equal distances (`Runs`). A part along two axes may be
several of these. All ways to cut a variable have this form, so any number of replicas finds its parts in the files of any other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.sharding import Along, Owned
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.saving.training_state import places_of, variables_of_training
from tfrep_strategy.keras_integration.whole_files import require_space, synchronize, whole

_FORMAT = 2
_INDEX = "index.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")
_SECONDS_UNTIL_SEEN = 30.0
"""How long a file of another machine may take to appear after it was written."""


def _part_name(rank: int, size: int) -> str:
    return f"part-{rank:05d}-of-{size:05d}"


def _folders(folder: str) -> list[tuple[int, str]]:
    """Returns the numbers and paths of checkpoints, also of those without an index."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(found[1]), os.path.join(folder, name)) for name in names if (found := _NAME.fullmatch(name)))


def whole_ones(folder: str) -> list[str]:
    """Returns the paths of the checkpoints that have an index, the newest last."""
    return [path for _, path in _folders(folder) if os.path.exists(os.path.join(path, _INDEX))]


def new_folder(folder: str) -> str:
    """Makes the folder of the next checkpoint, and removes what killed runs have left."""
    found = _folders(folder)
    for _, path in found:
        if not os.path.exists(os.path.join(path, _INDEX)):
            shutil.rmtree(path, ignore_errors=True)
    name = f"checkpoint-{found[-1][0] + 1 if found else 1:08d}"
    os.makedirs(os.path.join(folder, name))
    return name


# The parts of a variable.


class Runs(NamedTuple):
    """Bytes of a variable of some equal pieces: in the pieces from `first` to `last`, those from `start` to `stop`."""

    pieces: int
    start: int
    stop: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return (self.last - self.first) * (self.stop - self.start)


def _num_bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _runs(variable: Any, replica: int) -> list[Runs]:
    """Returns the bytes of a Keras variable that a replica holds."""
    cut, total, item = getattr(variable.value, "cut", None), _num_bytes(variable), tf.as_dtype(variable.dtype).size
    if cut is None:
        return [Runs(1, 0, total, 0, 1)]
    if isinstance(cut, Owned):
        return [Runs(1, 0, total if replica == cut.owner else 0, 0, 1)]
    if isinstance(cut, Along):
        shape, begin, part = variable.shape, cut.begin(replica), cut.part_shape.as_list()
        outer, *inner = sorted(axis for axis in cut.axes if axis is not None)
        last = inner[0] if inner else outer
        item *= math.prod(shape[last + 1 :])
        start, stop, pieces = begin[last] * item, (begin[last] + part[last]) * item, math.prod(shape[:last])
        if not inner:
            return [Runs(pieces, start, stop, 0, pieces)]
        between, each = math.prod(shape[outer + 1 : last]), math.prod(shape[outer:last])
        low, high = begin[outer] * between, (begin[outer] + part[outer]) * between
        return [Runs(pieces, start, stop, first + low, first + high) for first in range(0, pieces, each)]
    width = cut.part_shape.num_elements() * item  # The last parts are padded.
    return [Runs(1, min(replica * width, total), min((replica + 1) * width, total), 0, 1)]


def _writes(variable: Any, number: int, replica: int) -> bool:
    """Returns whether a replica writes its part, which others may hold as well."""
    cut = variable.value.cut
    if not isinstance(cut, Along) or cut.axes[0] is not None:
        return True
    return bool(replica // cut.mesh[1] == number % cut.mesh[0])


def _copy(source: np.ndarray, has: Runs, target: np.ndarray, wants: Runs, total: int) -> int:
    """Copies the bytes of a part that another part has, and returns their number. A variable has `total` bytes."""
    if not has.size or not wants.size:
        return 0
    if has.pieces == wants.pieces:
        low, high = max(has.start, wants.start), min(has.stop, wants.stop)
        first, last = max(has.first, wants.first), min(has.last, wants.last)
        if low >= high or first >= last:
            return 0
        to = target.reshape(wants.last - wants.first, -1)[first - wants.first : last - wants.first]
        given = source.reshape(has.last - has.first, -1)[first - has.first : last - has.first]
        to[:, low - wants.start : high - wants.start] = given[:, low - has.start : high - has.start]
        return (last - first) * (high - low)
    copied, width, period = 0, has.stop - has.start, total // has.pieces
    for i in range(wants.first, wants.last):
        begin = i * (total // wants.pieces) + wants.start
        end, place = begin + wants.stop - wants.start, (i - wants.first) * (wants.stop - wants.start)
        for j in range(max(begin // period, has.first), min(-(-end // period), has.last)):
            low, high = max(begin, j * period + has.start), min(end, j * period + has.stop)
            if low < high:
                at = (j - has.first) * width + low - j * period - has.start
                target[place + low - begin : place + high - begin] = source[at : at + high - low]
                copied += high - low
    return copied


def _copy_all(sources: Iterable[tuple[np.ndarray, Runs]], target: np.ndarray, wanted: Iterable[Runs], total: int) -> int:
    """Copies the bytes of a replica's part from other parts, and returns their number."""
    place, copied, sources = 0, 0, list(sources)
    for wants in wanted:
        own = target[place : place + wants.size]
        copied += sum(_copy(source, has, own, wants, total) for source, has in sources)
        place += wants.size
    return copied


def held_by(variables: Iterable[Any], group: Any) -> list[tuple[int, Runs, np.ndarray]]:
    """Copies what this rank writes: the parts of its replicas, and its share of what all ranks hold.

    Args:
        variables: The Keras variables.
        group: The ranks.

    Returns:
        The number of the variable, which bytes these are, and the bytes.
    """
    found = []
    for number, variable in enumerate(variables):
        if getattr(variable.value, "cut", None) is None:
            value = variable.numpy()  # Ranks may have to read it together.
            if number % group.size == group.rank:
                found += [(number, *each) for each in _in_runs(variable, 0, value)]
            continue
        for replica, part in enumerate(
            variable.value.values, start=variable.value.distribute_strategy.extended.first_local_replica
        ):
            if _writes(variable, number, replica):
                found += [(number, *each) for each in _in_runs(variable, replica, part.numpy())]
    return found


def _in_runs(variable: Any, replica: int, part: Any) -> list[tuple[Runs, np.ndarray]]:
    """Returns the bytes of a replica's part, with their places in the variable."""
    found, values, place = [], _bytes(part), 0
    for runs in _runs(variable, replica):
        if runs.size:
            found.append((runs, values[place : place + runs.size]))
        place += runs.size
    return found


def _bytes(value: Any) -> np.ndarray:
    """Copies a value, which training may change, as bytes."""
    return np.array(value, order="C").reshape(-1).view(np.uint8)


def description(model: Any) -> dict[str, Any]:
    """Describes the variables of a model, as far as JSON needs it to compare them."""
    kinds = {
        kind: [
            # Keras counts the layers of a process, and so the same model may have other numbers.
            {"name": re.sub(r"_\d+(?=[/_]|$)", "", v.path), "shape": list(v.shape), "dtype": tf.as_dtype(v.dtype).name}
            for v in of_kind
        ]
        for kind, of_kind in variables_of_training(model).items()
    }
    return {"format": _FORMAT, "variables": kinds, "optimizers": places_of(model)}


# Writing.


class Write:
    """Writes one checkpoint on a thread. Python waits for it before it ends.

    Args:
        folder: The folder of this checkpoint.
        group: The ranks.
        held: The values; see `held_by`.
        index: The index, without the places of the values.
        kept: The number of checkpoints to keep.
    """

    def __init__(self, folder: str, group: Any, held: list[tuple[int, Runs, np.ndarray]], index: dict[str, Any], kept: int) -> None:
        self._folder, self._held, self._index, self._kept = folder, held, index, kept
        self._rank, self._size = group.rank, group.size
        self._error: Exception | None = None
        self._has_part = threading.Event()
        self._seen_by = math.inf
        self._thread = threading.Thread(target=self._run, name="tfrep-checkpoint")
        self._thread.start()

    def wait_for_part(self) -> None:
        """Waits for the file of this rank."""
        self._has_part.wait()
        self._raise()

    def wait(self) -> None:
        """Waits for the index, after all ranks have written their files."""
        self.give_up(_SECONDS_UNTIL_SEEN)
        self._thread.join()
        self._raise()

    def give_up(self, seconds: float = 0.0) -> None:
        """Has rank 0 wait no longer for the reports of other ranks."""
        self._seen_by = time.monotonic() + seconds

    def _raise(self) -> None:
        if self._error is not None:
            text = "A checkpoint was not written. Older checkpoints are unchanged."
            hint = "find out whether the disk is full, and whether all ranks see the folder."
            raise OSError(message(text, hint, folder=self._folder, rank=self._rank, error=str(self._error))) from self._error

    def _run(self) -> None:
        try:
            self._write_part()
            self._has_part.set()
            if self._rank == 0:
                self._write_index()
        except Exception as error:
            self._error = error
        finally:
            self._has_part.set()

    def _write_part(self) -> None:
        name = _part_name(self._rank, self._size)
        path, parts, offset = os.path.join(self._folder, name), [], 0
        os.makedirs(self._folder, exist_ok=True)
        require_space(path, sum(values.size for *_, values in self._held))
        with open(path, "wb", buffering=0) as file:
            for number, runs, values in self._held:
                data, checksum = memoryview(values.data), zlib.crc32(values.data)
                while data:  # One call may write only a part.
                    data = data[file.write(data) :]
                parts.append({"variable": number, "file": name, "offset": offset, "runs": runs, "crc32": checksum})
                offset += values.size
            os.fsync(file.fileno())
        self._held = []
        with whole(f"{path}.json") as unfinished:
            Path(unfinished).write_text(json.dumps(parts), "utf-8")

    def _write_index(self) -> None:
        reports = [os.path.join(self._folder, f"{_part_name(rank, self._size)}.json") for rank in range(self._size)]
        while missing := [path for path in reports if not os.path.exists(path)]:
            if time.monotonic() > self._seen_by or not threading.main_thread().is_alive():
                raise FileNotFoundError(f"no {os.path.basename(missing[0])}")
            time.sleep(0.02)
        parts = [part for path in reports for part in json.loads(Path(path).read_text("utf-8"))]
        with whole(os.path.join(self._folder, _INDEX)) as unfinished:
            Path(unfinished).write_text(json.dumps(self._index | {"parts": parts}), "utf-8")
        synchronize(os.path.dirname(self._folder))
        for folder in whole_ones(os.path.dirname(self._folder))[: -self._kept]:
            os.remove(os.path.join(folder, _INDEX))
            shutil.rmtree(folder, ignore_errors=True)


# Reading.


class Index:
    """A checkpoint that is read.

    Args:
        folder: Its folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        try:
            self.content = json.loads(Path(folder, _INDEX).read_text("utf-8"))
            version = self.content["format"]
            parts = self.content["parts"] if version == _FORMAT else []
            self._parts = [(each, Runs(*each["runs"])) for each in parts]
            self._of: dict[int, list[tuple[dict[str, Any], Runs]]] = {}
            for each, runs in self._parts:
                self._of.setdefault(each["variable"], []).append((each, runs))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"{_INDEX}: {error!r}") from error
        if version != _FORMAT:
            hint = "read it with the version of this package that wrote it."
            raise ConfigurationError(
                message("The checkpoint has a format of another version.", hint, folder=folder, format=version)
            )

    def chosen(self, model: Any) -> list[tuple[int, Any]]:
        """Returns the variables of a model, each with its number in the checkpoint.

        Args:
            model: The model.

        Returns:
            The numbers and variables.

        Raises:
            ConfigurationError: The checkpoint is of another model.
        """
        own, found, first = description(model)["variables"], [], 0
        for kind, theirs in self.content["variables"].items():
            differ = [(a, b) for a, b in itertools.zip_longest(own[kind], theirs) if a != b][:3]
            # A program that only predicts has no optimizer, and may have drawn no random numbers.
            if differ and (kind == "weights" or (own[kind] and theirs)):
                raise ConfigurationError(
                    message(
                        "The checkpoint is of another model or optimizer.",
                        hint="make the same model, or use another folder.",
                        folder=self._folder,
                        variables=kind,
                        of_model_and_checkpoint=differ,
                    )
                )
            if not differ:
                numbers = range(first, first + len(theirs))
                found += list(zip(numbers, variables_of_training(model)[kind], strict=True))
            first += len(theirs)
        return found

    def check(self, rank: int, size: int) -> None:
        """Checks the bytes of a share of the parts.

        Args:
            rank: The number of the share.
            size: The number of shares.

        Raises:
            OSError: A file is missing or damaged.
        """
        for each, runs in self._parts[rank::size]:
            if zlib.crc32(self._bytes(each, runs).data) != each["crc32"]:
                raise self._damaged(f"{each['file']}: wrong bytes")

    def read(self, number: int, variable: Any) -> list[np.ndarray]:
        """Reads the parts of a variable that the replicas of this process hold, and nothing else."""
        cut, dtype = getattr(variable.value, "cut", None), tf.as_dtype(variable.dtype)
        copies = [None] if cut is None else variable.value.values
        first = 0 if cut is None else variable.value.distribute_strategy.extended.first_local_replica
        values = []
        for replica, copy in enumerate(copies, start=first):
            shape = tuple(variable.shape if copy is None else copy.shape)
            target, wanted = np.zeros(math.prod(shape) * dtype.size, np.uint8), _runs(variable, replica)
            sources = [(self._bytes(part, has), has) for part, has in self._of.get(number, ())]
            if _copy_all(sources, target, wanted, _num_bytes(variable)) != sum(each.size for each in wanted):
                raise self._damaged(f"{_INDEX}: parts of {variable.path} are missing")
            values.append(target.view(dtype.as_numpy_dtype).reshape(shape))
        return values

    def _bytes(self, part: dict[str, Any], runs: Runs) -> np.ndarray:
        if not runs.size:
            return np.zeros(0, np.uint8)
        try:
            return np.memmap(Path(self._folder, part["file"]), np.uint8, "r", part["offset"], (runs.size,))
        except (OSError, ValueError) as error:
            raise self._damaged(f"{part['file']}: {error}") from error

    def _damaged(self, found: str) -> OSError:
        hint = "put its files back, or remove its folder: then the checkpoint before it is used."
        return OSError(message("A checkpoint is damaged. The model is unchanged.", hint, folder=self._folder, found=found))
