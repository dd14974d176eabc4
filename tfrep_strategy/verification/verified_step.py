"""Compares a run of a partitioned step, from its first operation to its last, with one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.partitioner.fingerprint import line_of
from tfrep_strategy.partitioner.observed import Observed
from tfrep_strategy.partitioner.placements import Partial, Placement, Replicate, Shard
from tfrep_strategy.partitioner.planner import in_order
from tfrep_strategy.verification.comparison import Bounds, Difference, difference, disagreement, joined, nudged
from tfrep_strategy.verification.reference import Place, Reference, places

_UNREPEATABLE_DRAWS = frozenset({
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal",
    "RandomUniform", "RandomUniformInt", "TruncatedNormal",
})  # fmt: skip
_PERTURBED = 2
"""How often the step is repeated with other last bits."""


@dataclasses.dataclass(frozen=True)
class Held:
    """What a variable held.

    Attributes:
        name: Its name.
        placement: Whether replicas have copies, or addends.
        before: What each replica had of it before the step.
        after: What each has after it.
    """

    name: str
    placement: Placement
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first tensor of a step that differs from one device's.

    Attributes:
        what: The type and the name of the operation, or the variable.
        layer: The scope in which it was made, which names the layer.
        line: The line of the user's program that has made it.
        placement: How it is placed.
        replica: Which replica has something else; None if it is what all of them make together.
        difference: How large the difference is.
        tolerance: How large rounding can make it.
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
        observed: What replicas return of it.
        resources: By the name of an input: resources that are no variables, which the step may read.

    Attributes:
        compared: How many tensors were compared in the last run.
        alone: Why one device could not go on with what replicas have in the last run, but with its own results; empty if it could.
        draws: Whether the step draws numbers that nobody can draw again.
    """

    def __init__(self, graph: Any, observed: Observed, resources: Mapping[str, Any] | None = None) -> None:
        self._graph, self._observed, self._others = graph, observed, dict(resources or {})
        self._places = list(places(graph, observed))
        self._references: dict[Any, Reference] = {}
        self._copies: dict[str, tf.Variable] = {}
        """By the name of an input: a variable of one device, in place of the copies of the replicas."""
        self._random = np.random.default_rng(0)
        self.compared, self.alone = 0, ""
        self.draws = any(place.tensor.op.type in _UNREPEATABLE_DRAWS for place in self._places)

    def first_difference(self, replicas: Sequence[Sequence[np.ndarray]], held: Mapping[str, Held]) -> Finding | None:
        """Compares a run.

        Args:
            replicas: Of each replica, what it returns of the trace, as `Observed` says.
            held: By the name of an input of the trace: what a variable held.

        Returns:
            The first difference in the order of the step; None if rounding can explain all.
        """
        self.compared = 0
        for each in held.values():  # A copy that was wrong before makes all wrong that comes after.
            parted = disagreement(each.before, _dtype(each.before[0])) if isinstance(each.placement, Replicate) else None
            if parted is not None:
                return _of_operation(None, f"the variable {each.name!r} before the step", each.placement, parted)
        wholes: dict[tuple[str, ...], np.ndarray] = {}
        problems: dict[tuple[str, ...], Difference] = {}
        for place in self._places:
            whole = joined(place.seen.placement, _locals(place, replicas), place.tensor.shape)
            if isinstance(whole, str):
                problems[place.key] = Difference(None, problem=whole)
            else:
                wholes[place.key] = whole
        given = {
            place.key: wholes[place.key] if place.seen.whole is None else replicas[0][place.seen.whole]
            for place in self._places
            if place.key in wholes
        }
        before = {name: joined(each.placement, each.before, tf.TensorShape(None)) for name, each in held.items()}
        try:
            self.alone = ""
            bounds, after = self._bounds(given, before, is_forced=True)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            self.alone = str(error)  # What replicas have fits nowhere: one device goes on alone.
            bounds, after = self._bounds(given, before, is_forced=False)
        for place in self._places:
            parted = problems.get(place.key) or self._compared(place, replicas, wholes[place.key], bounds.get(place.key))
            if parted is not None:
                return _of_tensor(place, parted)
        for name, each in held.items():
            whole = joined(each.placement, each.after, tf.TensorShape(None))
            assert not isinstance(whole, str)
            dtype = _dtype(whole)
            parted = difference(each.placement, each.after, whole, after[name], dtype) if name in after else None
            if parted is not None:
                write = _last_write(self._graph, name)
                return _of_operation(write, f"the variable {each.name!r} after the step", each.placement, parted)
        return None

    def _compared(
        self, place: Place, replicas: Sequence[Sequence[np.ndarray]], whole: np.ndarray, bounds: Bounds | None
    ) -> Difference | None:
        seen, dtype, own = place.seen, place.tensor.dtype, _locals(place, replicas)
        if bounds is None:  # It cannot be repeated, or is given.
            is_given = place.tensor.op.type in ("Placeholder", "PlaceholderWithDefault") and bool(place.path)
            return disagreement(own, dtype) if isinstance(seen.placement, Replicate) and not is_given else None
        self.compared += 1
        parted = difference(seen.placement, own, whole, bounds, dtype)
        if parted is None and seen.whole is not None and not isinstance(seen.placement, Replicate):
            addends = own if isinstance(seen.placement, Partial) else ()
            received = [each[seen.whole] for each in replicas]
            parted = difference(Replicate(), received, received[0], bounds, dtype, addends)
        return parted

    def _bounds(
        self, given: dict[tuple[str, ...], np.ndarray], before: Mapping[str, Any], is_forced: bool
    ) -> tuple[dict[tuple[str, ...], Bounds], dict[str, Bounds]]:
        """Repeats the step: as it is, and with other last bits."""
        for name, value in before.items():
            if name not in self._copies:
                self._copies[name] = tf.Variable(value, trainable=False)
        specs = {
            place.key: tf.TensorSpec(given[place.key].shape, place.tensor.dtype) for place in self._places if place.key in given
        }
        key = is_forced, tuple(specs.items())
        if key not in self._references:
            resources = self._others | {name: copy.handle for name, copy in self._copies.items()}
            self._references[key] = Reference(self._graph, self._observed, specs, resources, is_forced)
        reference = self._references[key]

        def run(change: Any) -> tuple[dict[tuple[str, ...], np.ndarray], dict[str, np.ndarray]]:
            for name, value in before.items():
                self._copies[name].assign(change(value, self._copies[name].dtype))
            results = reference({each: change(given[each], spec.dtype) for each, spec in specs.items()})
            return results, {name: self._copies[name].numpy() for name in before}

        right, right_after = run(lambda value, dtype: value)
        others = [run(lambda value, dtype: nudged(value, dtype, self._random)) for _ in range(_PERTURBED)]
        of_tensors = {
            each: Bounds(value, [results[each] for results, _ in others], reference.terms[each]) for each, value in right.items()
        }
        after = {name: Bounds(value, [each[name] for _, each in others], 1.0) for name, value in right_after.items()}
        return of_tensors, after


def _locals(place: Place, replicas: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [each[place.seen.local] for each in replicas]


def _dtype(value: Any) -> tf.DType:
    return tf.as_dtype(np.asarray(value).dtype)


def _of_tensor(place: Place, parted: Difference) -> Finding:
    operation = place.tensor.op
    name = " in ".join([repr(place.tensor.name), *map(repr, reversed(place.path))])
    # What is read is wrong where it was written.
    write = _last_write(operation.graph, operation.inputs[0].name, operation) if operation.type == "ReadVariableOp" else None
    if write is not None:
        return _of_operation(write, f"what {name} reads", place.seen.placement, parted)
    return _of_operation(operation, f"{operation.type} {name}", place.seen.placement, parted)


def _last_write(graph: Any, handle: str, before: Any = None) -> Any:
    """Returns the operation that has written a variable last; None if none has."""
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
    told = {Replicate: "whole on every replica", Partial: "a sum of what the replicas hold"}
    placed = f"in rows, along axis {placement.axis}" if isinstance(placement, Shard) else told[type(placement)]
    return Finding(what, layer, line, placed, parted.replica, parted.problem or f"{parted.found:.3g}", parted.tolerance)
