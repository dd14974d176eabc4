"""The program that every replica runs: nodes that become TensorFlow functions, with collectives between them.

Some operations give all ranks the same bits for the same inputs, whatever their number of threads. Kernels that add many numbers
divide them among threads, so ranks with other numbers of threads round differently. Values that each rank computes
alone, such as its copy of a variable, would drift apart. They are made equal where they are used (`Values.agreed`).

`prune` removes unneeded values from loops, such as lists of sizes for gradients that are not computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.tf import operation_definition
from tfrep_strategy.errors import CannotPartitionError, message

SAME_BITS = {
    "BiasAdd", "BroadcastTo", "ConcatV2", "ConjugateTranspose", "Const", "Empty", "EmptyTensorList", "EnsureShape", "ExpandDims",
    "Fill", "GatherNd", "GatherV2", "IdentityN", "MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixSetDiagV3",
    "Max", "Min", "MirrorPad", "OneHot", "Pack", "Pad", "PadV2", "Placeholder", "PlaceholderWithDefault", "Range",
    "ReadVariableOp", "Reshape", "ResourceGather", "ReverseV2", "Roll", "Select", "Slice", "Split", "SplitV", "Squeeze",
    "StridedSlice", "StridedSliceGrad", "TensorListConcatV2", "TensorListFromTensor", "TensorListGather",
    "TensorListGetItem", "TensorListPopBack", "TensorListPushBack", "TensorListReserve", "TensorListResize",
    "TensorListSetItem", "TensorListStack", "TensorScatterUpdate", "Tile", "TopKV2", "Transpose", "Unpack",
}  # fmt: skip
"""Operations that move elements. Rules add elementwise operations, and those that draw numbers."""

CALLS_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
"""Operations whose results are unknown."""

ASKS_FOR_SIZES = frozenset({
    "OnesLike", "Rank", "Shape", "ShapeN", "Size", "TensorListElementShape", "TensorListLength", "ZerosLike",
})  # fmt: skip
"""Operations that do not use the elements of their inputs."""

ADDS_UP_ROWS = frozenset({"Mean", "Prod", "Sum"})
"""One thread adds each of several results. It also adds a single result of few elements."""

AT_ONCE = 1 << 15
"""The number of elements that one thread adds, for any number of threads (Eigen, which estimates cycles)."""


_NOT_COPIED = frozenset({
    "_output_shapes", "_class", "_user_specified_name", "_has_manual_control_dependencies", "_gradient_op_type",
    "_XlaMustCompile", "_XlaScope", "_XlaSeparateCompiledGradients", "_noinline",
})  # fmt: skip
"""Attributes of traced operations that do not affect their results, or name operations of the traced graph."""

_ATTRIBUTES_OF_BODIES = ("_lower_using_switch_merge", "_stateful_parallelism")
"""Attributes that affect how loops and branches run."""


class Tensor:
    """A tensor of the program of one replica: an output of a node, or an argument.

    Attributes:
        node: The node that makes it; None for an argument.
        name: Its name in a `FunctionDef`.
        dtype: Its dtype.
        level: Number of consecutive collectives before it.
        shape: Its local shape, as far as known.
        varies: Whether ranks may have computed different bits of a value that should be equal on all.
    """

    __slots__ = ("dtype", "level", "name", "node", "shape", "varies")

    def __init__(self, node: Any, name: str, dtype: tf.DType, level: int = 0) -> None:
        self.node, self.name, self.dtype, self.level = node, name, dtype, level
        self.shape = tf.TensorShape(None)
        self.varies = False

    def __repr__(self) -> str:
        return f"Tensor({self.name!r})"


class Node:
    """An operation of the program.

    Attributes:
        type: The type of the operation.
        inputs: Tensors.
        control_inputs: Nodes that must run before.
        attributes: The attributes of the operation.
        has_effects: Whether it must run even if its outputs are not needed.
        once: Whether it runs once in a process, for all its replicas.
        bodies: For a loop or branches: the attribute of each body, and its program.
        talks: Whether its bodies have collectives, so that the replicas of a process run it together.
        carried: For a loop: the indices of the inputs that it changes.
        traced: Its operation in the traced graph, if any.
        device: The device that the user has chosen, of replica 0 or of all replicas; empty if none.
    """

    __slots__ = (
        "attributes", "bodies", "carried", "control_inputs", "device", "has_effects", "inputs", "level", "name", "once",
        "outputs", "talks", "traced", "type",
    )  # fmt: skip

    def __init__(
        self,
        type_: str,
        name: str,
        inputs: Sequence[Tensor],
        control_inputs: Sequence[Any],
        attributes: dict[str, Any],
        bodies: Sequence[tuple[str, Program]] = (),
    ) -> None:
        self.type, self.name, self.attributes, self.bodies = type_, name, attributes, bodies
        self.inputs, self.control_inputs = list(inputs), list(control_inputs)
        self.level = max([*(x.level for x in inputs), *(x.level_after for x in control_inputs)], default=0)
        self.has_effects = any(node.has_effects for _, body in bodies for node in body.nodes)
        self.carried: list[int] = []
        self.traced: Any = None
        self.device = ""
        self.once, self.talks = False, any(body.talks for _, body in bodies)
        self.outputs = [
            Tensor(self, f"{name}:{output}", dtype, self.level_after)
            for output, dtype in _outputs(operation_definition(type_), attributes)
        ]
        given = type_ not in ASKS_FOR_SIZES and any(x.varies for x in inputs)
        rounds = type_ not in SAME_BITS | ADDS_UP_ROWS | ASKS_FOR_SIZES
        for place, each in enumerate(self.outputs):
            handed_on = inputs[place].varies if type_ == "IdentityN" else given
            each.varies = handed_on or type_ in CALLS_PYTHON or (rounds and (each.dtype.is_floating or each.dtype.is_complex))

    @property
    def level_after(self) -> int:
        """The level of nodes behind it. A node that the replicas of a process run together runs after the others of its level."""
        return self.level + (self.once or self.talks)

    def __repr__(self) -> str:
        return f"Node({self.type}, {self.name!r})"


class Collective:
    """A communication between the replicas.

    Attributes:
        kind: `"sum"`; `"gather"`, along `axis`; `"equal rows"`: a gather of one row from each replica; `"scatter"`: a sum whose
            rows go to one replica each; `"first"`: the value of replica 0 of the run; `"shared"`: the value of the first replica of
            the process; `"call"`: a function that communicates by itself. `"gradient"` is a sum and `"slices"` a gather that travel
            as gradients do.
        inputs: The tensor that a replica sends, and tensors that are computed before; for a call, all its arguments.
        outputs: The tensor that each replica gets.
        function: The called function.
        group: The axis of the mesh along which it communicates; empty for all replicas.
    """

    control_inputs: tuple[Any, ...] = ()
    has_effects = False
    talks = True

    def __init__(self, kind: str, sent: Sequence[Tensor], name: str, axis: int = 0, group: str = "") -> None:
        self.kind, self.inputs, self.axis, self.name, self.group = kind, list(sent), axis, name, group
        self.function: Any = None
        self.level = max(x.level for x in sent)
        self.level_after = self.level + 1
        self.outputs = [Tensor(self, name, sent[0].dtype, self.level_after)]
        self.outputs[0].varies = kind == "shared" and sent[0].varies


@dataclasses.dataclass
class Gathered:
    """A value of a sharded variable that was gathered for an operation.

    Attributes:
        part: The replica's part.
        after: The tensors that are computed before it is gathered.
        received: The parts of all replicas.
        done: A result of the operation; None if it has none.
    """

    part: Tensor
    after: tuple[Tensor, ...]
    received: Tensor
    done: Tensor | None = None


class Program:
    """The program of one replica, while it is being made.

    Args:
        group: The group of its collectives, as in `Collective`.

    Attributes:
        arguments: Values that differ between replicas, or are passed to the program.
        nodes: Nodes and collectives, in an order in which they can run.
        results: The results.
        inputs: For a body: the arguments that it gets.
        gathered: The values of sharded variables that were gathered for operations, in the order of these.
    """

    _names = itertools.count()

    def __init__(self, group: str = "") -> None:
        self.group = group
        self.arguments: list[Tensor] = []
        self.nodes: list[Any] = []
        self.results: list[Tensor] = []
        self.inputs: list[Tensor] | None = None
        self.gathered: list[Gathered] = []
        self._made: dict[Any, list[Tensor]] = {}

    @property
    def talks(self) -> bool:
        """Whether it has collectives, or a node that runs once in a process."""
        return any(node.talks or getattr(node, "once", False) for node in live(self.nodes, self.results))

    def needs(self, argument: Tensor) -> bool:
        """Returns whether a node uses an argument."""
        return any(x is argument for node in live(self.nodes, self.results) for x in node.inputs)

    def uses(self, argument: Tensor) -> bool:
        """Returns whether a node or a result uses an argument."""
        return self.needs(argument) or any(x is argument for x in self.results)

    def argument(self, dtype: tf.DType, shape: Any = None) -> Tensor:
        """Adds an argument."""
        tensor = Tensor(None, f"argument_{len(self.arguments)}", dtype)
        tensor.shape = tf.TensorShape(shape)
        self.arguments.append(tensor)
        return tensor

    def copy_of(self, operation: Any, inputs: Sequence[Tensor], control_inputs: Sequence[Any] = (), **changes: Any) -> Node:
        """Adds the operation of a traced graph, with other inputs.

        Args:
            operation: The operation.
            inputs: Its new inputs.
            control_inputs: Nodes.
            **changes: Changed attributes.
        """
        definition = operation.node_def
        attributes = {name: value for name, value in definition.attr.items() if name not in _NOT_COPIED}
        attributes.update({name: attribute(value) for name, value in changes.items()})
        node = Node(operation.type, f"{_as_name(operation.name)}_{next(self._names)}", inputs, control_inputs, attributes)
        node.traced, node.device = operation, operation.device
        self.nodes.append(node)
        return node

    def with_bodies(self, operation: Any, inputs: Sequence[Tensor], bodies: Sequence[tuple[str, Program]], **changes: Any) -> Node:
        """Adds a loop or branches of a traced graph.

        Args:
            operation: The operation.
            inputs: Its new inputs.
            bodies: The attribute of each body, and its program.
            **changes: Changed attributes.
        """
        kept = {k: v for k, v in operation.node_def.attr.items() if k in ("parallel_iterations", *_ATTRIBUTES_OF_BODIES)}
        attributes = kept | {name: attribute(value) for name, value in changes.items()}
        name = f"{_as_name(operation.name)}_{next(self._names)}"
        node = Node(operation.type, name, inputs, (), attributes, bodies)
        node.traced = operation
        self.nodes.append(node)
        return node

    def add(self, type_: str, *inputs: Any, **attributes: Any) -> Any:
        """Adds an operation without effects. Equal operations are added once.

        Args:
            type_: The type.
            *inputs: Tensors, numbers, or lists of them where the operation takes a list.
            **attributes: Attributes that do not follow from the inputs.

        Returns:
            Its output; a list if there are several.
        """
        definition = operation_definition(type_)
        given = {name: attribute(value) for name, value in attributes.items()}
        flat, inferred = self._inferred(definition, inputs)
        all_attributes = (
            {attr.name: attr.default_value for attr in definition.attr if attr.HasField("default_value")} | inferred | given
        )
        key = (
            type_,
            tuple(tensor.name for tensor in flat),
            *(f"{k}{v.SerializeToString()!r}" for k, v in sorted(given.items())),
        )
        if key not in self._made:
            node = Node(type_, f"{type_}_{next(self._names)}", flat, (), all_attributes)
            self.nodes.append(node)
            self._made[key] = node.outputs
        outputs = self._made[key]
        return outputs[0] if len(outputs) == 1 else outputs

    def constant(self, value: Any, dtype: tf.DType | None = None) -> Tensor:
        """Adds a constant. Integers are int32 unless a dtype is given."""
        array = np.asarray(value, None if dtype is None else dtype.as_numpy_dtype)
        if dtype is None and array.dtype == np.int64:
            array = array.astype(np.int32)
        key = ("Const", str(array.dtype), array.shape, array.tobytes())
        if key not in self._made:
            dtype = tf.as_dtype(array.dtype)
            attributes = {"value": attribute(array), "dtype": attribute(dtype)}
            node = Node("Const", f"Const_{next(self._names)}", (), (), attributes)
            node.outputs[0].shape = tf.TensorShape(array.shape)
            self.nodes.append(node)
            self._made[key] = node.outputs
        return self._made[key][0]

    def run_after(self, node: Any, before: Sequence[Any]) -> None:
        """Makes a node that was just added run after others."""
        node.control_inputs += [x for x in before if x is not node]
        later = max((x.level_after for x in node.control_inputs), default=0) - node.level
        if later > 0:
            node.level += later
            for output in node.outputs:
                output.level += later

    def send(self, kind: str, tensor: Tensor, axis: int = 0, after: Sequence[Tensor] = (), group: str | None = None) -> Tensor:
        """Adds a collective. Equal collectives are added once.

        Args:
            kind: See `Collective`.
            tensor: What a replica sends.
            axis: See `Collective`.
            after: Tensors that are computed before it begins.
            group: See `Collective`. Default: that of the program.

        Raises:
            CannotPartitionError: A tensor to be gathered has an unknown rank.
        """
        if kind == "gather" and tensor.shape.rank is None:
            hint = "give it a shape with tf.ensure_shape."
            raise CannotPartitionError(message("Rows of an unknown number of dimensions cannot be sent.", hint, tensor=tensor.name))
        group = self.group if group is None else group
        key = ("send", kind, tensor.name, axis, group, *(x.name for x in after))
        if key not in self._made:
            collective = Collective(kind, [tensor, *after], f"received_{next(self._names)}", axis, group)
            self.nodes.append(collective)
            self._made[key] = collective.outputs
        return self._made[key][0]

    def call(self, function: Any, tensors: Sequence[Tensor], dtypes: Sequence[tf.DType]) -> list[Tensor]:
        """Adds a call of a function that communicates by itself, and returns tensors of some dtypes."""
        name = f"received_{next(self._names)}"
        collective = Collective("call", tensors, name)
        collective.function = function
        collective.outputs = [Tensor(collective, f"{name}_{i}", each, collective.level_after) for i, each in enumerate(dtypes)]
        self.nodes.append(collective)
        return collective.outputs

    def _inferred(self, definition: Any, inputs: Sequence[Any]) -> tuple[list[Tensor], dict[str, Any]]:
        attributes: dict[str, Any] = {}
        known = {
            arg.type_attr: x.dtype
            for arg, given in zip(definition.input_arg, inputs, strict=True)
            for x in (given if isinstance(given, (list, tuple)) else [given])
            if isinstance(x, Tensor) and arg.type_attr
        }
        flat: list[Tensor] = []
        for arg, given in zip(definition.input_arg, inputs, strict=True):
            several = list(given) if arg.number_attr or arg.type_list_attr else [given]
            dtype = known.get(arg.type_attr) or (tf.as_dtype(arg.type) if arg.type else None)
            tensors = [x if isinstance(x, Tensor) else self.constant(x, dtype) for x in several]
            if arg.number_attr:
                attributes[arg.number_attr] = attribute(len(tensors))
            if arg.type_attr:
                attributes[arg.type_attr] = attribute(tensors[0].dtype)
            if arg.type_list_attr:
                attributes[arg.type_list_attr] = attribute([x.dtype for x in tensors])
            flat += tensors
        return flat, attributes


def every_node(program: Program) -> Iterator[Node]:
    """Yields the nodes of a program and of its bodies."""
    for node in program.nodes:
        if isinstance(node, Node):
            yield node
            for _, body in node.bodies:
                yield from every_node(body)


def live(nodes: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """Returns the nodes that results and effects need, in the same order."""
    needed: set[int] = set()
    stack = [x.node for x in results] + [node for node in nodes if node.has_effects]
    while stack:
        node = stack.pop()
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            stack += [x.node for x in node.inputs] + list(node.control_inputs)
    return [node for node in nodes if id(node) in needed]


def without(program: Program, arguments: Sequence[Tensor]) -> Program:
    """Returns the part of a program that does not depend on some arguments, without results."""
    left = Program()
    left.arguments = program.arguments
    missing, done = {id(x) for x in arguments}, set[int]()
    for node in program.nodes:
        inputs_are_there = not any(id(x) in missing or x.node is not None and id(x.node) not in done for x in node.inputs)
        if inputs_are_there and all(id(x) in done for x in node.control_inputs):
            done.add(id(node))
            left.nodes.append(node)
    return left


def _as_name(name: str) -> str:
    return name.replace("/", "_").replace(".", "_").lstrip("_") or "operation"


def _outputs(definition: Any, attributes: dict[str, Any]) -> Iterator[tuple[str, tf.DType]]:
    """Yields the names in a `FunctionDef`, and the dtypes, of an operation's outputs."""
    for arg in definition.output_arg:
        if arg.type_list_attr:
            types = list(attributes[arg.type_list_attr].list.type)
        else:
            number = attributes[arg.number_attr].i if arg.number_attr else 1
            types = [arg.type or attributes[arg.type_attr].type] * number
        for index, each in enumerate(types):
            yield f"{arg.name}:{index}", tf.as_dtype(each)


