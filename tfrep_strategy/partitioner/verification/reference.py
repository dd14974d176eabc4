"""The traced step of one device, repeated operation by operation on the values of the replicas.

Each operation gets the replicas' inputs. So if an operation differs, that operation is wrong: earlier errors are on
both sides, and differences by rounding cannot accumulate, for example in a unit that is on or off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import operation_definition
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import Replicate
from tfrep_strategy.partitioner.planner import in_order
from tfrep_strategy.partitioner.step import Observed, Seen
from tfrep_strategy.partitioner.verification.comparison import joined

_OF_VARIABLES = ("Assign", "ReadVariableOp", "Resource", "Rng", "Stateful", "VariableShape", "VarIsInitializedOp")
"""Prefixes of types of operations on a variable that can be repeated on another one."""
_READS = frozenset({"LookupTableFind", "LookupTableFindV2", "LookupTableSize", "LookupTableSizeV2"})
_ONLY_READ = _READS | {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"}
_AMBIGUOUS = frozenset({"BroadcastGradientArgs"})
"""Operations that may list or omit an axis of one element."""
_BODIES = frozenset({"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While"})
_SCANS = frozenset({"Cumprod", "Cumsum", "CumulativeLogsumexp"})
_DROPPED = frozenset({
    "_class", "_output_shapes", "_has_manual_control_dependencies", "_gradient_op_type", "_XlaCompile", "_XlaMustCompile",
    "_XlaScope", "_XlaSeparateCompiledGradients", marks.NAME,
})  # fmt: skip
_LARGE = 2**15
"""The number of elements from which TensorFlow compares bits faster than NumPy, including the cost of building."""
_ONLY_MARKED = frozenset({marks.GRADIENT, marks.SLICES})
"""Marks of operations that give the same result on one device."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of the trace: a tensor of its graph, or of the graph of a function that it calls.

    Attributes:
        path: The names of the calling operations, from the outermost on.
        tensor: The tensor.
        seen: Its observable values on the replicas.
    """

    path: tuple[str, ...]
    tensor: Any
    seen: Seen

    @property
    def key(self) -> tuple[str, ...]:
        """A unique key of the tensor in the trace."""
        return *self.path, self.tensor.name


def places(graph: Any, observed: Observed, path: tuple[str, ...] = ()) -> Iterator[Place]:
    """Yields the observable tensors of a trace, in the order of the step.

    Args:
        graph: The traced step.
        observed: Its observable tensors.
        path: The names of the calling operations.
    """
    for operation in in_order(graph):
        if operation.name in observed.calls:
            inner, of_inner = observed.calls[operation.name]
            yield from places(inner, of_inner, (*path, operation.name))
        for tensor in operation.outputs:
            # An unused output may have no value: a decomposition skips some.
            if tensor.name in observed.seen and (tensor.consumers() or any(tensor is x for x in graph.outputs)):
                yield Place(path, tensor, observed.seen[tensor.name])


@dataclasses.dataclass(frozen=True)
class Repeated:
    """One device's result of an operation.

    Attributes:
        tensor: The result.
        terms: An upper bound of the number of terms summed for one element.
    """

    tensor: Any
    terms: float


class Reference:
    """A traced step, as a function of the replicas' values in it.

    Args:
        graph: The traced step.
        observed: Its observable tensors.
        given: The tensors that operations can get from replicas.
        specs: The specifications of each replica's observable tensors.
        resources: Replacements for the resources of the step, by the names of the graph's inputs.
        is_forced: Whether operations get the replicas' values. Otherwise they get one device's values, if these can be computed.
    """

    def __init__(
        self,
        graph: Any,
        observed: Observed,
        given: Sequence[Place],
        specs: Sequence[Sequence[tf.TensorSpec]],
        resources: Mapping[str, Any],
        is_forced: bool = True,
    ) -> None:
        self._is_forced = is_forced
        self._found: dict[tuple[str, ...], Repeated] = {}
        self._large: list[tuple[str, ...]] = []
        self.lost: set[str] = set()
        """Names in `resources` that an operation has written that cannot be repeated, such as a loop that reads data."""

        def step(replicas: Sequence[Sequence[tf.Tensor]]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            self._found, self._large = {}, []
            wholes = {each.key: joined(each.seen.placement, [own[each.seen.local] for own in replicas]) for each in given}
            received = {each.key: [own[each.seen.whole] for own in replicas] for each in given if each.seen.whole is not None}
            inputs = {name: Repeated(tensor, 1.0) for name, tensor in resources.items()}
            known = self._walk(graph, observed, (), wholes | {key: own[0] for key, own in received.items()}, inputs)
            self.lost = {name for name in resources if name not in known}
            parted = []
            for place in given:
                whole, key = wholes[place.key], place.key
                if key in self._found and (whole.shape.num_elements() or 0) >= _LARGE:
                    is_copy = isinstance(place.seen.placement, Replicate)
                    beside = [own[place.seen.local] for own in replicas] if is_copy else [whole]
                    flags = [_differs(x, self._found[key].tensor) for x in [*beside, *received.get(key, [])]]
                    self._large.append(key)
                    parted.append(tf.reduce_any(tf.stack(flags)))
            return parted, [each.tensor for each in self._found.values()]

        self._run: Callable[..., Any] = tf.function(step, [[list(each) for each in specs]], autograph=False)
        self._run.get_concrete_function()
        self.terms = {key: each.terms for key, each in self._found.items()}
        """Number of summed terms for each repeated tensor, by `Place.key`."""

    def __call__(self, replicas: Sequence[Sequence[tf.Tensor]]) -> tuple[dict[tuple[str, ...], tf.Tensor], set[tuple[str, ...]]]:
        """Returns one device's results for repeatable tensors, and the keys of large results that are equal bit by bit.

        Args:
            replicas: The observable tensors of each replica.
        """
        parted, results = self._run([list(each) for each in replicas])
        same = {key for key, flag in zip(self._large, parted, strict=True) if not flag}
        return dict(zip(self.terms, results, strict=True)), same

    def _walk(
        self, graph: Any, observed: Observed, path: tuple[str, ...], given: Mapping[Any, Any], known: dict[str, Repeated]
    ) -> dict[str, Repeated]:
        """Adds the operations of a graph.

        Args:
            graph: The graph.
            observed: Its observable tensors.
            path: The names of the calling operations.
            given: The replicas' values, by `Place.key`.
            known: The inputs of the graph.

        Returns:
            The tensors that its operations get, by name.
        """
        made: dict[str, Any] = {}
        for operation in in_order(graph):
            inputs = [known[x.name] for x in operation.inputs if x.name in known]
            is_input = operation.type in ("Placeholder", "PlaceholderWithDefault")
            results: Sequence[Repeated | None] = ()
            if is_input:
                pass
            elif len(inputs) < len(operation.inputs) or not _can_be_repeated(operation, observed):
                for place, x in enumerate(operation.inputs):
                    if x.dtype == tf.resource and _may_write(operation, place):
                        known.pop(x.name, None)  # The value of the resource is unknown afterwards.
            elif operation.name in observed.calls:
                inner, of_inner = observed.calls[operation.name]
                taken = {own.name: each for own, each in zip(inner.inputs, inputs, strict=True)}
                inside = self._walk(inner, of_inner, (*path, operation.name), given, taken)
                results = [inside.get(x.name) for x in inner.outputs]
                for given_to, own in zip(operation.inputs, inner.inputs, strict=True):
                    if own.name not in inside:
                        known.pop(given_to.name, None)
            else:
                new = made[operation.name] = _again(operation, [each.tensor for each in inputs], made)
                terms = _terms(new) * max((each.terms for each in inputs), default=1.0)
                results = [Repeated(x, terms) for x in new.outputs]
            for tensor, result in zip(operation.outputs, results, strict=False):  # Further outputs may be for a gradient.
                if result is not None:
                    known[tensor.name] = result
                    if tensor.name in observed.seen and operation.type not in _AMBIGUOUS:
                        self._found[*path, tensor.name] = result
            for tensor in operation.outputs:
                key = (*path, tensor.name)
                # A shape may depend on the value of a constant. A given value would hide it.
                if key in given and (tensor.name not in known or (self._is_forced and operation.type != "Const")):
                    known[tensor.name] = Repeated(given[key], 1.0)
        return known


def _differs(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns whether two tensors differ in a bit, or in their shape."""
    shapes, values = (
        tf.raw_ops.NotEqual(x=a, y=b, incompatible_shape_error=False) for a, b in ((tf.shape(x), tf.shape(y)), (x, y))
    )
    return tf.reduce_any(shapes) | tf.reduce_any(values)


