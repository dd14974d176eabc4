"""Makes a trace of this process, and reads from it what the process did and waited for.

TensorFlow writes an event for each operation. An asynchronous operation, such as a collective, has one event at its start and one
at its end. Each moment counts for the first of these that applies: an operation computes, a collective is running, a step waits for
its batch, a tensor is on its way to or from another device or process. Otherwise the process is idle.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.profiles.summary import TraceReport
from tfrep_strategy.core.tf import XSpace, operation_definition

WINDOW = "tfrep_profile"
"""The event that lasts as long as the trace."""
STEP = "train"
"""The event of a step of a `fit`. TensorBoard's profiler knows it by its number."""

HOST_COLLECTIVE = "tfrep_collective"
"""Prefix of the names of operations that are collectives, and calls from Python to TensorFlow."""

_START, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_OPERATION = re.compile(r"(?:(?:[^:]+/)?([^:/]+):|EagerLocalExecute: )([A-Za-z_]\w*)")
"""An operation of a function, with its name in it, or an eager operation."""
_XLA = "CpuExecutable::Execute"
_INSTRUCTION = "hlo_op"
"""A field of the events of XLA's own instructions. In TensorFlow 2.19 the program as a whole has no event."""
COMPUTE, COLLECTIVE, _INPUT, _TRANSFER = range(4)
"""The kinds, in order of precedence."""
_FAR = 2**62
_KINDS = (
    (re.compile(r"Collective|_?Nccl|Horovod"), COLLECTIVE),
    (re.compile(r"(MultiDevice)?IteratorGetNext"), _INPUT),
    (re.compile(r"_(Host)?(Send|Recv)"), _TRANSFER),
)
_BACKGROUND = "tf_data"
"""Prefix of the names of threads that prepare batches in advance. No step waits for them directly."""

_Span = tuple[int, int]
"""Begin and end, in picoseconds."""


class Operation(NamedTuple):
    """An operation of the host: its kind, its name, and its begin and end in picoseconds."""

    kind: int
    name: str
    span: _Span


def times_of(file: Path, who: str) -> TraceReport:
    """Reads the trace of a process.

    Args:
        file: The output of TensorFlow's profiler (`*.xplane.pb`).
        who: The name of the process.

    Returns:
        The times.
    """
    space = XSpace.FromString(file.read_bytes())
    spans: dict[int, list[_Span]] = defaultdict(list)
    steps, windows = 0, []
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    for plane in space.planes:
        if plane in gpus:
            for kind, span in _kernels(plane):
                spans[kind].append(span)
        else:
            steps += len(spans_named(plane, STEP))
            windows += spans_named(plane, WINDOW)
            for operation in operations(plane):
                # To the host, an operation of a GPU has ended when its kernels are queued.
                if operation.kind != COMPUTE or not gpus:
                    spans[operation.kind].append(operation.span)
    begin, end = windows[0]
    covered = [length(sum((spans[kind] for kind in range(last + 1)), []), begin, end) for last in range(_TRANSFER + 1)]
    compute, collectives, waits, transfers = np.diff([0.0, *covered]).tolist()
    traced = (end - begin) / 1e12
    return TraceReport(who, traced, compute, collectives + transfers, waits, traced - covered[-1], steps)


def _events(plane: Any) -> Iterator[tuple[str, Any, _Span]]:
    """Yields the thread of each event, the event, and its begin and end."""
    for line in plane.lines:
        zero = 1000 * line.timestamp_ns
        for event in line.events:
            begin = zero + event.offset_ps
            yield line.name, event, (begin, begin + event.duration_ps)


def spans_named(plane: Any, name: str) -> list[_Span]:
    """Returns the begin and end of each event of a name, in picoseconds."""
    keys = {key for key, data in plane.event_metadata.items() if data.name == name}
    return [span for _, event, span in _events(plane) if event.metadata_id in keys]


def _kernels(plane: Any) -> Iterator[tuple[int, _Span]]:
    """Yields the kind and the time of each kernel on a GPU's streams. Its other lines repeat the same in other words."""
    kinds = {key: COLLECTIVE if "nccl" in data.name.lower() else COMPUTE for key, data in plane.event_metadata.items()}
    for line, event, span in _events(plane):
        if line.startswith("Stream"):
            yield kinds[event.metadata_id], span


