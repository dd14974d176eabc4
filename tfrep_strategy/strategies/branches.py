"""Branches that change variables or call collectives (`tf.cond`, `tf.switch_case`): all replicas take the same one.

If a replica would decide by what it has computed from its rows, such as its loss, the value of all rows decides, as on one device.
The graph of a step that Keras drives tells it. Where it does not, and in loops of the user's own, replicas that decide otherwise
get an error: they would wait for each other for ever, or their variables would part. A branch that only assigns what comes from
rows, such as a mean over those that a mask chooses, is left to each replica, which may have none of them. So is one with
collectives of a group, whose members have to decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import BranchGraph, CondGradientGraph, called_graphs, cond_v2
from tfrep_strategy.keras_integration.protocol import Step, current_step
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.keras_integration.synchronous.batch_sums import of_all_rows
from tfrep_strategy.keras_integration.synchronous.row_growth import depends_on_rows
from tfrep_strategy.keras_integration.synchronous.whole_batch import sees_whole_batch
from tfrep_strategy.strategies.extended import SynchronousExtended

_UPDATES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
_COLLECTIVES = ("Collective", "Horovod")
"""How the names of operations begin. Collectives that are calls of Python have an assignment beside them (`Order.mark`)."""
_APART = "The replicas take different branches, in which there is a collective or an update. Received: what each has decided ="
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


def _decided_together(choice: tf.Tensor, branches: Sequence[Any]) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended if context is not None else None
    if not isinstance(extended, SynchronousExtended) or context.num_replicas_in_sync == 1 or choice.shape.rank != 0:
        return choice
    # An optimizer decides by what is the same everywhere, a metric that sees all rows is updated by one replica, and a gradient
    # belongs to the branch that was taken.
    if assigns_as_is.value or sees_whole_batch.value or isinstance(branches[0], CondGradientGraph):
        return choice
    step, computed = current_step(), _before_branches(choice)
    calls_collectives = any(_does(graph, _COLLECTIVES, context.num_replicas_in_sync) for graph in branches)
    # By what is computed in another branch, a loop or a function, not all replicas may come.
    if step is not None and step.has_computed(computed) and (calls_collectives or _updates_with_what_all_have(step, branches)):
        with tf.Graph.as_default(computed.graph):  # A branch in a branch is decided before both.
            of_all = of_all_rows(step, computed)
            is_own = of_all is None or of_all is computed and depends_on_rows(step, computed)
            return _alike(extended, computed) if is_own else of_all
    return _alike(extended, choice) if calls_collectives and not extended.collectives_in_branches else choice


def _alike(extended: SynchronousExtended, choice: tf.Tensor) -> tf.Tensor:
    """Returns a choice whose use fails if that of another replica differs."""
    told = extended.own_communicator().all_gather(tf.cast(choice, tf.int32)[tf.newaxis])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(told == told[0]), [_APART, told, _HINT])]):
        return tf.identity(choice)


def _updates_with_what_all_have(step: Step, branches: Sequence[Any]) -> bool:
    """Whether branches have updates, and not only such as come from the replica's rows."""
    of_updates = [map(_before_branches, values) for graph in branches for values in _given_to_updates(graph)]
    # State is kept where a replica has no rows, as its share tells.
    return any(not any(each is not step.share.value and depends_on_rows(step, each) for each in given) for given in of_updates)


def _given_to_updates(graph: Any) -> list[list[tf.Tensor]]:
    """Returns, of each update in a branch, the tensors of outside from which it is computed."""
    outer = {inner.name: given for given, inner in graph.captures}
    found = []
    for operation in graph.get_operations():
        if operation.type.startswith(_UPDATES) or any(_does(each, _UPDATES) for each in called_graphs(operation)):
            left, seen = list(operation.inputs), set[str]()
            while left:
                tensor = left.pop()
                if tensor.name not in seen:
                    seen.add(tensor.name)
                    left += tensor.op.inputs
            found.append([outer[name] for name in seen if name in outer and outer[name].dtype != tf.resource])
    return found


def _before_branches(value: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that branches were given as this one."""
    while isinstance(value.graph, BranchGraph):
        given = [outer for outer, inner in value.graph.captures if inner is value]
        if not given:
            break
        [value] = given
    return value


def _does(graph: Any, kinds: tuple[str, ...], members: int | None = None) -> bool:
    """Whether a graph, or a function that it calls, has an operation of some kinds; a collective, one of so many members."""
    operations = graph.get_operations()
    return any(each.type.startswith(kinds) and not _is_of_fewer(each, members) for each in operations) or any(
        _does(called, kinds, members) for each in operations for called in called_graphs(each)
    )


def _is_of_fewer(operation: Any, members: int | None) -> bool:
    """Whether a collective of TensorFlow is that of a group: the other replicas do not know of it."""
    if members is None or not operation.type.startswith("Collective"):
        return False
    size = tf.get_static_value(operation.inputs[1])
    return size is not None and int(size) < members


cond_v2._build_cond = _deciding_a_truth(cond_v2._build_cond)
cond_v2._build_case = _deciding_a_number(cond_v2._build_case)
