"""TensorFlow operations that act differently in replicas: branches, loops that draw, pads of no rows, cache files.

Replicas of one process must take the same branch of a `tf.cond` or `tf.switch_case` that calls collectives. Otherwise they would
wait for each other forever, so they get an error. A branch with collectives of a group is left to the group's members, which
must decide alike.

On several processes, loops of the graph that draw random numbers run one round after the other. TensorFlow may run rounds of a
loop at once (`parallel_iterations`), and does not order draws. So the rounds would get other numbers on each process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.limits import verification
from tfrep_strategy.core.scoped import assigns_as_is
from tfrep_strategy.core.tf import LEGACY_DRAWS, CondGradientGraph, called_graphs, set_number
from tfrep_strategy.keras_integration.finding import driver_in_scope
from tfrep_strategy.keras_integration.synchronous.empty_parts import EmptyParts
from tfrep_strategy.strategies.extended import SynchronousExtended

_COLLECTIVES = ("Collective", "Horovod")
"""Prefixes of operation types. Collectives that are calls of Python have an assignment beside them (`Order.mark`)."""
_APART = "The replicas take different branches of a condition, and a branch has a collective. Received: choices of the replicas ="
_HINT = "\nHint: decide by what is the same on all replicas, such as tfrep.all_reduce(loss, 'mean')."


def with_agreed_condition(build: Any) -> Any:
    """Wraps the builder of `tf.cond`, so that all replicas of a process take the same branch."""

    @functools.wraps(build)
    def build_cond(pred: tf.Tensor, true_graph: Any, false_graph: Any, *args: Any, **kwargs: Any) -> Any:
        return build(_decided_together(pred, [true_graph, false_graph]), true_graph, false_graph, *args, **kwargs)

    return build_cond


def with_agreed_branch(build: Any) -> Any:
    """Does the same for `tf.switch_case`."""

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
    # An optimizer decides by values that are equal everywhere, and a gradient belongs to the branch that was taken.
    if assigns_as_is.value or isinstance(branches[0], CondGradientGraph):
        return choice
    return _alike(extended, choice) if calls_collectives and not extended.collectives_in_branches else choice


def _alike(extended: SynchronousExtended, choice: tf.Tensor) -> tf.Tensor:
    """Returns a choice whose use fails if another replica chose differently."""
    choices = extended.own_communicator().all_gather(tf.cast(choice, tf.int32)[tf.newaxis])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(choices == choices[0]), [_APART, choices, _HINT])]):
        return tf.identity(choice)


def _does(graph: Any, kinds: tuple[str, ...], members: int | None = None) -> bool:
    """Returns whether a graph, or a function that it calls, has operations of some kinds. Collectives of groups do not count."""
    operations = graph.get_operations()
    return any(each.type.startswith(kinds) and not _is_of_fewer(each, members) for each in operations) or any(
        _does(called, kinds, members) for each in operations for called in called_graphs(each)
    )


def _is_of_fewer(operation: Any, members: int | None) -> bool:
    """Returns whether a TensorFlow collective belongs to a group, so that other replicas do not take part."""
    if members is None or not operation.type.startswith("Collective"):
        return False
    size = tf.get_static_value(operation.inputs[1])
    return size is not None and int(size) < members


_orders = False


def order_loops_that_draw(size: int) -> None:
    """Makes loops that draw, and are built from now on, run one round after the other.

    Args:
        size: The number of processes.
    """
    global _orders
    _orders = size > 1


def with_rounds_in_order(build: Any) -> Any:
    """Wraps the builder of a loop, so that rounds that draw run one after the other."""

    @functools.wraps(build)
    def while_loop(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs)
        operation = _loop_behind(result) if _orders or verification() is not None else None
        if operation is not None and any(map(_draws, called_graphs(operation))):
            set_number(operation, "parallel_iterations", 1)
        return result

    return while_loop


def _loop_behind(result: Any) -> Any:
    """Returns the loop that a result comes from; None if there is none."""
    found = next((x.op for x in tf.nest.flatten(result, expand_composites=True) if tf.is_symbolic_tensor(x)), None)
    while found is not None and found.type == "Identity":
        found = found.inputs[0].op
    return found if found is not None and found.type in ("While", "StatelessWhile") else None


def _draws(graph: Any) -> bool:
    operations = graph.get_operations()
    return any(x.type in LEGACY_DRAWS or any(map(_draws, called_graphs(x))) for x in operations)


def accepting_no_rows(mirror_pad: Any) -> Any:
    """Wraps `mirror_pad`, so that it accepts tensors without rows."""

    @functools.wraps(mirror_pad)
    def pad(input: Any, paddings: Any, mode: str, name: str | None = None) -> Any:
        driver, widths = driver_in_scope(), tf.get_static_value(paddings)
        if not isinstance(driver, EmptyParts) or widths is None or not len(widths) or any(widths[0]):
            return mirror_pad(input, paddings, mode, name)
        return driver.on_rows(lambda rows: mirror_pad(rows, paddings, mode, name), input)

    return pad


_suffix = ""


def cache_in_own_files(rank: int, size: int) -> None:
    """Gives each process its own cache file, for data sets that are cached from now on.

    Every process reads the whole data set. TensorFlow refuses several writers of one file. The file of rank 0 keeps its
    name; those of the other ranks end in `.rank-1`, `.rank-2`, ...

    Args:
        rank: The rank of this process.
        size: The number of processes.
    """
    global _suffix
    _suffix = f".rank-{rank}" if rank and size > 1 else ""


def with_own_file(cache: Any) -> Any:
    """Wraps `Dataset.cache`, so that it uses the file of this process."""

    @functools.wraps(cache)
    def cache_in_own_file(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            filename = f"{os.fspath(filename)}{_suffix}"
        return cache(self, filename, name)

    return cache_in_own_file
