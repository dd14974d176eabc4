"""The user's own `tf.function`s that train, called in the scope of a strategy: its replicas share their work.

A call is that of a `PartitionedFunction` if eager code makes it outside of replicas, and if the function gets or draws rows and
writes variables. All others stay what they are: exports, functions with `strategy.run` in them, those of libraries.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import Function, OwnedIterator
from tfrep_strategy.keras_integration.protocol import Shards
from tfrep_strategy.limits import verification
from tfrep_strategy.strategies.partitioned_functions import PartitionedFunction, strategy_here

_LIBRARIES = ("tensorflow", "keras", "tfrep_strategy")
_candidates: weakref.WeakKeyDictionary[Any, PartitionedFunction | None] = weakref.WeakKeyDictionary()
_call_as_it_was = Function.__call__


def candidate(function: Any) -> PartitionedFunction | None:
    """Returns what replicas share of a `tf.function` that is called in a scope; None if it is a library's."""
    if function not in _candidates:
        module = str(getattr(inspect.unwrap(function.python_function), "__module__", None) or "")
        is_users = module.partition(".")[0] not in _LIBRARIES
        # It must not keep the function alive, by which it is known.
        as_it_was = functools.partial(_call, weakref.ref(function))
        _candidates[function] = PartitionedFunction(function, as_it_was) if is_users else None
    return _candidates[function]


def _call(function: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    return _call_as_it_was(function(), *args, **kwargs)


@functools.wraps(_call_as_it_was)
def call_in_scope(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a `tf.function`. If it is the user's, and called in a scope, replicas share its work."""
    strategy = strategy_here() if threading.current_thread() is threading.main_thread() else None
    shares = strategy is not None and _shares(strategy)
    found = candidate(function) if shares or verification() is not None else None
    if found is None or any(map(_is_distributed, (*args, *kwargs.values()))):
        return _call_as_it_was(function, *args, **kwargs)
    return found(*args, **kwargs) if shares else found.call_as_it_was(*args, **kwargs)


def _shares(strategy: Any) -> bool:
    """Returns whether all processes call what this one calls, with the same arguments."""
    is_alone = strategy.extended.reads_alone  # As in a callback that one process runs by itself.
    return strategy.partition_functions and not is_alone and getattr(strategy, "rank_data", "same") != "own"


def _is_distributed(argument: Any) -> bool:
    """Returns whether an argument is no value of one device: distributed data, or a value of each replica."""
    if isinstance(argument, (Shards, tf.distribute.DistributedDataset)):
        return True
    if hasattr(argument, "__next__") and not isinstance(argument, OwnedIterator):
        return True
    return any(isinstance(x, tf.distribute.DistributedValues) and not isinstance(x, tf.Variable) for x in tf.nest.flatten(argument))
