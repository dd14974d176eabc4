"""Runs the program of a replica for the replicas of this process, in the graph that is being built.

All replicas run one program. Its nodes between two levels of collectives form one `Segment`: a TensorFlow function that is made
once and called for each replica with its own arguments. It is written as a `FunctionDef`, without a graph.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfrep_strategy.core.tf import add_function, remove_function
from tfrep_strategy.partitioner.program import Collective, Node, Program, Tensor, live

_names = itertools.count()


class Segment:
    """Nodes as a TensorFlow function.

    Args:
        nodes: The nodes, in an order in which they can run.
        outputs: The results.
        compiled: Whether XLA compiles it.
        inputs: The arguments; by default the tensors that its nodes need.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        outputs: Sequence[Tensor],
        compiled: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self.outputs = outputs
        made = {id(node) for node in nodes}
        if inputs is None:
            used = (*(x for node in nodes for x in node.inputs), *outputs)
            inputs = list({x.name: x for x in used if x.node is None or id(x.node) not in made}.values())
        self.inputs = inputs
        self._bodies = [
            (node.name, name, Segment(live(body.nodes, body.results), body.results, inputs=body.inputs))
            for node in nodes
            for name, body in node.bodies
        ]
        self._is_placed: bool = any(node.device for node in nodes) or any(body._is_placed for *_, body in self._bodies)
        self._functions: dict[tuple[str, ...], str] = {}
        """The names of its functions: one for all replicas, or one for each replica's devices if the user has placed operations."""
        names = {x.name: f"input_{i}" for i, x in enumerate(self.inputs)}
        definition = self._definition = tf.compat.v1.GraphDef().library.function.add()
        for place, x in enumerate(self.inputs):
            definition.signature.input_arg.add(name=names[x.name], type=x.dtype.as_datatype_enum)
            if x.shape.rank is not None:
                definition.arg_attr[place].attr["_output_shapes"].list.shape.append(x.shape.as_proto())
        for i, x in enumerate(outputs):
            definition.signature.output_arg.add(name=f"output_{i}", type=x.dtype.as_datatype_enum)
            definition.ret[f"output_{i}"] = names.get(x.name, x.name)
        for node in nodes:
            controls = [f"^{each.name}" for each in node.control_inputs if id(each) in made]
            given = [names.get(x.name, x.name) for x in node.inputs]
            written = definition.node_def.add(name=node.name, op=node.type, input=[*given, *controls], device=node.device)
            for name, value in node.attributes.items():
                written.attr[name].CopyFrom(value)
            # After TensorFlow has inlined the function, operations behind a call wait only for these.
            if node.has_effects or any(x.dtype == tf.resource for x in node.inputs):
                definition.signature.control_output.append(node.name)
                definition.control_ret[node.name] = node.name
        self.has_effects = any(node.has_effects for node in nodes) or any(x.dtype == tf.resource for x in self.inputs)
        definition.signature.is_stateful = self.has_effects
        if compiled:
            definition.attr["_XlaMustCompile"].b = True

    @property
    def bodies(self) -> list[Segment]:
        """The bodies of its loops and branches, in the order of its nodes."""
        return [body for *_, body in self._bodies]

    def function(self, devices: Sequence[Sequence[str]], replica: int) -> str:
        """Returns the name of the function for a replica.

        Args:
            devices: The devices of each replica of this process.
            replica: The index of the replica among them.
        """
        key = tuple(devices[replica]) if self._is_placed else ()
        if key not in self._functions:
            self._functions[key] = f"__tfrep_segment_{next(_names)}"
            definition = tf.compat.v1.GraphDef().library.function.add()
            definition.CopyFrom(self._definition)
            definition.signature.name = self._functions[key]
            written = {node.name: node for node in definition.node_def}
            for node, attribute, body in self._bodies:
                attr = written[node].attr[attribute]
                called = attr.list.func.add() if attribute == "branches" else attr.func
                called.name = body.function(devices, replica)
            for node in definition.node_def:
                node.device = _device_of(node.device, devices, replica)
            add_function(definition)
            weakref.finalize(self, remove_function, self._functions[key])
        return self._functions[key]

    def __call__(
        self, inputs: Sequence[tf.Tensor], device: str, devices: Sequence[Sequence[str]], replica: int
    ) -> Sequence[tf.Tensor]:
        """Calls the function for a replica, on a device; see `function`."""
        call = tf.raw_ops.StatefulPartitionedCall if self.has_effects else tf.raw_ops.PartitionedCall
        name = tf.compat.v1.NameAttrList(name=self.function(devices, replica))
        with tf.device(device):
            results = call(args=inputs, Tout=[x.dtype for x in self.outputs], f=name)
        if isinstance(results, tf.Operation) or results is None:
            return []
        for result, x in zip(results, self.outputs, strict=True):
            if tf.is_symbolic_tensor(result) and x.dtype not in (tf.variant, tf.resource):
                result.set_shape(x.shape)
        return results


