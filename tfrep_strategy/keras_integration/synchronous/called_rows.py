"""What becomes of rows in loops, branches and functions, which have graphs of their own.

A call is followed with what is known of the tensors that it gets. A loop is followed until another turn tells nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfrep_strategy._tensorflow import called_graphs
from tfrep_strategy.keras_integration.synchronous.compared_rows import KnownComparison
from tfrep_strategy.keras_integration.synchronous.row_axes import RowsOf

LOOPS = ("StatelessWhile", "While")
BRANCHES = ("Case", "If", "StatelessCase", "StatelessIf")
"""Operations whose first input says which of their graphs runs."""

OF_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
"""Operations that call functions which no graph shows."""

MIXED = "mixed"
"""What calls have computed from rows that were mixed, or in a way that nobody can tell from sums and means."""

_MOST_TURNS = 3
"""How many turns of a loop are followed after the first; what still changes then is no sum, nor a mean."""


class Known(NamedTuple):
    """What is known of a tensor; see `RowGrowth`.

    Attributes:
        depends: Whether it comes from rows, or from their number.
        rows: Whether it has rows, or had, and where they were moved.
        axis: In which dimension it has rows.
        power: By which power of the number of rows it grows.
        is_nothing: Whether it is zero, or next to it.
        degree: How many sums and means over rows are multiplied in it; None if it has rows, or comes from none.
        compared: What it has of other rows than its own.
        is_mixed: Whether a replica has another value than one device.
    """

    depends: bool
    rows: RowsOf
    axis: int | None
    power: Any
    is_nothing: bool
    degree: float | None
    compared: KnownComparison
    is_mixed: bool


class Result(NamedTuple):
    """What a call returns: a "sum" or a "mean" over rows, something that was mixed, or else what is known of it."""

    kind: str | None
    known: Known


class Follower(Protocol):
    """What follows the rows in a graph: `RowGrowth`."""

    def known(self, tensor: tf.Tensor) -> Known:
        """Returns what is known of a tensor."""

    def begin_with(self, tensor: tf.Tensor, known: Known) -> None:
        """Notes what is known of a tensor that the graph is given."""

    def follow(self, graph: Any, known: Collection[str]) -> None:
        """Goes through the graph."""


class Call(NamedTuple):
    """A graph that an operation runs.

    Attributes:
        graph: It.
        given: Tensors outside, and what they are inside.
        carried: What a turn of a loop computes, and what that is in the next turn.
        results: What it computes, in the order of the operation's outputs.
        condition: The graph that tells, of what a turn gets, whether a loop goes on.
    """

    graph: Any
    given: list[tuple[tf.Tensor, tf.Tensor]]
    carried: list[tuple[tf.Tensor, tf.Tensor]]
    results: Sequence[tf.Tensor]
    condition: Any = None


def calls_of(operation: Any) -> list[Call]:
    """Returns what an operation runs: the body of a loop, all branches, or a function; nothing, for any other operation."""
    if operation.type in LOOPS:
        graphs = zip(called_graphs(operation, "body"), called_graphs(operation, "cond"), strict=False)
        return [
            _call(operation.inputs, body)._replace(carried=_pairs(body.outputs, body.inputs), condition=condition)
            for body, condition in graphs
        ]
    given = operation.inputs[1:] if operation.type in BRANCHES else operation.inputs
    return [_call(given, graph) for graph in called_graphs(operation)]


def _call(given: Sequence[tf.Tensor], graph: Any) -> Call:
    return Call(graph, _pairs(given, graph.inputs), [], graph.outputs)


def _pairs(these: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    return list(zip(these, others, strict=False))


def results_of(outer: Follower, call: Call, begun: Callable[[Any], Follower]) -> list[Result]:
    """Follows a call.

    Args:
        outer: What follows the graph with the call.
        call: The call.
        begun: Returns what is to follow a graph that is called.

    Returns:
        What each result is.
    """
    takes_rows = any(_axis_of_list(outer, outside) == 0 for outside, _ in call.given)
    inner = _followed(outer, call, begun)
    gets_rows = any(outer.known(outside).axis is not None for outside, _ in call.given)
    found = [Result(_kind(result, known := inner.known(result), gets_rows), known) for result in call.results]
    goes_from_row_to_row = takes_rows and any(_is_made_of_values(inner, result) for result, _ in call.carried)
    if goes_from_row_to_row or _rows_decide_over_turns(inner, call, begun):
        return [each._replace(kind=MIXED) for each in found]
    return found


def _followed(outer: Follower, call: Call, begun: Callable[[Any], Follower]) -> Follower:
    """Returns what has followed the graph of a call."""
    turns: list[tuple[Follower, list[Known]]] = []
    while True:
        inner = begun(call.graph)
        for outside, inside in call.given:
            inner.begin_with(inside, _known_outside(outer, outside))
        for result, inside in call.carried if turns else ():
            inner.begin_with(inside, turns[-1][0].known(result))
        begins = [inner.known(inside) for _, inside in call.carried]
        inner.follow(call.graph, {inside.name for _, inside in call.given})
        if not call.carried or turns and begins == turns[-1][1] or len(turns) == _MOST_TURNS:
            return inner
        turns.append((inner, begins))


def _kind(result: tf.Tensor, known: Known, gets_rows: bool) -> str | None:
    if known.is_mixed:
        return MIXED
    if known.axis is not None:
        return None
    if known.degree is None:  # Rows may have got lost in a way that nobody knows, as in TensorFlow's code of forward gradients.
        is_number = result.dtype.is_floating and result.shape.is_fully_defined()
        return MIXED if gets_rows and is_number and known.compared.is_from_values else None
    is_sum = known.power == 1
    if not result.dtype.is_floating:
        return "sum" if is_sum else None
    is_linear = known.power in (0, 1) and known.degree <= 1
    return MIXED if not is_linear else "sum" if is_sum else "mean"


def _known_outside(outer: Follower, tensor: tf.Tensor) -> Known:
    """Returns what is known of a tensor inside. A list, as loops read them, has rows in the dimensions of its elements."""
    known, axis = outer.known(tensor), _axis_of_list(outer, tensor)
    return known if axis is None else known._replace(rows=RowsOf(axis > 0, axis - 1 if axis else None))


def _axis_of_list(outer: Follower, tensor: tf.Tensor) -> int | None:
    """Returns in which dimension that tensor has rows of whose parts along the first one a list was made."""
    return outer.known(tensor.op.inputs[0]).axis if tensor.op.type == "TensorListFromTensor" else None


def _is_made_of_values(inner: Follower, result: tf.Tensor) -> bool:
    """Whether a turn of a loop computes something from values of rows, and does not only hand it on."""
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    return result.dtype != tf.variant and result.op.type != "Placeholder" and inner.known(result).compared.is_from_values


def _rows_decide_over_turns(inner: Follower, call: Call, begun: Callable[[Any], Follower]) -> bool:
    """Whether how many turns a loop takes follows from something that was put together of rows."""
    if call.condition is None:
        return False
    condition, given = begun(call.condition), call.condition.inputs
    for (_, body), inside in zip(call.carried, given, strict=False):
        condition.begin_with(inside, inner.known(body))
    condition.follow(call.condition, {each.name for each in given})
    decides = condition.known(call.condition.outputs[0])
    return decides.degree is not None or decides.is_mixed or decides.compared.state is not None
