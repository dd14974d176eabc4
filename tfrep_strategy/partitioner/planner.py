"""Partitions the traced step of one device: finds the placement of each tensor, and makes the program of a replica.

Operations are visited after their inputs. The rule of an operation (`rules/`) looks at the placements of its inputs. It may ask
for other placements, which may add a collective, and adds the operation to the program, with local inputs. An operation
without a rule gets whole inputs: that is slower, but right.

The idea comes from GSPMD (Xu et al., arXiv:2105.04663) and DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import add_function, operation_definition
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner import sizes as by_value
from tfrep_strategy.partitioner.placements import (
    OF_LAYOUT,
    REPLICATE,
    WHOLE,
    Items,
    Own,
    Partial,
    Parts,
    Placement,
    Replicate,
    Rows,
    Shard,
    is_number,
)
from tfrep_strategy.partitioner.program import ASKS_FOR_SIZES, Gathered, Program, Tensor
from tfrep_strategy.partitioner.values import OwnRows, Value, Values

Rule = Callable[["Planner", Any], None]
RULES: dict[str, Rule] = {}


MARKED, OF_OWN, OF_PARTS = "(marked)", "(of own values)", "(of parts)"
"""Keys of the rules for operations with a mark, on values that differ between replicas, and on tensors in parts."""


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of operations of these types.

    A rule gets the planner and an operation of the traced graph with an input that is not replicated. It sets the value of
    each output, and calls `Planner.replicate` for cases that it does not handle.
    """

    def register(function: Rule) -> Rule:
        for each in types:
            assert each not in RULES, each
            RULES[each] = function
        return function

    return register


LEADING: dict[str, Callable[[Planner, Any], Any]] = {}
"""For types of operations that may bring back lost rows: a function that returns the leading size of the result."""


def leading(*types: str) -> Callable[[Any], Any]:
    """Makes a function the one that returns the leading size of results of operations of these types."""

    def register(function: Any) -> Any:
        LEADING.update(dict.fromkeys(types, function))
        return function

    return register


ON_PURPOSE: dict[str, str] = {}
"""For types of operations that are replicated because their rows cannot be sharded: the reason."""


def always(function: Rule) -> Rule:
    """Makes a rule apply even if all inputs are replicated."""
    function.is_always_called = True  # type: ignore[attr-defined]
    return function


