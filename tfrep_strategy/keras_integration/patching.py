"""How a Keras function is replaced: in one way, checked at import, and only for our own strategies."""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfrep_strategy.errors import UnsupportedVersionError


def keras_internal(module: str, name: str | None = None) -> Any:
    """Imports a module of `keras.src`, or something from it.

    Raises:
        UnsupportedVersionError: when this Keras has it no more.
    """
    try:
        found = importlib.import_module(f"keras.src.{module}")
        return found if name is None else getattr(found, name)
    except (ImportError, AttributeError) as error:
        missing = f"`keras.src.{module}`" + (f".{name}" if name else "")
        raise UnsupportedVersionError(
            f"Keras {keras.__version__} moved {missing}, which tfrep_strategy needs."
        ) from error


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a function or method of Keras by the decorated one, which gets the original as its first argument.

    Args:
        owner: The module or class of Keras that has it.
        name: Its name there.

    Raises:
        UnsupportedVersionError: when this Keras has no such function.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name, None)
        if original is None:
            raise UnsupportedVersionError(
                f"Keras {keras.__version__} has no `{name}` in `{owner.__name__}`, which tfrep_strategy needs."
            )

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(owner, name, replaced)
        return replacement

    return decorate


def replace_everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function of Keras in every module that has imported it by name: Keras's data sets, and the user's program."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            namespace = object.__getattribute__(module, "__dict__")  # Some modules load themselves when they are asked.
            for name, value in list(namespace.items()):
                if value is function:
                    namespace[name] = replacement


class _WarningsOfKeras:
    """The module `warnings` for Keras, which counts frames to blame the right line: frames of this package do not count."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    @staticmethod
    def warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **kwargs: Any) -> None:
        """Does what `warnings.warn` does, as if no function of Keras had been replaced."""
        frame: Any = sys._getframe(1)
        level = 1
        while frame is not None and stacklevel > 0:
            level += 1
            stacklevel -= frame.f_globals.get("__name__", "").partition(".")[0] != "tfrep_strategy"
            frame = frame.f_back
        warnings.warn(message, category, level, source, **kwargs)


for _name, _module in list(sys.modules.items()):
    if _name.startswith("keras.src.") and getattr(_module, "warnings", None) is warnings:
        vars(_module)["warnings"] = _WarningsOfKeras()
