"""Compares the first runs of each partitioned step, operation by operation, with one device.

Other ranks pass their values through files in a folder, not through the transport, which may be what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.calls import line_of
from tfrep_strategy.core.limits import Verification, timeout_seconds
from tfrep_strategy.errors import PeerError, TfrepError, message
from tfrep_strategy.partitioner.placements import Partial, Placement, Replicate, Shard
from tfrep_strategy.partitioner.planner import in_order
from tfrep_strategy.partitioner.step import Observed, PartitionedStep
from tfrep_strategy.partitioner.verification.comparison import (
    Bounds,
    Difference,
    as_array,
    difference,
    disagreement,
    joined,
    nudged,
    shape_problem,
)
from tfrep_strategy.partitioner.verification.reference import Place, Reference, places

_UNREPEATABLE_DRAWS = frozenset({
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal",
    "RandomUniform", "RandomUniformInt", "TruncatedNormal",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Held:
    """The values of a variable around a step.

    Attributes:
        name: Its name.
        placement: Whether replicas hold copies, or addends.
        before: Its value on each replica before the step.
        after: Its value on each replica after the step.
    """

    name: str
    placement: Placement
    before: Sequence[tf.Tensor]
    after: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first tensor of a step that differs from one device's.

    what: The type and the name of the operation, or the variable.
    layer: The scope of the operation, which names the layer.
    line: The line of the user's program that made it.
    placement: Its placement.
    replica: The replica that differs; None if it is the value of all together.
    difference: The size of the difference.
    tolerance: The largest difference that rounding can explain.
    """

    what: str
    layer: str
    line: str
    placement: str
    replica: int | None
    difference: str
    tolerance: float


class VerifiedStep:
    """A partitioned step whose runs are compared.

    Args:
        graph: The traced step.
        observed: Its observable tensors.
        resources: Resources other than variables that the step may read, by the names of inputs.

    Attributes:
        compared: Number of tensors that were compared in the last run.
        alone: The reason why one device could not use the replicas' values in the last run, only its own; empty if it could.
        draws: Whether the step draws random numbers that cannot be repeated.
    """

    def __init__(self, graph: Any, observed: Observed, resources: Mapping[str, Any] | None = None) -> None:
        self._graph, self._observed, self._others = graph, observed, dict(resources or {})
        self._places = list(places(graph, observed))
        self._references: dict[Any, Reference] = {}
        self._copies: dict[str, tf.Variable] = {}
        """Variables of one device that replace the replicas' copies, by the names of inputs."""
        self._right: dict[tuple[str, ...], tf.Tensor] = {}
        self._same: set[tuple[str, ...]] = set()
        self._after: dict[str, np.ndarray] = {}
        self.compared, self.alone = 0, ""
        self.draws = any(place.tensor.op.type in _UNREPEATABLE_DRAWS for place in self._places)

    def first_difference(self, replicas: Sequence[Sequence[tf.Tensor]], held: Mapping[str, Held]) -> Finding | None:
        """Compares a run.

        Args:
            replicas: The observable tensors of each replica, as described by `Observed`.
            held: The values of variables, by the names of inputs of the trace.

        Returns:
            The first difference in the order of the step; None if rounding can explain all.
        """
        self.compared, self.alone = 0, ""
        for each in held.values():  # A wrong copy would make all later values wrong.
            arrays = list(map(as_array, each.before))
            parted = disagreement(arrays, each.before[0].dtype) if isinstance(each.placement, Replicate) else None
            if parted is not None:
                return _of_operation(None, f"the variable {each.name!r} before the step", each.placement, parted)
        problems = {}
        for place in self._places:
            shapes = [own[place.seen.local].shape for own in replicas]
            if problem := shape_problem(place.seen.placement, shapes, place.tensor.shape):
                problems[place.key] = Difference(None, problem=problem)
        given = [place for place in self._places if place.key not in problems]
        try:
            self._repeat(given, replicas, held, is_forced=True)
        except (tf.errors.OpError, ValueError, TypeError) as error:  # The replicas' values do not fit.
            self.alone = str(error)
            self._repeat(given, replicas, held, is_forced=False)
        for place in self._places:
            parted = problems.get(place.key) or self._compared(place, replicas)
            if parted is not None:
                return _of_tensor(place, parted)
        for name, each in held.items():
            arrays, dtype = list(map(as_array, each.after)), each.after[0].dtype
            if name in self._reference.lost:
                parted = disagreement(arrays, dtype) if isinstance(each.placement, Replicate) else None
            else:
                bounds = Bounds(self._after[name], functools.partial(self._perturbed_after, name), 1.0)
                parted = difference(each.placement, arrays, as_array(joined(each.placement, each.after)), bounds, dtype)
            if parted is not None:
                write = _last_write(self._graph, name)
                return _of_operation(write, f"the variable {each.name!r} after the step", each.placement, parted)
        return None

    def _perturbed_after(self, name: str, times: int) -> list[np.ndarray]:
        return [after[name] for _, after in self._perturbed(times)]

    def _compared(self, place: Place, replicas: Sequence[Sequence[tf.Tensor]]) -> Difference | None:
        seen, dtype, key = place.seen, place.tensor.dtype, place.key
        if key not in self._right:  # The tensor cannot be repeated, or is an input.
            if place.tensor.op.type in ("Placeholder", "PlaceholderWithDefault") and place.path:
                return None
            if isinstance(seen.placement, Replicate):
                return disagreement(_locals(place, replicas), dtype)
            return None if seen.whole is None else _parted_from_parts(place, replicas, seen.whole)
        self.compared += 1
        if key in self._same:
            return None
        own, whole = _locals(place, replicas), joined(seen.placement, [each[seen.local] for each in replicas])
        bounds = Bounds(
            as_array(self._right[key]),
            lambda times: [as_array(right[key]) for right, _ in self._perturbed(times)],
            self._reference.terms[key],
        )
        parted = difference(seen.placement, own, as_array(whole), bounds, dtype)
        if parted is None and seen.whole is not None and not isinstance(seen.placement, Replicate):
            addends = own if isinstance(seen.placement, Partial) else ()
            received = [as_array(each[seen.whole]) for each in replicas]
            parted = difference(Replicate(), received, received[0], bounds, dtype, addends)
        return parted

    def _repeat(
        self, given: Sequence[Place], replicas: Sequence[Sequence[tf.Tensor]], held: Mapping[str, Held], is_forced: bool
    ) -> None:
        """Repeats the step. Perturbed runs follow when a difference is suspected, and are kept for later ones."""
        before = {name: joined(each.placement, each.before) for name, each in held.items()}
        for name, value in before.items():
            if name not in self._copies:
                self._copies[name] = tf.Variable(value, trainable=False)
        specs = [[tf.TensorSpec(x.shape, x.dtype) for x in own] for own in replicas]
        key = is_forced, tuple(spec for own in specs for spec in own), tuple(each.key for each in given)
        if key not in self._references:
            resources = self._others | {name: copy.handle for name, copy in self._copies.items()}
            self._references[key] = Reference(self._graph, self._observed, given, specs, resources, is_forced)
        reference = self._reference = self._references[key]

        def run(change: Callable[[tf.Tensor], tf.Tensor]) -> tuple[Any, Any, dict[str, np.ndarray]]:
            for name, value in before.items():
                self._copies[name].assign(change(value))
            right, same = reference([[change(x) for x in own] for own in replicas])
            return right, same, {name: as_array(self._copies[name].read_value()) for name in before}

        runs: list[tuple[Any, Any]] = []

        def perturbed(times: int) -> list[tuple[Any, Any]]:
            while len(runs) < times:
                right, _, after = run(nudged)
                runs.append((right, after))
            return runs

        self._right, self._same, self._after = run(lambda value: value)
        self._perturbed = perturbed