def operations(plane: Any) -> Iterator[Operation]:
    """Yields each operation that the host runs.

    Args:
        plane: The plane of the host, from an `XSpace`.
    """
    names = {key: data.name for key, data in plane.event_metadata.items()}
    stats = {key: data.name for key, data in plane.stat_metadata.items()}
    instructions = {key for key, name in stats.items() if name == _INSTRUCTION}
    kinds = {key: kind for key, name in names.items() if (kind := _kind_of_event(name)) is not None}
    # By number. Both events of an asynchronous operation have it. The operation may start before the trace, or end after it.
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    types: dict[int, str] = {}
    for line, event, (begin, end) in _events(plane):
        name = names[event.metadata_id]
        if event.metadata_id in kinds:
            if not line.startswith(_BACKGROUND):
                yield Operation(kinds[event.metadata_id], name, (begin, end))
        elif any(stat.metadata_id in instructions for stat in event.stats):
            yield Operation(COMPUTE, name, (begin, end))
        elif name in (_START, _DONE):
            found = _stats(event, stats)
            number = found["_p" if name == _START else "_c"]
            (starts if name == _START else ends)[number] = begin
            types[number] = found["kernel_type"]
    for number, operation_type in types.items():
        kind = _kind(operation_type)
        if kind != COMPUTE:  # The operations inside a called function count, not the call.
            yield Operation(kind, operation_type, (starts.get(number, 0), ends.get(number, _FAR)))


def _stats(event: Any, names: dict[int, str]) -> dict[str, Any]:
    found = {}
    for stat in event.stats:
        field = stat.WhichOneof("value")
        value = getattr(stat, field)
        found[names[stat.metadata_id]] = names[value] if field == "ref_value" else value
    return found


def _kind_of_event(name: str) -> int | None:
    """Returns the kind of an operation's own event; None for other events."""
    if name.startswith(_XLA):
        return COMPUTE
    operation = _OPERATION.fullmatch(name)
    if operation is None or operation_definition(operation[2]) is None:
        return None
    return COLLECTIVE if (operation[1] or "").startswith(HOST_COLLECTIVE) else _kind(operation[2])


def _kind(operation_type: str) -> int:
    return next((kind for pattern, kind in _KINDS if pattern.match(operation_type)), COMPUTE)


def length(spans: list[_Span], begin: int, end: int) -> float:
    """Returns the number of seconds in which at least one span lasts, between two times in picoseconds."""
    if not spans:
        return 0.0
    ordered = np.array(spans, np.int64).clip(begin, end)
    ordered = ordered[ordered[:, 0].argsort()]
    reached = np.maximum.accumulate(np.concatenate([[begin], ordered[:, 1]]))
    return float(np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], reached[:-1]), 0).sum()) / 1e12


class Trace:
    """Traces this process. An error is reported at the end: a profile never makes a training fail.

    TensorFlow may need a while to start. Only the time from `begin` to `end` counts.

    Args:
        run_folder: The folder for the traces of all processes.
        who: The name of this process, such as "rank0". The file is named after it, since TensorFlow uses only the machine's name.

    Example:
        >>> trace = Trace(Path("profile"), "rank0")
        >>> trace.begin()
        >>> product = tf.ones([8, 8]) @ tf.ones([8, 8])
        >>> report = trace.end()
        >>> report.who, report.traced > 0, report.problem
        ('rank0', True, '')
    """

    def __init__(self, run_folder: Path, who: str) -> None:
        self._run_folder, self._who = run_folder, who
        self._unfinished = self._problem = ""
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            self._unfinished = tempfile.mkdtemp(prefix=f".{who}-", dir=run_folder)
            tf.profiler.experimental.start(self._unfinished)
        except (OSError, tf.errors.OpError) as error:
            self._problem = str(error)

    def begin(self) -> None:
        """Begins the reported time."""
        self._window = tf.profiler.experimental.Trace(WINDOW)

    def end(self) -> TraceReport:
        """Ends the trace, and renames the file.

        Returns:
            The summary.
        """
        try:
            if not self._problem:
                self._window.__exit__(None, None, None)
                tf.profiler.experimental.stop()
                (written,) = Path(self._unfinished).rglob("*.xplane.pb")
                path = self._run_folder / written.name.replace(".xplane.pb", f"_{self._who}.xplane.pb")
                os.replace(written, path)
                return times_of(path, self._who)
        except (OSError, tf.errors.OpError) as error:
            self._problem = str(error)
        finally:
            if self._unfinished:
                shutil.rmtree(self._unfinished, ignore_errors=True)
        return TraceReport(self._who, problem=self._problem)
