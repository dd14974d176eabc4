"""From which sums, means, maxima and minima over the rows of a batch something was computed that has no rows.

What compares rows with each other follows from no such sums, but from all rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.errors import message, warn
from tfrep_strategy.keras_integration.protocol import Step
from tfrep_strategy.keras_integration.synchronous.called_rows import BRANCHES, LOOPS
from tfrep_strategy.keras_integration.synchronous.open_rows import NobodyRepeatsError
from tfrep_strategy.keras_integration.synchronous.origins import is_of_swish
from tfrep_strategy.keras_integration.synchronous.row_growth import SOURCES, RowGrowth, growth_of
from tfrep_strategy.keras_integration.synchronous.row_powers import CHECKED, REDUCED, degree

_DEGREES = {"alike": 0, "share": 0, "count": 0, "sum": 1, "mean": 1} | dict.fromkeys(
    ("max", "min", "rows", "all_rows", "shape"), math.inf
)
_CALLS = {*BRANCHES, *LOOPS, "IdentityN", "PartitionedCall"}
"""Operations whose gradients belong to the tensors that they were called with: branches, loops, functions, `tf.custom_gradient`."""


class Reductions(NamedTuple):
    """From which tensors one was computed that has no rows.

    Attributes:
        kinds: The tensors in which rows were put together: as a "sum", a "mean", the "max" or the "min", or as a "count" of
            rows. Besides, the replica's "share", what is "alike" on all replicas, and "rows" that are put together only
            after something was done to them with what comes from all rows. Where rows are compared, "all_rows" of which those
            of all replicas are needed, and the "shape" of such.
        between: Those between these and the one that was computed, in the order in which they were; that one is the last.
        of_rows: The names of those among them that have rows.
        together: Of those among them in which such rows are put together, the kind.
        degree: How many sums, means and so on are multiplied with each other. Infinite if the tensor is no polynomial of them.
        brought: By the names of those among them that replicas have reduced: what this replica brought. One device has this.
        places: Of all rows, and of shapes, by name: in which dimension the rows are, and what was joined to them.
    """

    kinds: dict[str, list[tf.Tensor]]
    between: list[tf.Tensor]
    of_rows: set[str]
    together: dict[str, str]
    brought: dict[str, tf.Tensor]
    degree: float
    places: dict[str, tuple[int, list[tuple[tf.Tensor, int]]]]


def reductions(step: Step, value: tf.Tensor) -> Reductions | None:
    """Walks back from a tensor to those in which rows were put together.

    Args:
        step: What the replica knows of the step.
        value: A tensor of the step's graph.

    Returns:
        What was found. None if the tensor has rows that were not compared, or if rows reach it in a way that nobody knows.

    Raises:
        RowsAreFixedError: The step is traced for one number of rows.
        NobodyRepeatsError: What comes after compared rows cannot be repeated, or nobody knows how rows were put together, and the
            step may take the global batch instead.
    """
    grows = growth_of(step, value)
    if value in grows.compared:
        return _of_compared(step, grows, value)
    found = _nothing()
    degrees: dict[str, float] = {}
    waiting = [value] if grows.axis(value) is None else []
    while waiting:
        tensor = waiting[-1]
        kind, brought = _kind(grows, tensor), grows.brought_mixed(tensor)
        inputs = list(tensor.op.inputs) if brought is None else [brought]
        together = grows.powers.together(tensor) if any(map(grows.is_normalized, inputs)) else None
        if tensor.name in degrees:
            waiting.pop()
        elif kind is not None and together is None:
            found.kinds[kind].append(tensor)
            degrees[tensor.name] = 1 if grows.compared.counts_chosen(tensor) else _DEGREES[kind]
        elif brought is None and not _can_be_repeated(grows, tensor, together):
            loses_rows = any(grows.axis(each) is not None for each in inputs)
            if loses_rows and step.may_take_whole_batch:
                raise NobodyRepeatsError(f"{tensor.op.type} {tensor.op.name}")
            return None
        elif unknown := [each for each in inputs if each.name not in degrees]:
            waiting += unknown
        else:
            found.between.append(tensor)
            kind_of_operation = tensor.op.type if brought is None else "Identity"
            degrees[tensor.name] = degree(kind_of_operation, [degrees[each.name] for each in inputs])
            if brought is not None:
                found.brought[tensor.name] = brought
            if grows.is_normalized(tensor):
                found.of_rows.add(tensor.name)
            if together is not None:
                found.together[tensor.name] = together
    return found._replace(degree=degrees[value.name]) if degrees else None


def all_rows(step: Step, value: tf.Tensor) -> Reductions | None:
    """Walks back from a tensor with rows to those from which the same tensor of all replicas can be computed; see `reductions`."""
    return _of_compared(step, growth_of(step, value), value)


def _nothing() -> Reductions:
    return Reductions({kind: [] for kind in _DEGREES}, [], set(), {}, {}, 0, {})


def _of_compared(step: Step, grows: RowGrowth, value: tf.Tensor) -> Reductions | None:
    found, known = _nothing(), set[str]()
    waiting = [value]
    while waiting:
        tensor = waiting[-1]
        kind, brought = _kind_among_all_rows(grows, tensor), grows.brought_mixed(tensor)
        inputs = list(tensor.op.inputs) if brought is None else [brought]
        if tensor.name in known:
            waiting.pop()
        elif kind is not None:
            found.kinds[kind].append(tensor)
            known.add(tensor.name)
            if kind in ("all_rows", "shape"):
                rows = tensor if kind == "all_rows" else inputs[0]
                axis = grows.axis(rows)
                assert axis is not None
                found.places[tensor.name] = axis, grows.compared.joined(rows)
        elif brought is None and not _can_be_copied(tensor.op):
            if grows.compared.compares(value):
                if step.may_take_whole_batch:
                    raise NobodyRepeatsError(f"{tensor.op.type} {tensor.op.name}")
                _warn_of(tensor.op)
            return None
        elif unknown := [each for each in inputs if each.name not in known]:
            waiting += unknown
        else:
            found.between.append(tensor)
            known.add(tensor.name)
            if brought is not None:
                found.brought[tensor.name] = brought
    return found._replace(degree=math.inf)


def _can_be_copied(operation: Any) -> bool:
    """Whether an operation computes the same, with the same gradient, if it is given the rows of all replicas."""
    if operation.type in _CALLS and not is_of_swish(operation):
        return False
    return operation.type not in SOURCES and not operation.op_def.is_stateful


def _warn_of(operation: Any) -> None:
    warn(
        message(
            "A step compares the rows of a batch, and what comes after cannot be repeated with those of all replicas."
            " Each replica compares its own.",
            hint="gather the rows with tfrep.all_gather. See docs/exactness.md.",
            operation=f"{operation.type} {operation.name}",
        ),
    )


def _kind_among_all_rows(grows: RowGrowth, tensor: tf.Tensor) -> str | None:
    if grows.told.get(tensor.name) == 0:
        return "alike"
    if tensor in grows.compared:
        return None
    inputs = list(tensor.op.inputs)
    if tensor.op.type == "Shape" and grows.depends_on_rows(tensor) and inputs[0] not in grows.compared:
        return "shape" if grows.axis(inputs[0]) is not None else "alike"
    kind = _kind(grows, tensor)
    if kind in REDUCED and any(map(grows.is_normalized, inputs)):
        return None
    return "all_rows" if kind == "rows" else kind


def _kind(grows: RowGrowth, tensor: tf.Tensor) -> str | None:
    """Returns where the walk ends at a tensor, and as what; None if it goes on."""
    if grows.told.get(tensor.name) == 1:
        return "share"
    has_rows = grows.axis(tensor) is not None
    if grows.powers.is_of_shape(tensor) and grows[tensor] == 0 and not has_rows or not grows.depends_on_rows(tensor):
        return "alike"
    if has_rows:
        return None if grows.is_normalized(tensor) else "rows"
    return grows.powers.reduction(tensor)


def _can_be_repeated(grows: RowGrowth, tensor: tf.Tensor, together: str | None) -> bool:
    """Whether an operation gives the value of one device if its inputs have theirs."""
    if tensor.op.type in SOURCES or (tensor.op.op_def.is_stateful and tensor.op.type not in CHECKED):
        return False
    treats_rows = together is not None or grows.is_normalized(tensor)
    return treats_rows or all(grows.axis(each) is None for each in tensor.op.inputs)