def _locals(place: Place, replicas: Sequence[Sequence[tf.Tensor]]) -> list[np.ndarray]:
    return [as_array(each[place.seen.local]) for each in replicas]


def _parted_from_parts(place: Place, replicas: Sequence[Sequence[tf.Tensor]], whole_at: int) -> Difference | None:
    """Compares a whole tensor that replicas received with their parts of it."""
    own, received = _locals(place, replicas), [as_array(each[whole_at]) for each in replicas]
    whole = as_array(joined(place.seen.placement, [each[place.seen.local] for each in replicas]))
    addends = own if isinstance(place.seen.placement, Partial) else ()
    return difference(Replicate(), received, received[0], Bounds(whole, lambda _: [], 1.0), place.tensor.dtype, addends)


def _of_tensor(place: Place, parted: Difference) -> Finding:
    operation = place.tensor.op
    name = " in ".join([repr(place.tensor.name), *map(repr, reversed(place.path))])
    # The value of a read is wrong if its write is.
    write = _last_write(operation.graph, operation.inputs[0].name, operation) if operation.type == "ReadVariableOp" else None
    if write is not None:
        return _of_operation(write, f"what {name} reads", place.seen.placement, parted)
    return _of_operation(operation, f"{operation.type} {name}", place.seen.placement, parted)


def _last_write(graph: Any, handle: str, before: Any = None) -> Any:
    """Returns the operation that wrote a variable last; None if none did."""
    last = None
    for operation in in_order(graph):
        if operation is before:
            break
        if operation.type.startswith("Assign") and operation.inputs[0].name == handle:
            last = operation
    return last


def _of_operation(operation: Any, what: str, placement: Placement, parted: Difference) -> Finding:
    if operation is None:
        return _finding(what, "", "", placement, parted)
    if operation.name not in what:
        what = f"{operation.type} {operation.name!r}, by {what}"
    return _finding(what, operation.name.rpartition("/")[0], line_of(operation), placement, parted)


def _finding(what: str, layer: str, line: str, placement: Placement, parted: Difference) -> Finding:
    words = {Replicate: "whole on every replica", Partial: "a sum of what the replicas hold"}
    placed = f"in rows, along axis {placement.axis}" if isinstance(placement, Shard) else words[type(placement)]
    return Finding(what, layer, line, placed, parted.replica, parted.problem or f"{parted.found:.3g}", parted.tolerance)


