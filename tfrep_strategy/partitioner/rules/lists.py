"""Lists of tensors, which hold the elements of loops. A list is placed as its elements are."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrep_strategy.partitioner import sizes as by_value
from tfrep_strategy.partitioner.placements import (
    ITEMS,
    OF_LAYOUT,
    REPLICATE,
    VACANT,
    Items,
    Partial,
    Placement,
    Replicate,
    Rows,
    Shard,
    Vacant,
    common_dims,
    is_number,
)
from tfrep_strategy.partitioner.planner import Planner, always, rule
from tfrep_strategy.partitioner.program import Tensor
from tfrep_strategy.partitioner.values import Elements


def joined(a: Placement, b: Placement) -> Placement:
    """Returns the placement of a value that has either of two placements, depending on a branch or a list's index."""
    if a == b or isinstance(b, Vacant):
        return a
    if isinstance(a, Vacant):
        return b
    kinds = {type(a), type(b)}
    if Replicate in kinds and len(kinds) == 2:
        return b if isinstance(a, Replicate) else a
    return REPLICATE


def joined_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """Returns the knowledge about elements of either of two lists."""
    if a is None or b is None:
        return a or b
    return Elements(
        a.dtype,
        common_dims(a.dims, b.dims),
        a.sizes if a.sizes == b.sizes else None,
        joined_elements(a.elements, b.elements),
    )


def elements_of(plan: Planner, tensor: Any) -> Elements:
    """Returns the knowledge about a tensor that becomes an element."""
    if (inner := plan.value(tensor).elements) is not None:
        return Elements(tensor.dtype, elements=inner)
    dims, sizes = plan.dims(tensor), plan.sizes_of(tensor)
    held = None if sizes is None or None in sizes.ravel() else (sizes.shape, *sizes.ravel())
    return Elements(tensor.dtype, None if dims is None else tuple(dims), held)


def put_element(plan: Planner, tensor: Any, placement: Placement, local: Tensor, elements: Elements | None) -> None:
    """Sets the value of a tensor that was an element."""
    placement = REPLICATE if isinstance(placement, Vacant) and tensor.dtype != tf.variant else placement
    plan.put(tensor, placement, local, elements=elements and elements.elements)
    if elements is None:
        return
    if elements.dims is not None:
        plan.known_dims[tensor.name] = list(elements.dims)
    plan.note_sizes(tensor, elements.sizes)


def _own_shape(plan: Planner, shape: Any, placement: Placement) -> Tensor:
    """Returns the shape of elements for an operation, without the sizes that are sharded."""
    known = plan.sizes_of(shape)
    if isinstance(placement, Items):
        return plan.replicated(shape)
    if known is None or not known.ndim:
        return plan.program.constant(-1)
    return plan.program.constant(plan.element_shape(known, placement), shape.dtype)


def _put_list(plan: Planner, operation: Any, placement: Placement, elements: Elements | None, *inputs: Tensor) -> None:
    plan.emit(operation, inputs, placement)
    for tensor in operation.outputs:
        plan.value(tensor).elements = elements


@rule("TensorListReserve", "EmptyTensorList")
@always
def new_list(plan: Planner, operation: Any) -> None:
    """Makes an empty list."""
    shape, number = operation.inputs
    inputs = _own_shape(plan, shape, VACANT), plan.replicated(number)
    _put_list(plan, operation, VACANT, None, *inputs)


@rule("TensorListFromTensor")
@always
def unstack(plan: Planner, operation: Any) -> None:
    """Makes a list; the first axis of the tensor holds the elements."""
    x, shape = operation.inputs
    placement = plan.placement(x)
    if isinstance(placement, Shard) and placement.rows == OF_LAYOUT:
        plan.settle_items(x)
    placement, local = plan.placement(x), plan.local(x)
    if isinstance(placement, Shard):
        if placement.axis:
            placement = placement.on(placement.axis - 1)
        elif placement == Shard(0):
            placement = ITEMS
        else:  # A row has several elements.
            plan.without_rule.setdefault(operation.type, operation)
            placement, local = REPLICATE, plan.replicated(x)
    dims, sizes = plan.dims(x), plan.sizes_of(x)
    elements = Elements(x.dtype, None if dims is None else tuple(dims[1:]))
    if sizes is not None and sizes.ndim == 1 and len(set(map(str, sizes))) == 1 and sizes[0] is not None:
        elements = dataclasses.replace(elements, sizes=((), sizes[0]))
    _put_list(plan, operation, placement, elements, local, _own_shape(plan, shape, placement))


@rule("TensorListGetItem", "TensorListPopBack")
@always
def element(plan: Planner, operation: Any) -> None:
    """Gives an element the placement of the list."""
    given, *index, shape = operation.inputs
    plan.settle_items(given)
    value = plan.value(given)
    inputs = [value.local, *map(plan.replicated, index), _own_shape(plan, shape, value.placement)]
    plan.emit(operation, inputs, value.placement)
    *lists, taken = operation.outputs
    for each in lists:
        plan.value(each).elements = value.elements
    put_element(plan, taken, value.placement, plan.local(taken), value.elements)