def _device_of(device: str, devices: Sequence[Sequence[str]], replica: int) -> str:
    """Returns the replica's counterpart of a device of replica 0; other devices are used by all replicas."""
    if not device:
        return ""
    wanted = tf.DeviceSpec.from_string(device)
    for place, each in enumerate(devices[0]):
        own = tf.DeviceSpec.from_string(each)
        if (own.device_type, own.device_index) == (wanted.device_type, wanted.device_index):
            return str(tf.DeviceSpec.from_string(devices[replica][place]).to_string())
    return device


class GroupTransport(Protocol):
    """The communication of the replicas of this process with each other, and with those of other processes, in groups of them.

    Attributes:
        devices: The device of each replica of this process.
        logical_devices: All devices of each of them.
    """

    devices: Sequence[str]
    logical_devices: Sequence[Sequence[str]]

    def sums(self, values: Sequence[Sequence[tf.Tensor]], gradients: Sequence[bool]) -> Sequence[Sequence[tf.Tensor]]:
        """Sums tensors over all replicas.

        Args:
            values: For each tensor, its value on each replica of this process, in the order in which the tensors are computed.
            gradients: Which of the tensors are gradients.

        Returns:
            For each tensor, its sum on each of these replicas.
        """

    def scattered(self, values: Sequence[Sequence[tf.Tensor]]) -> Sequence[Sequence[tf.Tensor]]:
        """Sums gradients of shape `[replicas, width]`, and gives each replica its row; otherwise like `sums`."""

    def rows_of_all(self, values: Sequence[Sequence[tf.Tensor]]) -> Sequence[Sequence[tf.Tensor]]:
        """Gathers vectors of one length as the rows of matrices; otherwise like `sums`."""

    def gathered(self, values: Sequence[tf.Tensor], axis: int, is_gradient: bool) -> Sequence[tf.Tensor]:
        """Concatenates the tensors of all replicas along an axis, in replica order."""

    def first(self, values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns the values of the first replica."""


class Transport(GroupTransport, Protocol):
    """The communication of all replicas.

    Attributes:
        groups: The communication along one axis of a mesh, by the group of a collective.
    """

    groups: Mapping[str, GroupTransport]

    def called(
        self, function: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]], values: Sequence[Sequence[tf.Tensor]]
    ) -> Sequence[Sequence[tf.Tensor]]:
        """Lets each replica call a function that communicates by itself.

        Args:
            function: Takes and returns tensors.
            values: The arguments of each replica of this process.

        Returns:
            The results of each of them.
        """


class Emitter:
    """A program that is ready to run.

    Args:
        program: The program of a replica.
        compiled: Whether XLA compiles its segments.
    """

    def __init__(self, program: Program, compiled: bool = False) -> None:
        self._program = program
        nodes = live(program.nodes, program.results)
        self._needed = {x.name for node in nodes for x in node.inputs} | {x.name for x in program.results}
        self._last = max((node.level for node in nodes), default=0)
        collectives = _by_level(node for node in _in_order_of_values(nodes) if isinstance(node, Collective))
        self._collectives = {level: list(_by_group(members).values()) for level, members in collectives.items()}
        plain = [node for node in nodes if isinstance(node, Node) and not node.talks]
        self._together = _by_level(_ControlFlow(node, compiled) for node in nodes if isinstance(node, Node) and node.talks)
        free = _free(plain, [x for x in program.arguments if x.dtype == tf.int32 and x.shape.rank == 0])
        self._segments = self._cut([node for node in plain if not node.once], free, nodes, compiled)
        self._once = self._cut([node for node in plain if node.once], free, nodes, False)

    def needs(self, argument: Tensor) -> bool:
        """Returns whether a node or a result uses an argument."""
        return argument.name in self._needed

    def _cut(self, nodes: list[Node], free: set[int], everything: list[Any], compiled: bool) -> dict[int, Segment]:
        """Makes a segment for each level."""
        chosen = {id(node) for node in nodes}
        used: dict[str, set[Any]] = collections.defaultdict(set)
        """The levels of the segments that use a tensor, by its name; "elsewhere" for other uses."""
        for node in everything:
            is_segment = isinstance(node, Node) and id(node) in chosen and id(node) not in free
            for x in node.inputs:
                used[x.name].add(node.level if is_segment else "elsewhere")
        for x in self._program.results:
            used[x.name].add("elsewhere")
        segments = {}
        for level, members in sorted(_by_level(node for node in nodes if id(node) not in free).items()):
            needed = _with_free(members, free)
            outputs = [x for node in members for x in node.outputs if used[x.name] - {level}]
            segments[level] = Segment(needed, outputs, compiled)
        # Free nodes that are used outside segments, such as by a collective or as a result.
        outside = [node for node in nodes if id(node) in free and any("elsewhere" in used[x.name] for x in node.outputs)]
        if outside:
            outputs = [x for node in outside for x in node.outputs if "elsewhere" in used[x.name]]
            segments[-1] = Segment(_with_free(outside, free), outputs, False)
        return segments

    def run(self, arguments: Sequence[Sequence[tf.Tensor]], transport: Transport) -> list[list[tf.Tensor]]:
        """Adds the program to the graph that is being built, for each replica of this process.

        Args:
            arguments: The arguments on each replica.
            transport: The communication between the replicas.

        Returns:
            The results of each replica.
        """
        names = [x.name for x in (self._program.arguments if self._program.inputs is None else self._program.inputs)]
        known: list[dict[str, Any]] = [dict(zip(names, given, strict=True)) for given in arguments]
        for level in range(-1, self._last + 1):
            if level in self._segments:
                segment = self._segments[level]
                for replica, own in enumerate(known):
                    given, device = [own[x.name] for x in segment.inputs], transport.devices[replica]
                    results = segment(given, device, transport.logical_devices, replica)
                    own.update(zip([x.name for x in segment.outputs], results, strict=True))
            if level in self._once:
                segment = self._once[level]
                given = [known[0][x.name] for x in segment.inputs]
                results = segment(given, transport.devices[0], transport.logical_devices, 0)
                for own in known:
                    own.update(zip([x.name for x in segment.outputs], results, strict=True))
            for collectives in self._collectives.get(level, ()):
                self._communicate(collectives, known, transport)
            for together in self._together.get(level, ()):
                together.run(known, transport)
        return [[own[x.name] for x in self._program.results] for own in known]

    def _communicate(self, collectives: Sequence[Collective], known: list[dict[str, Any]], of_all: Transport) -> None:
        """Lets the replicas of a group communicate, and adds the results to the values on each replica."""
        group = collectives[0].group
        transport: GroupTransport = of_all.groups[group] if group else of_all

        def note(tensor: Tensor, results: Sequence[tf.Tensor]) -> None:
            for own, result in zip(known, results, strict=True):
                if tf.is_symbolic_tensor(result):
                    result.set_shape(tensor.shape)
                own[tensor.name] = result

        def sent(each: Collective) -> list[tf.Tensor]:
            part, *after = each.inputs
            if not after:
                return [own[part.name] for own in known]
            values = []
            for own, device in zip(known, transport.devices, strict=True):
                with tf.device(device), tf.control_dependencies([own[x.name] for x in after]):
                    values.append(tf.identity(own[part.name]))
            return values

        def together(kinds: Sequence[str], talk: Callable[..., Any]) -> None:
            members = [each for each in collectives if each.kind in kinds]
            if members:
                values = list(map(sent, members))
                for each, results in zip(members, talk(values, [each.kind for each in members]), strict=True):
                    note(each.outputs[0], results)

        together(("sum", "gradient"), lambda values, kinds: transport.sums(values, [kind == "gradient" for kind in kinds]))
        together(("scatter",), lambda values, _: transport.scattered(values))
        together(("equal rows",), lambda values, _: transport.rows_of_all(values))
        for each in collectives:
            values = [[own[x.name] for x in each.inputs] for own in known]
            first = [own[0] for own in values]
            if each.kind in ("gather", "slices"):
                note(each.outputs[0], transport.gathered(first, each.axis, each.kind == "slices"))
            elif each.kind == "first":
                note(each.outputs[0], transport.first(first))
            elif each.kind == "shared":
                note(each.outputs[0], [first[0]] * len(known))
            elif each.kind == "call":
                for tensor, results in zip(each.outputs, zip(*of_all.called(each.function, values), strict=True), strict=True):
                    note(tensor, results)


class _ControlFlow:
    """A loop or branches with collectives: the replicas of a process run each round, or one branch, together.

    Args:
        node: The loop or the branches.
        compiled: Whether XLA compiles the operations between collectives.
    """

    def __init__(self, node: Node, compiled: bool) -> None:
        self._node, self.level = node, node.level
        self._bodies = [Emitter(body, compiled) for _, body in node.bodies]

    def run(self, known: list[dict[str, Any]], transport: Transport) -> None:
        """Adds the loop or the branches to the graph that is being built.

        Args:
            known: The values on each replica, by the names of tensors. The results are added.
            transport: The communication between the replicas.
        """
        run = self._run_loop if self._node.type.endswith("While") else self._run_branches
        results = run([[own[x.name] for x in self._node.inputs] for own in known], transport)
        for own, each in zip(known, results, strict=True):
            own.update(zip([x.name for x in self._node.outputs], each, strict=True))

    def _run_branches(self, given: list[list[Any]], transport: Transport) -> Any:
        inputs = [own[1:] for own in given]

        def taken(body: Emitter) -> Any:
            # A branch must return something.
            return lambda: [tf.constant(0), *(x for own in body.run(inputs, transport) for x in own)]

        if self._node.type.endswith("If"):
            _, *results = tf.cond(given[0][0], *map(taken, self._bodies))
        else:
            _, *results = tf.switch_case(given[0][0], list(map(taken, self._bodies)))
        return _of_each(results, len(given))

    def _run_loop(self, given: list[list[Any]], transport: Transport) -> Any:
        test, body = self._bodies
        carried, replicas = self._node.carried, range(len(given))

        def inputs(moving: Sequence[Any]) -> list[list[Any]]:
            own = [dict(zip(carried, each, strict=True)) for each in _of_each(moving, len(given))]
            return [[own[r].get(i, x) for i, x in enumerate(given[r])] for r in replicas]

        def next_(*moving: Any) -> list[Any]:
            return self._shaped(body.run(inputs(moving), transport))

        results = tf.while_loop(
            lambda *moving: test.run(inputs(moving), transport)[0][0],
            next_,
            self._shaped(given),
            shape_invariants=[self._shape(i) for _ in replicas for i in carried],
            parallel_iterations=self._node.attributes["parallel_iterations"].i,
        )
        own = [dict(zip(carried, each, strict=True)) for each in _of_each(results, len(given))]
        return [[own[r].get(i, x) for i, x in enumerate(given[r])] for r in replicas]

    def _shaped(self, given: list[list[Any]]) -> list[Any]:
        """Returns the carried tensors of each replica, with their known shapes."""
        moving = [(own[i], self._shape(i)) for own in given for i in self._node.carried]
        for tensor, shape in moving:
            if tf.is_symbolic_tensor(tensor):
                tensor.set_shape(shape)
        return [tensor for tensor, _ in moving]

    def _shape(self, place: int) -> tf.TensorShape:
        output = self._node.outputs[place]
        return tf.TensorShape([]) if output.dtype == tf.variant else output.shape


def _of_each(tensors: Sequence[Any], replicas: int) -> list[list[Any]]:
    """Splits a list of tensors by replica; each replica has equally many."""
    each = len(tensors) // replicas
    return [list(tensors[r * each : (r + 1) * each]) for r in range(replicas)]


def _in_order_of_values(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes in the order in which their inputs are computed. The trace asks for gradients in another order."""
    places = {id(node): place for place, node in enumerate(nodes)}
    return sorted(nodes, key=lambda node: max((places.get(id(x.node), -1) for x in node.inputs), default=-1))


def _by_level(nodes: Any) -> dict[int, list[Any]]:
    levels: dict[int, list[Any]] = collections.defaultdict(list)
    for node in nodes:
        levels[node.level].append(node)
    return levels


def _by_group(collectives: Sequence[Collective]) -> dict[str, list[Collective]]:
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for each in collectives:
        groups[each.group].append(each)
    return groups


def _free(nodes: Sequence[Node], given: Sequence[Tensor]) -> set[int]:
    """Returns the ids of cheap nodes that each segment makes for itself: constants and sizes, of given ones."""
    free: set[int] = set()
    cheap = {x.name for x in given}
    for node in nodes:
        is_free = not node.has_effects and not node.control_inputs and not node.once and all(x.name in cheap for x in node.inputs)
        if is_free and node.type in _FREE:
            free.add(id(node))
            cheap.update(x.name for x in node.outputs)
    return free


_FREE = frozenset({
    "AddV2", "Cast", "ConcatV2", "Const", "Equal", "ExpandDims", "FloorDiv", "GatherV2", "Identity", "Maximum", "Minimum", "Mul",
    "Pack", "Prod", "Reshape", "Slice", "Squeeze", "StridedSlice", "Sub", "TensorScatterUpdate",
})  # fmt: skip


def _with_free(nodes: Sequence[Node], free: set[int]) -> list[Node]:
    """Returns nodes and the free ones that they need, in an order in which they can run."""
    ordered: list[Node] = []
    seen: set[int] = set()

    def add(node: Node) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for x in node.inputs:
            if x.node is not None and id(x.node) in free:
                add(x.node)
        ordered.append(node)

    for node in nodes:
        add(node)
    return ordered