_numbers = itertools.count()
"""All ranks trace the same steps, in the same order."""
_WAIT_SECONDS = 0.005


class Variable(NamedTuple):
    """A variable that a step uses.

    Attributes:
        place: The index of its handle among the inputs of the step.
        name: Its name.
        dtype: Its dtype.
        placement: Whether replicas hold copies of it, or addends.
    """

    place: int
    name: str
    dtype: tf.DType
    placement: Placement


class Watch:
    """Compares the first runs of a step.

    Args:
        asked: The settings of `tfrep verify`.
        step: The step, which is observed.
        variables: The variables that it uses.
        resources: Other resources that it uses, by their index among the inputs.
        first_replica: The id of the first replica of this process.
        replicas: Number of replicas of the run.
    """

    def __init__(
        self,
        asked: Verification,
        step: PartitionedStep,
        variables: Sequence[Variable],
        resources: Mapping[int, Any],
        first_replica: int,
        replicas: int,
    ) -> None:
        self._asked, self._step, self._variables, self._replicas = asked, step, list(variables), replicas
        self._resources, self._first = resources, first_replica
        self._number, self._runs = next(_numbers), 0
        self._verified: VerifiedStep | None = None

    def values(self, inputs: Sequence[Sequence[Any]], devices: Sequence[str]) -> list[list[tf.Tensor]]:
        """Reads the variables on each replica of this process, in the graph that is being built.

        Args:
            inputs: The inputs of the step on each replica.
            devices: The devices of the replicas.
        """
        found = []
        for own, device in zip(inputs, devices, strict=True):
            with tf.device(device):
                read = [tf.raw_ops.ReadVariableOp(resource=own[each.place], dtype=each.dtype) for each in self._variables]
            found.append(read)
        return found

    def compare(
        self, before: Sequence[Sequence[tf.Tensor]], seen: Sequence[Sequence[tf.Tensor]], after: Sequence[Sequence[tf.Tensor]]
    ) -> None:
        """Adds the comparison of a run to the graph that is being built.

        Args:
            before: The variables on each replica of this process before the step.
            seen: The observable tensors of each of them.
            after: The variables after the step.
        """
        flat = [x for of_replica in zip(before, seen, after, strict=True) for part in of_replica for x in part]
        tf.py_function(self._note, flat, [])

    def _note(self, *flat: tf.Tensor) -> None:
        if self._runs >= self._asked.steps:
            return
        self._runs += 1
        each = len(self._variables)
        local, sizes = [], (each, len(flat) // self._local - 2 * each, each)
        left = iter(flat)
        for _ in range(self._local):
            local.append([list(itertools.islice(left, size)) for size in sizes])
        if self._first:
            arrays = [[[(as_array(x), x.dtype.name) for x in part] for part in own] for own in local]
            _write(self._file(self._first), pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL))
            return
        for first in range(self._local, self._replicas, self._local):
            local += self._received(self._file(first))
        self._check(local)

    @property
    def _local(self) -> int:
        return self._step.local_replicas

    def _file(self, first: int) -> Path:
        return self._asked.folder / f"step{self._number}-{self._runs}-{first}.pkl"

    def _received(self, file: Path) -> Any:
        end = time.monotonic() + timeout_seconds()
        while not file.exists():
            if time.monotonic() > end:
                hint = "ranks do not take the same steps, or one of them is stuck: look at its log."
                raise PeerError(message("Another rank did not report its results in time.", hint=hint, file=file.name))
            time.sleep(_WAIT_SECONDS)
        received = pickle.loads(file.read_bytes())
        file.unlink()
        return [[[tf.constant(value, dtype) for value, dtype in part] for part in own] for own in received]

    def _check(self, replicas: Sequence[Any]) -> None:
        graph = self._step.graph
        if self._verified is None:
            resources = {graph.inputs[place].name: resource for place, resource in self._resources.items()}
            self._verified = VerifiedStep(graph, self._step.observed, resources)
        held = {
            graph.inputs[each.place].name: Held(
                each.name, each.placement, [before[i] for before, _, _ in replicas], [after[i] for _, _, after in replicas]
            )
            for i, each in enumerate(self._variables)
        }
        seen = self._step.joined_rows([seen for _, seen, _ in replicas], joined)
        finding = self._verified.first_difference(seen, held)
        verified = self._verified
        record = {
            "step": self._number,
            "run": self._runs,
            "compared": verified.compared,
            "alone": verified.alone,
            "draws": verified.draws,
            "finding": finding and asdict(finding),
        }
        _write(self._asked.folder / f"told{self._number}-{self._runs}.json", json.dumps(record).encode())
        if finding is not None:
            hint = "read the report of `tfrep verify`."
            raise TfrepError(message("A step differs from that of one device.", hint=hint, operation=finding.what))


def _write(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, file)
