"""A package whose names load what they need when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def names_loaded_when_used(
    package: str, names: Mapping[str, Sequence[str]], old_names: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the two functions by which Python asks a package for names that it does not have yet.

    A module of the package is loaded in the same way when it is used as an attribute, and with it the modules below it that
    have public names.

    Args:
        package: The package's `__name__`.
        names: The public names, by the module of the package that has them.
        old_names: What the error says of names of older years.

    Returns:
        The package's `__getattr__` and `__dir__`.

    Example:
        >>> __getattr__, __dir__ = names_loaded_when_used(__name__, {"strategies.auto": ["auto_strategy"]})
    """
    module_of = {name: f"{package}.{module}" for module, provided in names.items() for name in provided}
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name in module_of:
            namespace[name] = getattr(import_module(module_of[name]), name)
            return namespace[name]
        if old_names and name in old_names:
            text = f"module {package!r} has no attribute {name!r}.\nHint: {old_names[name]}"
            raise AttributeError(text, name=name, obj=sys.modules[package])
        module = f"{package}.{name}"
        if not name.startswith("_"):  # Those are what tools ask every module for.
            try:
                loaded = import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
            else:
                for below in set(module_of.values()):
                    if below.startswith(f"{module}."):
                        import_module(below)
                return loaded
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    return load, lambda: sorted({*namespace, *module_of})
