"""Loops over the rows of a batch, such as `tf.map_fn`: each replica runs the rounds of its rows.

A round may use its own row, and values that are equal in all rounds. Sums over rounds are partial.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import operation_definition
from tfrep_strategy.partitioner.placements import ITEMS, PARTIAL, REPLICATE, VACANT, Items, Replicate, Rows, Vacant
from tfrep_strategy.partitioner.planner import Planner, in_order
from tfrep_strategy.partitioner.values import LENGTH, NUMBER, Elements

_SAME, _NUMBER, _ROW, _LENGTH, _FRESH = "same", NUMBER, "row", LENGTH, "fresh"
"""The role of a tensor in a body: equal in each round, the number of the row, of the row, a list's length, a new list."""

_READS = frozenset({"ReadVariableOp", "ResourceGather", "VariableShape"})


class NotOverRowsError(Exception):
    """Raised if a loop is not over rows."""


class RowLoop:
    """The roles of the values that a loop over rows carries.

    Args:
        plan: The planner.
        operation: The loop.
        test: Its traced condition.
        body: Its traced body.

    Raises:
        NotOverRowsError: The loop is not over rows.
    """

    def __init__(self, plan: Planner, operation: Any, test: Any, body: Any) -> None:
        self._plan, self._given, self._body = plan, list(operation.inputs), body
        self._out = list(map(origin, body.outputs))
        self._fixed = [out is into for into, out in zip(body.inputs, self._out, strict=True)]
        self._limits = self._found_limits(test)
        self._labels: dict[str, Any] = {}
        self._elements: dict[int, Elements] = {}
        self._set: set[int] = set()
        """The indices of lists whose elements are set, which have a place for each row of all replicas."""
        self._pushed: set[int] = set()
        self._popped: set[int] = set()
        for i, tensor in enumerate(body.inputs):
            self._labels[tensor.name] = self._of_input(i)
        for each in in_order(body):
            if each.type != "Placeholder":
                self._follow(each)
        for i, out in enumerate(self._out):
            if not self._fixed[i] and self._labels[out.name] != self._labels[body.inputs[i].name] and not self._counts(i):
                raise NotOverRowsError

    def _found_limits(self, test: Any) -> set[int]:
        """Returns the indices of the limits of the round counter, which are the number of rows."""
        limits, stack = set(), [origin(test.outputs[0])]
        while stack:
            operation = stack.pop().op
            if operation.type == "LogicalAnd":
                stack += map(origin, operation.inputs)
                continue
            if operation.type != "Less":
                raise NotOverRowsError
            number, limit = (_place(test, origin(x)) for x in operation.inputs)
            if number is None or limit is None:
                raise NotOverRowsError
            is_rows = self._fixed[limit] and self._plan.sizes_of(self._given[limit]) == Rows()
            if not self._counts(number) or not is_rows:
                raise NotOverRowsError
            limits.add(limit)
        return limits

    def _counts(self, place: int) -> bool:
        """Returns whether a carried value counts rounds from 0."""
        into, given, operation = self._body.inputs[place], self._given[place], self._out[place].op
        if operation.type != "AddV2" or not given.dtype.is_integer or self._plan.sizes_of(given) != 0:
            return False
        return origin(operation.inputs[0]) is into and tf.get_static_value(operation.inputs[1]) == 1

    def _of_input(self, place: int) -> Any:
        given, tensor = self._given[place], self._body.inputs[place]
        placement = self._plan.placement(given)
        if place in self._limits:
            return "limit"
        if self._counts(place):
            return _NUMBER
        if tensor.dtype == tf.variant:
            if isinstance(placement, Items) or (isinstance(placement, Vacant) and not self._fixed[place]):
                return ("list", place)
            raise NotOverRowsError
        if self._fixed[place]:
            if tensor.dtype == tf.resource and not isinstance(placement, Replicate):
                raise NotOverRowsError
            return _SAME
        if None in (given.shape.rank, tensor.shape.rank) or given.shape.as_list() != tensor.shape.as_list():  # It may grow.
            raise NotOverRowsError
        return ("sum", place)

    def _follow(self, operation: Any) -> None:
        """Finds the roles of the outputs of an operation of the body."""
        labels = [self._labels[x.name] for x in operation.inputs]
        kinds = {each[0] if isinstance(each, tuple) else each for each in labels}
        if operation.type in ("Identity", "NoOp"):
            found = labels
        elif operation.type.startswith("TensorList") or "list" in kinds or _FRESH in kinds or _LENGTH in kinds:
            found = self._of_lists(operation, labels)
        elif "sum" in kinds:
            found = [self._of_sums(operation, labels)]
        elif "limit" in kinds or (operation_definition(operation.type).is_stateful and operation.type not in _READS):
            raise NotOverRowsError
        elif _NUMBER in kinds:
            # It may only count, because rows have other numbers on a replica.
            if not any(operation is out.op for i, out in enumerate(self._out) if self._counts(i)):
                raise NotOverRowsError
            found = [_NUMBER]
        else:
            found = [_ROW if _ROW in kinds else _SAME] * len(operation.outputs)
        self._labels.update((x.name, label) for x, label in zip(operation.outputs, found, strict=True))

    def _of_sums(self, operation: Any, labels: list[Any]) -> Any:
        """Returns the role of a sum to which a value is added."""
        sums = [each for each in labels if isinstance(each, tuple)]
        others = {each for each in labels if not isinstance(each, tuple)}
        if operation.type not in ("AddN", "AddV2") or len(sums) != 1 or not others <= {_ROW, _SAME}:
            raise NotOverRowsError
        return sums[0]

    def _of_lists(self, operation: Any, labels: list[Any]) -> list[Any]:
        kind, first = operation.type, labels[0]
        is_list = first == _FRESH or (isinstance(first, tuple) and first[0] == "list")
        if kind == "TensorListReserve" and labels[0] in (_SAME, _ROW) and labels[1] == _LENGTH:
            return [_FRESH]
        if kind == "AddN" and set(labels) - {_FRESH} == {labels[0]} and is_list:
            return [first]
        if kind == "ZerosLike" and is_list:
            return [_FRESH]
        if not is_list:
            raise NotOverRowsError
        if kind == "TensorListLength":
            return [_LENGTH]
        if kind == "TensorListElementShape":
            return [_SAME]
        if kind == "TensorListGetItem" and labels[1:] == [_NUMBER, _SAME]:
            return [_ROW]
        if kind == "TensorListSetItem" and labels[1] == _NUMBER and labels[2] in (_ROW, _SAME):
            self._note(first, operation.inputs[2])
            if first != _FRESH and self._is_new(first[1], "TensorListReserve"):
                self._set.add(first[1])
            return [first]
        if kind == "TensorListPushBack" and labels[1] in (_ROW, _SAME, _NUMBER, _LENGTH):
            if first == _FRESH or first[1] in self._pushed or not self._is_new(first[1], "EmptyTensorList"):
                raise NotOverRowsError  # There must be one element for each row.
            self._pushed.add(first[1])
            self._note(first, operation.inputs[1], labels[1])
            return [first]
        if kind == "TensorListPopBack" and first != _FRESH:
            self._popped.add(first[1])
            elements = self._plan.value(self._given[first[1]]).elements
            return [first, (elements and elements.role) or _ROW]
        raise NotOverRowsError

    def _is_new(self, place: int, kind: str) -> bool:
        """Returns whether a list was made for the loop, with a place for each row; otherwise it has an element for each row."""
        made = origin(self._given[place]).op
        if isinstance(self._plan.placement(self._given[place]), Items):
            return False
        is_right = made.type == kind and (kind == "EmptyTensorList" or self._plan.sizes_of(made.inputs[1]) == Rows())
        if not is_right:
            raise NotOverRowsError
        return True

    def _note(self, label: Any, item: Any, role: str = _ROW) -> None:
        if label != _FRESH:
            dims = None if item.shape.rank is None else tuple(item.shape.as_list())
            known = Elements(item.dtype, dims, role=role if role in (_NUMBER, _LENGTH) else None)
            if self._elements.setdefault(label[1], known) != known:
                raise NotOverRowsError

    def put(self, operation: Any) -> None:
        """Adds the loop to the program."""
        plan, add = self._plan, self._plan.program.add
        inputs = []
        for i, given in enumerate(self._given):
            label = self._labels[self._body.inputs[i].name]
            if i in self._limits:
                inputs.append(plan.as_dtype(plan.rows.count, given.dtype))
            elif label == ("sum", i):
                inputs.append(plan.partial(given))
            elif i in self._set:
                inputs.append(add("TensorListResize", plan.local(given), plan.rows.count))
            else:
                inputs.append(plan.local(given) if label == ("list", i) else plan.replicated(given))
        node = plan.program.copy_of(operation, inputs)
        plan.put_node(operation, node)
        for given, local in zip(self._given, inputs, strict=True):
            if given.dtype == tf.resource:
                plan.access(local, node, writes=False)
        for i, (given, tensor, local) in enumerate(zip(self._given, operation.outputs, node.outputs, strict=True)):
            if self._fixed[i]:
                plan.hand_over(plan, given, plan, tensor)
            elif self._counts(i):
                plan.put(tensor, REPLICATE, plan.as_dtype(plan.rows.total, tensor.dtype))
                plan.note_sizes(tensor, ((), Rows()))
            elif i in self._popped:  # The list is empty afterwards.
                plan.put(tensor, VACANT, local)
            elif tensor.dtype == tf.variant:
                plan.put(tensor, ITEMS, local, elements=self._elements.get(i, plan.value(given).elements))
            else:
                plan.put(tensor, PARTIAL, local)


def over_rows(plan: Planner, operation: Any, test: Any, body: Any) -> bool:
    """Adds a loop if it is over rows; returns whether it is."""
    if not any(isinstance(plan.placement(x), Items) for x in operation.inputs):
        return False
    try:
        loop = RowLoop(plan, operation, test, body)
    except NotOverRowsError:
        return False
    loop.put(operation)
    return True


def _place(graph: Any, tensor: Any) -> int | None:
    return next((i for i, x in enumerate(graph.inputs) if x is tensor), None)


def origin(tensor: Any) -> Any:
    """Returns the tensor behind identity operations."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
