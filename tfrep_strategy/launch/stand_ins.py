"""What a run puts where a script makes a strategy: the classes of TensorFlow and of this package give the run's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.communicators.calls import user_line
from tfrep_strategy.errors import ConfigurationError, message

# A name of the table may be found in some of the modules only.
_TENSORFLOW = tuple(
    module
    for api in (tf, tf.compat.v1, tf.compat.v2)
    for module in (api.distribute, api.distribute.experimental)
)
_OURS = (tfrep, tfrep.replicator.loop, tfrep.replicator.kinds, tfrep.replicator.parameter_server)

_GIVES_STRATEGY = (
    (_TENSORFLOW, "MirroredStrategy"),
    (_TENSORFLOW, "MultiWorkerMirroredStrategy"),
    (_TENSORFLOW, "OneDeviceStrategy"),
    (_TENSORFLOW, "CentralStorageStrategy"),
    (_TENSORFLOW, "ParameterServerStrategy"),
    (_OURS, "MirroredStrategy"),
    (_OURS, "MultiWorkerStrategy"),
    (_OURS, "ParameterServerStrategy"),
    (_OURS, "auto_strategy"),
)
"""Where it stands, what gives the run's strategy."""

_REFUSES = ((_TENSORFLOW, "TPUStrategy"),)
"""What a run cannot give. A script comes here only where it has found a TPU, which the run would leave idle."""


@contextlib.contextmanager
def strategy_everywhere(strategy: Any) -> Iterator[None]:
    """Lets whatever makes a strategy get this one.

    `isinstance`, `issubclass` and subclasses keep their meaning: Keras asks in this way what a strategy can do.

    Args:
        strategy: The run's.

    Example:
        >>> with strategy_everywhere("the run's"):
        ...     tf.distribute.MirroredStrategy(["GPU:7"])
        "the run's"
    """
    with contextlib.ExitStack() as stack:
        for table, give in ((_GIVES_STRATEGY, lambda name: strategy), (_REFUSES, _refuse)):
            for owners, name in table:
                for owner in owners:
                    if hasattr(owner, name):
                        put(stack, owner, name, _stand_in(getattr(owner, name), give))
        yield


def put(stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute until the stack ends.

    Example:
        >>> with contextlib.ExitStack() as stack:
        ...     put(stack, math, "pi", 3)
    """
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _stand_in(stock: Any, give: Callable[[str], Any]) -> Any:
    if not isinstance(stock, type):
        return lambda *args, **kwargs: give(stock.__name__)

    class Meta(type(stock)):  # type: ignore[misc]
        """Of the stand-in alone, and not of what a script derives from it, is what differs from any other class."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return give(stock.__name__) if cls is stand_in else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    names = {"__doc__": stock.__doc__, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    stand_in = Meta(stock.__name__, (stock,), names)
    return stand_in


def _refuse(name: str) -> Any:
    raise ConfigurationError(
        message(
            f"A run of tfrep trains on CPUs and GPUs, and {user_line()} makes a {name}.",
            hint="write tf.distribute.get_strategy() in that line, which gives the run's strategy, or run the script without"
            " tfrep.",
        )
    )