@rule("TensorListStack", "TensorListGather")
@always
def stack(plan: Planner, operation: Any) -> None:
    """Stacks the elements as one tensor."""
    given, *indices, shape = operation.inputs
    if indices:
        plan.settle_items(given)
    value = plan.value(given)
    placement = value.placement
    if isinstance(placement, Items):
        plan.emit(operation, [value.local, plan.replicated(shape)], Shard(0), num_elements=-1)
        return
    inputs = [value.local, *map(plan.replicated, indices), _own_shape(plan, shape, placement)]
    if isinstance(placement, Shard):
        placement = placement.on(placement.axis + 1)
    plan.emit(operation, inputs, REPLICATE if isinstance(placement, Vacant) else placement)
    (result,) = operation.outputs
    if value.elements is not None and value.elements.dims is not None:
        first = result.shape[0] if result.shape.rank else None
        plan.known_dims[result.name] = [first, *value.elements.dims]


@rule("TensorListSetItem", "TensorListPushBack")
@always
def put_in(plan: Planner, operation: Any) -> None:
    """Converts an element to the placement of the list."""
    given, *index, x = operation.inputs
    plan.settle_items(given)
    plan.settle_items(x)
    value, own = plan.value(given), plan.placement(x)
    placement = joined(value.placement, own)
    if not plan.can_be(given, placement) or (own != placement and not plan.can_be(x, placement)):
        placement = REPLICATE
    if isinstance(value.placement, Partial):  # Each element can be partial.
        placement = value.placement if plan.can_be(x, value.placement) else REPLICATE
    local = plan.to(given, placement)
    elements = joined_elements(value.elements, elements_of(plan, x))
    _put_list(plan, operation, placement, elements, local, *map(plan.replicated, index), plan.to(x, placement))


@rule("TensorListLength")
@always
def length(plan: Planner, operation: Any) -> None:
    """Returns the number of elements."""
    (given,), (result,) = operation.inputs, operation.outputs
    if isinstance(plan.placement(given), Items):
        plan.put(result, REPLICATE, plan.rows.total)
        plan.note_sizes(result, ((), Rows()))
    else:
        plan.emit(operation, plan.locals(operation), REPLICATE)


@rule("TensorListResize")
@always
def resize(plan: Planner, operation: Any) -> None:
    """Removes elements, or adds empty places."""
    given, number = operation.inputs
    plan.settle_items(given)
    value = plan.value(given)
    _put_list(plan, operation, value.placement, value.elements, value.local, plan.replicated(number))


@rule("TensorListElementShape")
@always
def shape_of_elements(plan: Planner, operation: Any) -> None:
    """Returns the shape of the elements for making a list; the size of the rows' axis is open."""
    value, (result,) = plan.value(operation.inputs[0]), operation.outputs
    plan.emit(operation, [value.local], REPLICATE)
    dims = value.elements.dims if value.elements is not None else None
    if dims is not None and all(map(is_number, dims)) and not isinstance(value.placement, Shard):
        plan.sizes[result.name] = by_value.array(list(dims))


@rule(
    "TensorListScatterIntoExistingList",
    "TensorListPushBackBatch",
    "TensorListScatterV2",
    "TensorListConcatLists",
    "TensorListSplit",
    "TensorListConcatV2",
)
@always
def other(plan: Planner, operation: Any) -> None:
    """Replicates the elements."""
    lists = [x for x in operation.inputs if x.dtype == tf.variant]
    for x in lists:
        plan.settle_items(x)
    elements = None
    for x in lists:
        elements = joined_elements(elements, plan.value(x).elements)
    is_sharded = any(isinstance(plan.placement(x), Shard) for x in operation.inputs)
    if is_sharded:
        plan.without_rule.setdefault(operation.type, operation)
    inputs = []
    for place, x in enumerate(operation.inputs):
        is_shape = (operation.type, place) in _SHAPES
        inputs.append(_own_shape(plan, x, REPLICATE) if is_shape else plan.replicated(x))
    plan.emit(operation, inputs, REPLICATE)
    for tensor in operation.outputs:
        if tensor.dtype == tf.variant:
            plan.value(tensor).elements = elements or Elements(tf.as_dtype(operation.get_attr("element_dtype")))


_SHAPES = {("TensorListScatterV2", 2), ("TensorListSplit", 1), ("TensorListConcatV2", 1)}
"""The indices of the inputs with the shape of elements."""


def of_lists(plan: Planner, operation: Any) -> None:
    """Adds lists, or makes zeros of them, element by element."""
    placement: Placement = VACANT
    elements = None
    for x in operation.inputs:
        value = plan.value(x)
        placement, elements = joined(placement, value.placement), joined_elements(elements, value.elements)
    if not all(plan.can_be(x, placement) for x in operation.inputs):
        placement = REPLICATE
    _put_list(plan, operation, placement, elements, *(plan.to(x, placement) for x in operation.inputs))


@rule("OptionalFromValue")
@always
def optional(plan: Planner, operation: Any) -> None:
    """Treats an optional value as a list of one element."""
    if len(operation.inputs) != 1:
        plan.replicate(operation)
        return
    (x,) = operation.inputs
    plan.settle_items(x)
    _put_list(plan, operation, plan.placement(x), elements_of(plan, x), plan.local(x))


@rule("OptionalNone")
@always
def no_value(plan: Planner, operation: Any) -> None:
    """Treats a missing value as an empty list."""
    _put_list(plan, operation, VACANT, None)


@rule("OptionalGetValue")
@always
def value_of(plan: Planner, operation: Any) -> None:
    """Returns the value of an optional."""
    value = plan.value(operation.inputs[0])
    shapes = [tf.TensorShape(None)] * len(operation.outputs)
    plan.emit(operation, [value.local], value.placement, output_shapes=shapes)
    for tensor in operation.outputs:
        put_element(plan, tensor, value.placement, plan.local(tensor), value.elements)
