"""Branches that change variables or call collectives (`tf.cond`, `tf.switch_case`): all replicas take the same one.

If a replica would decide by what it has computed from its rows, such as its loss, the value of all rows decides, as on one device.
The graph of a step that Keras drives tells it. Elsewhere replicas of one process that decide otherwise get an error, since they
would wait for each other for ever.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import BranchGraph, called_graphs, cond_v2
from tfrep_strategy.keras_integration.protocol import current_step
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.keras_integration.synchronous.batch_sums import of_all_rows
from tfrep_strategy.strategies.extended import SynchronousExtended

_UPDATES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
_COLLECTIVES = ("Collective",)
"""How the names of operations begin. The collectives are those of replicas of one process; processes compare theirs."""
_APART = (
    "The replicas of MirroredStrategy take different branches, in which there is a collective or an update."
    " Received: what each replica has decided ="
)
_HINT = "\nHint: decide by what is the same on all replicas, such as tfrep.all_reduce(loss, 'mean')."


def _deciding_a_truth(build: Any) -> Any:
    @functools.wraps(build)
    def build_cond(pred: tf.Tensor, true_graph: Any, false_graph: Any, *args: Any, **kwargs: Any) -> Any:
        return build(_decided_together(pred, [true_graph, false_graph]), true_graph, false_graph, *args, **kwargs)

    return build_cond


def _deciding_a_number(build: Any) -> Any:
    @functools.wraps(build)
    def build_case(branch_index: tf.Tensor, branch_graphs: list[Any], *args: Any, **kwargs: Any) -> Any:
        return build(_decided_together(branch_index, branch_graphs), branch_graphs, *args, **kwargs)

    return build_case


def _decided_together(choice: tf.Tensor, branches: list[Any]) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended if context is not None else None
    if not isinstance(extended, SynchronousExtended) or context.num_replicas_in_sync == 1 or choice.shape.rank != 0:
        return choice
    step = current_step()
    if step is not None and assigns_as_is.value:  # An optimizer decides by what is the same on all replicas.
        return choice
    calls_collectives = _do(branches, _COLLECTIVES)
    computed = _before_branches(choice)
    if step is not None and step.has_computed(computed) and (calls_collectives or _do(branches, _UPDATES)):
        with tf.Graph.as_default(computed.graph):  # A branch in a branch is decided before both.
            of_all = of_all_rows(step, computed)
        if of_all is not None and of_all is not computed:
            return of_all
    if not calls_collectives or extended.collectives_in_branches:
        return choice
    told = extended.own_communicator().all_gather(tf.cast(choice, tf.int32)[tf.newaxis])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(told == told[0]), [_APART, told, _HINT])]):
        return tf.identity(choice)


def _before_branches(value: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that branches were given as this one."""
    while isinstance(value.graph, BranchGraph):
        given = [outer for outer, inner in value.graph.captures if inner is value]
        if not given:
            break
        [value] = given
    return value


def _do(graphs: list[Any], kinds: tuple[str, ...]) -> bool:
    """Whether graphs, or the functions that they call, have an operation of some kinds."""
    left, seen = list(graphs), set()
    while left:
        graph = left.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        for operation in graph.get_operations():
            if operation.type.startswith(kinds):
                return True
            left += called_graphs(operation)
    return False


cond_v2._build_cond = _deciding_a_truth(cond_v2._build_cond)
cond_v2._build_case = _deciding_a_number(cond_v2._build_case)