class Planner(Values):
    """Makes the program of a replica from a traced graph.

    Args:
        program: The program, to which nodes are added.
        rows: Its arguments for the rows.
        local_replicas: Number of replicas of one process.
    """

    def __init__(self, program: Program, rows: OwnRows, local_replicas: int) -> None:
        super().__init__(program, rows)
        self.local_replicas = local_replicas
        self.without_rule: dict[str, Any] = {}
        """The first operation of each type that got the rows of all replicas because it has no rule."""
        self.called: dict[str, tuple[Any, Planner]] = {}
        """The graph and the plan of called functions, by the names of the calling operations."""
        self.bodies: dict[str, list[tuple[Any, Planner | None]]] = {}
        """The graphs and plans of the bodies of loops and branches, by the names of operations; no plan for a loop over rows."""
        self.beside: dict[int, int] = {}
        """The numbers in placements of rows that are sharded beside those of the batch, by their sizes."""
        self.of_model = False
        """Whether it plans along the axis of a mesh whose replicas have the same rows."""
        self.is_planned_again = False
        """Whether its program is planned along another axis afterwards, and so keeps its marks."""
        self.parts_of_layouts = 0
        """The number of parts of weights that layouts shard; 0 if none does."""
        self.has_own_batch = False
        """Whether the rows belong to a batch that begins in this graph."""
        self._controls: dict[str, list[Any]] = {}
        self._accesses: dict[str, tuple[Tensor, list[Any], list[Any]]] = {}

    # Methods for rules.

    def put(self, tensor: Any, placement: Placement, local: Tensor, **details: Any) -> None:
        """Sets the value of a tensor of the traced graph."""
        if local.shape.rank is None and tensor.dtype != tf.variant:
            shape = tensor.shape
            if isinstance(placement, Parts) and tensor.dtype != tf.resource:
                shape = tf.TensorShape([placement.width])
            if isinstance(placement, Shard):
                shape = placement.local_shape(shape)
            local.shape = shape
        self.values[tensor.name] = Value(placement, local, **details)

    def put_same(self, operation: Any, tensor: Any) -> None:
        """Gives the only output of an operation the value of a tensor. An operation with control inputs stays an operation."""
        value, (result,) = self.value(tensor), operation.outputs
        if self._manual_controls(operation):
            self.emit(operation, self.locals(operation), value.placement)
        else:
            self.put(result, value.placement, value.local)
        self.value(result).elements = value.elements

    def node_of(self, operation: Any) -> Any:
        """Returns the node of an operation."""
        (node,) = self._controls[operation.name]
        return node

    def put_node(self, operation: Any, node: Any) -> None:
        """Sets the node of an operation, for operations that wait for it."""
        self._controls[operation.name] = [node]
        self.program.run_after(node, self._manual_controls(operation))

    def emit(self, operation: Any, inputs: Sequence[Tensor], *placements: Placement, **changes: Any) -> None:
        """Adds an operation with local inputs. Its outputs have the given placement, or one each."""
        node = self.program.copy_of(operation, inputs, self._manual_controls(operation), **changes)
        self._controls[operation.name] = [node]
        each = placements * len(node.outputs) if len(placements) == 1 else placements
        for tensor, local, placement in zip(operation.outputs, node.outputs, each, strict=True):
            self.put(tensor, placement, local)

    def emit_filled(
        self, operation: Any, inputs: Sequence[Tensor], sharded: Sequence[int], shard: Shard, placement: Placement
    ) -> None:
        """Adds an operation whose kernels fail without rows. A replica without rows gives it a row of zeros.

        Without rows, TensorFlow's oneDNN kernels (2.21, on CPUs) return a wrong shape, leave a gradient unwritten, or end the
        process.

        Args:
            operation: The operation of the traced graph.
            inputs: The local inputs.
            sharded: The indices of sharded inputs.
            shard: Their placement.
            placement: The placement of the results. Zeros do not change a sum.
        """
        filled = [self.filled(x, shard, operation.inputs[i]) if i in sharded else x for i, x in enumerate(inputs)]
        self.emit(operation, filled, placement)
        if isinstance(placement, Shard):
            for tensor in operation.outputs:
                rank = self.rank(tensor)
                assert rank is not None
                begin = self.program.constant([0] * rank)
                size = self.vector(rank, placement.axis, -1, self.elements(placement).count)
                self.put(tensor, placement, self.program.add("Slice", self.local(tensor), begin, size))

    def filled(self, local: Tensor, shard: Shard, tensor: Any) -> Tensor:
        """Returns the own rows, or a row of zeros. If nothing is padded, nothing is copied.

        It does not use `Pad`: oneDNN fuses it with a convolution, and the fused kernel ignores padded rows.
        """
        add, rank = self.program.add, self.rank(tensor)
        assert rank is not None
        one = self.program.constant([[0, shard.per_row if i == shard.axis else 0] for i in range(rank)])
        paddings = add("Maximum", add("Sub", one, self.elements(shard).count), 0)
        return add("PadV2", local, paddings, self.program.constant(0, local.dtype))

    def locals(self, operation: Any) -> list[Tensor]:
        """Returns the local tensor of each input."""
        return [self.local(x) for x in operation.inputs]

    def replicate(self, operation: Any) -> None:
        """Adds an operation that every replica runs on whole inputs."""
        if any(isinstance(self.placement(x), Shard) for x in operation.inputs):
            self.without_rule.setdefault(operation.type, operation)
        inputs = [self.replicated(x) for x in operation.inputs]
        if operation_definition(operation.type).is_stateful:
            self._add_stateful(operation, inputs)
        else:
            self.emit(operation, inputs, REPLICATE)

    def settle_items(self, tensor: Any, keeps_layouts: bool = False) -> None:
        """Replicates a list whose elements are rows, and rows other than those of the batch.

        Args:
            tensor: The tensor.
            keeps_layouts: Whether what layouts shard stays sharded.
        """
        value = self.value(tensor)
        rows = value.placement.rows if isinstance(value.placement, Shard) else 0
        if rows and not (keeps_layouts and rows == OF_LAYOUT):
            self.put(tensor, REPLICATE, self.replicated(tensor))
        elif isinstance(value.placement, Items):
            self.without_rule.setdefault("TensorListFromTensor", tensor.op)
            self.put(tensor, REPLICATE, self.replicated(tensor), elements=value.elements)

    def begin_batch(self, whole: Tensor, traced_rows: int | None, replicas: Tensor) -> bool:
        """Continues with the rows of a batch that the graph reads, if it has no other rows yet.

        Args:
            whole: A tensor of the batch.
            traced_rows: Its number of rows, if the trace knows it.
            replicas: Number of replicas.

        Returns:
            Whether there were no other rows.
        """
        if any(isinstance(each.placement, Shard) and each.placement.rows != OF_LAYOUT for each in self.values.values()):
            return False
        total = self.program.add("Slice", self.program.add("Shape", whole), [0], [1])
        self.rows = self._shared_by(self.program.add("Squeeze", total, squeeze_dims=[0]), replicas)
        self.traced_rows, self.has_own_batch = traced_rows, True
        return True

    def begin_rows(self, number: int, replicas: int) -> None:
        """Shards random numbers for a number of rows that differs from the batch's."""
        constant = self.program.constant
        self.beside[number] = self.put_rows(self._shared_by(constant(number), constant(replicas))).rows

    def begin_layouts(self, replicas: int) -> None:
        """Allows placements along the parts of weights: each replica has one part."""
        self.parts_of_layouts, constant, replica = replicas, self.program.constant, self.rows.replica
        self.chosen[OF_LAYOUT] = OwnRows(replica, constant(1), constant(replicas), replica)
        self.chosen[WHOLE] = OwnRows(constant(0), self.rows.total, self.rows.total, replica)

    def _shared_by(self, total: Tensor, replicas: Tensor) -> OwnRows:
        """Returns a replica's rows of this total: the sizes differ by at most one."""
        add, replica = self.program.add, self.rows.replica
        each, longer = add("FloorDiv", total, replicas), add("FloorMod", total, replicas)
        start = add("AddV2", add("Mul", replica, each), add("Minimum", replica, longer))
        count = add("AddV2", each, add("Cast", add("Less", replica, longer), DstT=tf.int32))
        return OwnRows(start, count, total, replica)

    # The walk.

    def run(self, graph: Any) -> None:
        """Plans a graph whose inputs have values."""
        for operation in in_order(graph):
            self.plan(operation)

    def plan(self, operation: Any) -> None:
        """Plans an operation whose inputs are planned."""
        if operation.type in ("Placeholder", "PlaceholderWithDefault") and operation.outputs[0].name in self.values:
            return
        if operation.type not in _TAKE_PARTS and any(isinstance(self.placement(x), Parts) for x in operation.inputs):
            RULES[OF_PARTS](self, operation)
        else:
            self.plan_by_rule(operation)
        if self.parts_of_layouts:
            self._note_dims(operation)
            self._sum_once(operation)
        if operation.type in LEADING:
            self._cut_rows(operation)
        if operation.type not in _SIZED_BY_RULE:
            known = [self.sizes.get(x.name) for x in operation.inputs]
            for tensor, value in zip(operation.outputs, by_value.computed(operation, known), strict=True):
                if value is not None:
                    self.sizes[tensor.name] = value

    def plan_by_rule(self, operation: Any) -> None:
        """Plans an operation by the rule of its type, or of its mark."""
        found = RULES.get(operation.type)
        if marks.mark_of(operation) is not None:
            found = RULES[MARKED]
        elif operation.type not in _TAKE_OWN and any(isinstance(self.placement(x), Own) for x in operation.inputs):
            found = RULES[OF_OWN]
        is_replicated = all(isinstance(self.placement(x), Replicate) for x in operation.inputs)
        if found is None or (is_replicated and not hasattr(found, "is_always_called")):
            self.replicate(operation)
        else:
            found(self, operation)

    def plan_with_whole(self, operation: Any) -> None:
        """Plans an operation on the whole of tensors that replicas hold in parts.

        The value of a variable is gathered for one operation, or for several in a row: one value after the other, while the last
        operation runs that got one. So about two of them are in memory.
        """
        parts = {x.name: x for x in operation.inputs if isinstance(self.placement(x), Parts) and x.dtype != tf.resource}
        kept = {name: self.values[name] for name in parts}
        new: list[Gathered] = []
        for name, x in parts.items():
            placement = kept[name].placement
            after: tuple[Tensor, ...] = ()
            if isinstance(placement, Parts) and placement.is_read:
                new.append(self._gathered_now(kept[name].local, len(new)))
                after = new[-1].after
            whole = self.seen[name] = self.gathered(x, after)
            self.values[name] = Value(REPLICATE, whole)
        self.plan_by_rule(operation)
        self.values.update(kept)
        results = [self.local(x) for x in operation.outputs if x.dtype not in (tf.resource, tf.variant)]
        for each in new:
            each.done = results[0] if results else each.done

    def _gathered_now(self, part: Tensor, beside: int) -> Gathered:
        """Returns the record of a gathered variable, a new one unless it was gathered just before.

        Args:
            part: The replica's part.
            beside: The number of variables that are gathered for the same operation, before this one.
        """
        earlier = self.program.gathered
        for each in earlier[-2:]:
            if each.part is part:
                return each
        before = [each.done for each in earlier[: len(earlier) - beside][:-1] if each.done is not None]
        after = (*before[-1:], *(each.received for each in earlier[-1:]))
        earlier.append(Gathered(part, after, self.program.send("equal rows", part, after=after)))
        return earlier[-1]

    def _note_dims(self, operation: Any) -> None:
        """Records sizes of results that neither the trace nor a rule knows. Products along a layout's axis need them."""
        dims = [self.dims(x) if x.dtype.is_floating else None for x in operation.inputs]
        are_known = all(each is not None and all(is_number(d) or _is_whole(d) for d in each) for each in dims)
        if not are_known or not any(_is_whole(d) for each in dims for d in each or ()):
            return
        if any(None in (self.dims(x) or [None]) for x in operation.outputs if x.dtype.is_floating):
            for tensor, found in zip(operation.outputs, by_value.inferred(operation, [each or [] for each in dims]), strict=True):
                if found is not None:
                    self.known_dims[tensor.name] = found

    def _sum_once(self, operation: Any) -> None:
        """Sums addends that several operations take. As large as an activation, they would else be summed behind each of them."""
        for tensor in operation.outputs:
            is_sum = isinstance(self.placement(tensor), Partial) and tensor.dtype.is_floating and tensor.shape.rank != 0
            if is_sum and sum(each.type not in ASKS_FOR_SIZES for each in tensor.consumers()) > 1:
                self.replicated(tensor)

    def _cut_rows(self, operation: Any) -> None:
        """Gives each replica its rows of a whole result that has the rows of the batch, such as ragged rows made dense."""
        (result,) = operation.outputs
        size, rank = LEADING[operation.type](self, operation), result.shape.rank
        if not isinstance(size, Rows) or size.rows == WHOLE or not isinstance(self.placement(result), Replicate) or rank is None:
            return
        whole, shard = self.local(result), size.at(0)
        self.known_dims[result.name] = [size, *result.shape.as_list()[1:]]
        self.put(result, shard, self.cut(whole, shard, rank))
        self.whole[result.name] = whole

    # Effects.

    def access(self, handle: Tensor, node: Any, writes: bool) -> None:
        """Orders a node among those that use the same resource."""
        _, written, read = self._accesses.setdefault(handle.name, (handle, [], []))
        before = [*written, *read] if writes else written
        self.program.run_after(node, before)
        if writes:
            self._accesses[handle.name] = (handle, [node], [])
        else:
            read.append(node)

    def last_read(self, handle: Tensor, dtype: tf.DType) -> Tensor | None:
        """Returns the value of a variable that was read since the last write; None if it was not read."""
        _, _, read = self._accesses.get(handle.name, (handle, [], []))
        for node in read:
            if getattr(node, "type", None) == "ReadVariableOp" and node.outputs[0].dtype == dtype:
                return node.outputs[0]
        return None

    def add_write(self, operation: Any, inputs: Sequence[Tensor]) -> None:
        """Adds an operation that writes the variable whose handle is its first input."""
        node = self.program.copy_of(operation, inputs, self._manual_controls(operation))
        node.has_effects = True
        node.once = self.value(operation.inputs[0]).is_shared and self.local_replicas > 1
        self._controls[operation.name] = [node]
        self.access(inputs[0], node, writes=True)

    # Functions.

    def function(self, operation: Any, name: str) -> Any:
        """Returns the graph of a function that an operation calls; None if only its definition is known."""
        graph = operation.graph
        while name not in graph._functions:
            graph = graph.outer_graph
        found = graph._functions[name]
        if not hasattr(found, "graph"):
            add_function(found.definition)
        return getattr(found, "graph", None)

    def note_without_rule(self, found: dict[str, Any]) -> None:
        """Records operations of a body that get the rows of all replicas because they have no rule."""
        for type_, operation in found.items():
            self.without_rule.setdefault(type_, operation)

    def accesses(self) -> Iterator[tuple[Tensor, bool]]:
        """Yields the resources that were used, and whether each was written."""
        for handle, written, _ in self._accesses.values():
            yield handle, bool(written)

    def inside(self, graph: Any, tensors: Sequence[Any]) -> Planner:
        """Returns a planner for the graph of a function that is called with tensors of this one."""
        inner = Planner(self.program, self.rows, self.local_replicas)
        inner.without_rule, inner._accesses, inner.traced_rows = self.without_rule, self._accesses, self.traced_rows
        inner.chosen, inner.beside, inner.parts_of_layouts = self.chosen, self.beside, self.parts_of_layouts
        inner.of_model, inner.is_planned_again = self.of_model, self.is_planned_again
        for own, given in zip(graph.inputs, tensors, strict=True):
            self.hand_over(self, given, inner, own)
        return inner

    @staticmethod
    def hand_over(giver: Planner, given: Any, taker: Planner, taken: Any) -> None:
        """Gives one planner the knowledge of another one about a tensor."""
        taker.values[taken.name] = giver.value(given)
        if given.name in giver.sizes:
            taker.sizes[taken.name] = giver.sizes[given.name]
        if given.name in giver.whole:
            taker.whole[taken.name] = giver.whole[given.name]
        if (dims := giver.dims_held(given)) is not None:
            taker.known_dims[taken.name] = dims

    def _manual_controls(self, operation: Any) -> list[Any]:
        if "_has_manual_control_dependencies" not in operation.node_def.attr:
            return []
        return [node for x in operation.control_inputs for node in self._controls_of(x)]

    def _controls_of(self, operation: Any) -> list[Any]:
        """Returns the nodes to wait for, given an operation. For a `NoOp` these are the nodes that it waits for."""
        if operation.name in self._controls:
            return self._controls[operation.name]
        if operation.type == "NoOp":
            return [node for x in operation.control_inputs for node in self._controls_of(x)]
        return [self.values[x.name].local.node for x in operation.outputs if self.values[x.name].local.node is not None]

    def _add_stateful(self, operation: Any, inputs: list[Tensor]) -> None:
        """Adds an operation that has effects, or depends on more than its inputs."""
        handles = [x for x in operation.inputs if x.dtype == tf.resource]
        is_own = bool(handles) and not any(self.value(x).is_shared for x in handles)
        node = self.program.copy_of(operation, inputs, self._manual_controls(operation))
        node.has_effects = operation.type not in _WITHOUT_EFFECTS
        node.once = not is_own and self.local_replicas > 1
        self._controls[operation.name] = [node]
        for handle in handles:
            self.access(self.local(handle), node, writes=True)
        if not handles and node.has_effects:
            self.access(_EVERYTHING_ELSE, node, writes=True)
        varies = not handles and not _is_seeded(operation)
        for tensor, local in zip(operation.outputs, node.outputs, strict=True):
            can_travel = tensor.dtype not in (tf.variant, tf.resource)
            if node.once or (varies and can_travel):
                local = self.program.send("first" if varies and can_travel else "shared", local)
            self.put(tensor, REPLICATE, local, is_shared=node.once and tensor.dtype == tf.resource)


