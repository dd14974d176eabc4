"""Segments: nodes of a program as one TensorFlow function, which is made once and called for each replica with its own arguments.

It is written as a `FunctionDef`, without a graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfrep_strategy._tensorflow import add_function, remove_function
from tfrep_strategy.partitioner.program import Node, Tensor, live

_names = itertools.count()


class Segment:
    """Nodes as a TensorFlow function.

    Args:
        nodes: In an order in which they can run.
        outputs: What it returns.
        compiled: Whether XLA compiles it.
        inputs: What it gets; by default what its nodes need.
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
        """The names of its functions, by the devices of a replica if the user has placed operations."""
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
            # What waits for a call waits for these alone, once TensorFlow has put the function's operations in its place.
            if node.has_effects or any(x.dtype == tf.resource for x in node.inputs):
                definition.signature.control_output.append(node.name)
                definition.control_ret[node.name] = node.name
        self.has_effects = any(node.has_effects for node in nodes) or any(x.dtype == tf.resource for x in self.inputs)
        definition.signature.is_stateful = self.has_effects
        if compiled:
            definition.attr["_XlaMustCompile"].b = True

    def function(self, devices: Sequence[Sequence[str]], replica: int) -> str:
        """Returns the name of the function for a replica.

        Args:
            devices: Of each replica of this process.
            replica: The place of the replica among them.
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
        """Calls it for a replica, on a device; see `function`."""
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
    """Returns the device of a replica that stands for one which replica 0 has in the trace; others are those of all."""
    if not device:
        return ""
    wanted = tf.DeviceSpec.from_string(device)
    for place, each in enumerate(devices[0]):
        own = tf.DeviceSpec.from_string(each)
        if (own.device_type, own.device_index) == (wanted.device_type, wanted.device_index):
            return str(tf.DeviceSpec.from_string(devices[replica][place]).to_string())
    return device