def _can_be_repeated(operation: Any, observed: Observed) -> bool:
    """Returns whether one device can repeat an operation with the same result and without visible effects, unlike random draws."""
    mark = marks.mark_of(operation)
    has_own = any(x.name in observed.own for x in (*operation.inputs, *operation.outputs))
    if has_own or (mark is not None and mark not in _ONLY_MARKED):
        return False
    if operation.type in ("PartitionedCall", "StatefulPartitionedCall") and operation.name in observed.calls:
        return True
    bodies = list(_functions(operation))
    if bodies:
        return all(graph is not None and _is_repeatable(graph) for graph in bodies)
    if not operation_definition(operation.type).is_stateful:
        draws = operation.type.startswith("Stateless")
        return not (draws and operation.node_def.attr["_XlaCompile"].b)  # XLA draws in another order.
    if operation.type in _READS:
        return True
    has_variable = any(x.dtype == tf.resource for x in operation.inputs)
    return has_variable and operation.type.startswith(_OF_VARIABLES)


def _may_write(operation: Any, place: int) -> bool:
    """Returns whether an operation may write the resource at an input's index. Bodies are searched."""
    bodies = list(_functions(operation))
    if not bodies:
        return operation.type not in _ONLY_READ
    place -= operation.type.removeprefix("Stateless") in ("Case", "If")  # The first input chooses the branch.
    for graph in bodies:
        handle = None if graph is None else graph.inputs[place]
        if handle is None:
            return True
        if any(_may_write(each, i) for each in handle.consumers() for i, x in enumerate(each.inputs) if x is handle):
            return True
    return False


