"""Takes out of loops what nothing needs, such as lists of sizes that a gradient would have asked for."""

from __future__ import annotations

from tfrep_strategy.partitioner.program import Node, Program, attribute, live


def prune(program: Program) -> None:
    """Has the loops of a program carry what is needed."""
    for node in reversed(program.nodes):  # A later loop may need what an earlier one carries.
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
    for i, output in enumerate(node.outputs):  # What is left takes the names of what goes.
        output.name = f"{node.name}:pruned:{i}"
    node.inputs, node.outputs = [node.inputs[i] for i in order], [node.outputs[i] for i in order]
    for place, output in enumerate(node.outputs):
        output.name = f"{node.name}:output:{place}"
    node.carried = [place for place, i in enumerate(order) if i in node.carried]
    node.attributes["T"] = attribute([x.dtype for x in node.inputs])
    body.results = [body.results[i] for i in order]
    test.inputs, body.inputs = [test.inputs[i] for i in order], [body.inputs[i] for i in order]


def _used(program: Program, places: range | list[int]) -> set[str]:
    """Returns the names of what some of the results, and the effects, of a program need."""
    results = [program.results[i] for i in places]
    return {x.name for node in live(program.nodes, results) for x in node.inputs} | {x.name for x in results}