_EVERYTHING_ELSE = Tensor(None, "effects", tf.resource)
_WITHOUT_EFFECTS = frozenset({
    "VarHandleOp", "VarIsInitializedOp", "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt",
})  # fmt: skip
_TAKE_PARTS = frozenset({"IdentityN", "PartitionedCall", "StatefulPartitionedCall"})
"""Operations whose rules handle tensors in parts."""
_TAKE_OWN = frozenset({
    "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "Case", "IdentityN", "If", "PartitionedCall",
    "ReadVariableOp", "StatefulPartitionedCall", "StatelessCase", "StatelessIf", "VariableShape",
})  # fmt: skip
"""Operations whose rules handle values that differ between replicas."""
_SIZED_BY_RULE = frozenset({"Shape", "ShapeN", "Size", "Rank", "Const"})


def _is_whole(size: Any) -> bool:
    return isinstance(size, Rows) and size.rows == WHOLE


def _is_seeded(operation: Any) -> bool:
    """Returns whether a random operation has a seed, so that all ranks draw the same numbers."""
    attributes = operation.node_def.attr
    return "seed" in attributes and bool(attributes["seed"].i or attributes["seed2"].i)


def in_order(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph, each after those that it needs.

    The order of creation does not suffice: gradients add inputs to existing loops.
    """
    done: set[str] = set()
    for last in graph.get_operations():
        stack = [last]
        while stack:
            operation = stack[-1]
            if operation.name in done:
                stack.pop()
                continue
            needed = [x.op for x in operation.inputs] + list(operation.control_inputs)
            missing = [x for x in needed if x.name not in done and x.graph is graph]
            if missing:
                stack += missing
                continue
            done.add(operation.name)
            stack.pop()
            yield operation
