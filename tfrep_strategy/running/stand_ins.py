"""Stand-ins for the strategies that a script makes: the classes of TensorFlow and of this package give the run's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import tfrep_strategy.strategies
from tfrep_strategy.core.calls import user_line
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies import auto, parameter_server
from tfrep_strategy.strategies.settings import take_settings

_OURS = ("MirroredStrategy", "MultiWorkerStrategy", "ParameterServerStrategy")


def _table(strategy: Any) -> list[tuple[Sequence[Any], str, Callable[..., Any]]]:
    """Lists where a name stands, the name, and what is done in place of making it. Some modules lack some names."""

    def given(*args: Any, **kwargs: Any) -> Any:
        return strategy

    def given_settings_of(name: str) -> Callable[..., Any]:
        made = getattr(tfrep_strategy, name)

        def configured(*args: Any, **kwargs: Any) -> Any:
            take_settings(strategy, made, args, kwargs)
            return strategy

        configured.__qualname__ = name
        return configured

    apis = (tf.distribute, tf.compat.v1.distribute, tf.compat.v2.distribute)
    stock = [module for api in apis for module in (api, api.experimental)]
    # The package itself, where scripts find its names, and where a `Replicator` does.
    ours = [tfrep_strategy, auto, parameter_server]
    return [
        (stock, "MirroredStrategy", given),
        (stock, "MultiWorkerMirroredStrategy", given),
        (stock, "OneDeviceStrategy", given),
        (stock, "CentralStorageStrategy", given),
        (stock, "ParameterServerStrategy", given),
        (stock, "TPUStrategy", _refuse_tpu),  # A script comes here when it has found a TPU, which the run would leave idle.
        (ours, "auto_strategy", given),
        *((ours, name, given_settings_of(name)) for name in _OURS),
    ]


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
        for modules, name, give in _table(strategy):
            for module in modules:
                if hasattr(module, name):
                    put(stack, module, name, _stand_in(getattr(module, name), give))
        yield


def put(stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute until the stack ends.

    Example:
        >>> with contextlib.ExitStack() as stack:
        ...     put(stack, math, "pi", 3)
        ...     math.pi
        3
    """
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _stand_in(stock: Any, give: Callable[..., Any]) -> Any:
    if not isinstance(stock, type):
        return give

    class Meta(type(stock)):  # type: ignore[misc]
        """Of the stand-in alone, and not of what a script derives from it, is what differs from any other class."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return give(*args, **kwargs) if cls is stand_in else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    names = {"__doc__": stock.__doc__, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    stand_in = Meta(stock.__name__, (stock,), names)
    return stand_in


def _refuse_tpu(*args: Any, **kwargs: Any) -> Any:
    raise ConfigurationError(
        message(
            f"A run of tfrep trains on CPUs and GPUs, and {user_line()} makes a TPUStrategy.",
            hint="write tf.distribute.get_strategy() in that line, which gives the run's strategy, or run the script by python.",
        )
    )
