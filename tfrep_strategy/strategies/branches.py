"""Branches that call collectives (`tf.cond`, `tf.switch_case`), in replicas of one process: all of them take the same one.

Replicas that decide otherwise get an error, since they would wait for each other for ever. A branch with collectives of a group is
left to its members, who have to decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import CondGradientGraph, called_graphs
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.strategies.extended import SynchronousExtended

_COLLECTIVES = ("Collective", "Horovod")
"""How the names of operations begin. Collectives that are calls of Python have an assignment beside them (`Order.mark`)."""
_APART = "The replicas take different branches, in which there is a collective. Received: what each has decided ="
_HINT = "\nHint: decide by what is the same on all replicas, such as tfrep.all_reduce(loss, 'mean')."


def deciding_a_truth(build: Any) -> Any:
    """Returns what builds a `tf.cond` that all replicas of a process decide alike."""

    @functools.wraps(build)
    def build_cond(pred: tf.Tensor, true_graph: Any, false_graph: Any, *args: Any, **kwargs: Any) -> Any:
        return build(_decided_together(pred, [true_graph, false_graph]), true_graph, false_graph, *args, **kwargs)

    return build_cond


def deciding_a_number(build: Any) -> Any:
    """Does the same for a `tf.switch_case`."""

    @functools.wraps(build)
    def build_case(branch_index: tf.Tensor, branch_graphs: list[Any], *args: Any, **kwargs: Any) -> Any:
        return build(_decided_together(branch_index, branch_graphs), branch_graphs, *args, **kwargs)

    return build_case


def _decided_together(choice: tf.Tensor, branches: Sequence[Any]) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended if context is not None else None
    if not isinstance(extended, SynchronousExtended) or context.num_replicas_in_sync == 1 or choice.shape.rank != 0:
        return choice
    calls_collectives = any(_does(graph, _COLLECTIVES, context.num_replicas_in_sync) for graph in branches)
    # An optimizer decides by what is the same everywhere, and a gradient belongs to the branch that was taken.
    if assigns_as_is.value or isinstance(branches[0], CondGradientGraph):
        return choice
    return _alike(extended, choice) if calls_collectives and not extended.collectives_in_branches else choice


def _alike(extended: SynchronousExtended, choice: tf.Tensor) -> tf.Tensor:
    """Returns a choice whose use fails if that of another replica differs."""
    told = extended.own_communicator().all_gather(tf.cast(choice, tf.int32)[tf.newaxis])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(told == told[0]), [_APART, told, _HINT])]):
        return tf.identity(choice)


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
