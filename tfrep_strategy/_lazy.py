"""A package whose names load what they need when they are first used (PEP 562), and whose modules are found by older names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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


class OldModuleNames(MetaPathFinder, Loader):
    """Finds modules by the names that they had in an earlier release. What is imported is the module of today, and no copy.

    Args:
        package: The package's `__name__`.
        moved: Today's names in the package, by the old ones. The modules below have moved along.
        gone: What the error says of modules that are no longer there.

    Example:
        >>> from tfrep_strategy.digits import load_digits
        >>> load_digits.__module__
        'tfrep_strategy.contrib.digits'
    """

    def __init__(self, package: str, moved: Mapping[str, str], gone: Mapping[str, str]) -> None:
        self._moved = {f"{package}.{old}": f"{package}.{new}" for old, new in moved.items()}
        self._gone = {f"{package}.{name}": hint for name, hint in gone.items()}

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Gives what imports a module that has moved."""
        if hint := self._gone.get(fullname):
            raise ModuleNotFoundError(f"There is no module {fullname!r} any more.\nHint: {hint}", name=fullname)
        return ModuleSpec(fullname, self) if self._today(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of today in the place of an empty one, as `importlib` allows."""
        sys.modules[module.__name__] = import_module(str(self._today(module.__name__)))

    def _today(self, name: str) -> str | None:
        for old, new in self._moved.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        return None