def attribute(value: Any) -> tf.compat.v1.AttrValue:
    """Converts a Python value to the attribute of an operation."""
    result = tf.compat.v1.AttrValue()
    if isinstance(value, (list, tuple)):
        result.list.SetInParent()
    if isinstance(value, tf.compat.v1.AttrValue):
        return value
    if isinstance(value, tf.DType):
        result.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        result.shape.CopyFrom(value.as_proto())
    elif isinstance(value, bool):
        result.b = value
    elif isinstance(value, int):
        result.i = value
    elif isinstance(value, str):
        result.s = value.encode()
    elif isinstance(value, np.ndarray):
        result.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, (list, tuple)) and all(isinstance(x, tf.DType) for x in value):
        result.list.type.extend(x.as_datatype_enum for x in value)
    elif isinstance(value, (list, tuple)) and all(isinstance(x, tf.TensorShape) for x in value):
        result.list.shape.extend(x.as_proto() for x in value)
    else:
        result.list.i.extend(value)
    return result


def prune(program: Program) -> None:
    """Removes values that are not needed from the loops of a program."""
    for node in reversed(program.nodes):  # A later loop may need a value that an earlier one carries.
        if isinstance(node, Node) and node.bodies and node.type.endswith("While"):
            _prune_loop(program, node)
        for _, body in getattr(node, "bodies", ()):
            prune(body)


