"""Operations of TensorFlow that act otherwise in replicas: branches, loops that draw, pads of no rows, cache files.

Branches that call collectives (`tf.cond`, `tf.switch_case`), in replicas of one process: all of them take the same one.
Replicas that decide otherwise get an error, since they would wait for each other for ever. A branch with collectives of a group is
left to its members, who have to decide alike.

Loops of the graph whose rounds draw random numbers: on several processes a round begins when the one before has ended.
Rounds of a loop may run at once (`parallel_iterations`), and TensorFlow orders all that has effects but draws. Their numbers
would go to the rounds as they come, on each process otherwise.
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


_orders = False


def order_loops_that_draw(size: int) -> None:
    """Has loops that are built from now on run round by round if they draw.

    Args:
        size: The number of processes.
    """
    global _orders
    _orders = size > 1


def in_order(build: Any) -> Any:
    """Returns what builds a loop, round by round if its rounds draw."""

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


def of_no_rows_too(mirror_pad: Any) -> Any:
    """Returns a pad that takes no rows, too."""

    @functools.wraps(mirror_pad)
    def pad(input: Any, paddings: Any, mode: str, name: str | None = None) -> Any:
        driver, widths = driver_in_scope(), tf.get_static_value(paddings)
        if not isinstance(driver, EmptyParts) or widths is None or not len(widths) or any(widths[0]):
            return mirror_pad(input, paddings, mode, name)
        return driver.on_rows(lambda rows: mirror_pad(rows, paddings, mode, name), input)

    return pad


_suffix = ""


def cache_in_own_files(rank: int, size: int) -> None:
    """Gives each process a cache file of its own, for data sets that are cached from now on.

    Every process reads the whole data set. All would write the same file at once, which TensorFlow refuses. The file of
    rank 0 keeps its name; those of the other ranks end in `.rank-1`, `.rank-2`, ...

    Args:
        rank: The rank of this process.
        size: The number of processes.
    """
    global _suffix
    _suffix = f".rank-{rank}" if rank and size > 1 else ""


def with_own_file(cache: Any) -> Any:
    """Returns what caches in the file of a process."""

    @functools.wraps(cache)
    def cache_in_own_file(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            filename = f"{os.fspath(filename)}{_suffix}"
        return cache(self, filename, name)

    return cache_in_own_file