def _is_repeatable(graph: Any) -> bool:
    return all(
        each.type in ("Assert", "NoOp", "Placeholder") or _can_be_repeated(each, Observed()) for each in graph.get_operations()
    )


def _functions(operation: Any) -> Iterator[Any]:
    """Yields the graphs of the functions that an operation calls; None for a function without a graph."""
    for attribute in operation.node_def.attr.values():
        for each in (attribute.func, *attribute.list.func):
            if each.name:
                graph = operation.graph
                while graph is not None and each.name not in graph._functions:
                    graph = getattr(graph, "outer_graph", None)
                yield getattr(graph._functions[each.name], "graph", None) if graph is not None else None


def _again(operation: Any, inputs: Sequence[tf.Tensor], made: Mapping[str, Any]) -> Any:
    """Adds an operation with other inputs to the graph that is being built."""
    attributes = {name: value for name, value in operation.node_def.attr.items() if name not in _DROPPED}
    before = [made[each.name] for each in operation.control_inputs if each.name in made]
    with tf.control_dependencies(before):
        return tf.compat.v1.get_default_graph().create_op(
            operation.type, list(inputs), [x.dtype for x in operation.outputs], name=operation.name, attrs=attributes
        )


def _terms(operation: Any) -> float:
    """Returns an estimate, from sizes, of the number of terms that an operation sums for an element of a result."""
    inputs = sorted((x.shape.num_elements() or 1 for x in operation.inputs if x.shape.rank is not None), reverse=True)
    if not inputs:
        return 1.0
    if operation.type in _SCANS or operation.type.removeprefix("Stateless") in _BODIES:
        return float(max(inputs))
    result = max(1, *(x.shape.num_elements() or 1 for x in operation.outputs if x.shape.rank is not None), 1)
    second = inputs[1] if len(inputs) > 1 else 1
    return max(1.0, inputs[0] / result, math.sqrt(inputs[0] * second / result))