def _prune_loop(program: Program, node: Node) -> None:
    (_, test), (_, body) = node.bodies
    assert test.inputs is not None
    assert body.inputs is not None
    needed = _used(program, range(len(program.results)))
    asked = _used(test, [0])
    kept = {i for i, output in enumerate(node.outputs) if output.name in needed or test.inputs[i].name in asked}
    while True:
        used = _used(body, sorted(kept))
        new = {i for i, own in enumerate(body.inputs) if own.name in used} - kept
        if not new:
            break
        kept |= new
    order = sorted(kept)
    for i, output in enumerate(node.outputs):  # Kept outputs take the names of removed ones.
        output.name = f"{node.name}:pruned:{i}"
    node.inputs, node.outputs = [node.inputs[i] for i in order], [node.outputs[i] for i in order]
    for place, output in enumerate(node.outputs):
        output.name = f"{node.name}:output:{place}"
    node.carried = [place for place, i in enumerate(order) if i in node.carried]
    node.attributes["T"] = attribute([x.dtype for x in node.inputs])
    body.results = [body.results[i] for i in order]
    test.inputs, body.inputs = [test.inputs[i] for i in order], [body.inputs[i] for i in order]


def _used(program: Program, places: range | list[int]) -> set[str]:
    """Returns the names of tensors that some results, and the effects, of a program need."""
    results = [program.results[i] for i in places]
    return {x.name for node in live(program.nodes, results) for x in node.inputs} | {x.name for x in results}
