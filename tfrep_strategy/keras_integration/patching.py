"""Replaces attributes of Keras: each `Patch` of a registry replaces one.

A patch names its attribute, the signature that it expects there, and the reason. `install` checks all patches
of this package before it makes the first one. `uninstall` restores the original objects. `describe` lists the patches.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from tfrep_strategy.core.replacements import KERAS, Row
from tfrep_strategy.keras_integration.internals import place

_MISSING = object()


class Patch:
    """One attribute of Keras, and its replacement.

    A patch is a class attribute of `KerasDriver`. When Keras calls the attribute, the driver's method of the patch's name is called
    with Keras's own function and the arguments. The base driver calls Keras's function, as happens without a driver.

    Args:
        target: `module:attribute` or `module:Class.attribute` below `keras.src`, as in Keras 3.16, or an absolute one below
            `keras`. A name without a colon is a module that modules of Keras import.
        expects: The signature, as `inspect.signature` prints it. A tuple if supported releases differ.
        why: The reason.
        driver: Gets the arguments of the call and returns the driver, or None. Default: the topic's.
        does: Called without a driver, and by the base driver, instead of Keras's function.
        everywhere: Whether to replace it also in each module that has imported it by name.
        in_subclasses: Whether to replace it only in classes that are passed to `install_in`, and not in the class itself.
        adds: The new attribute if Keras has none of that name. A function gets no original.
        instead: The replacement; no driver is asked.
        optional: Whether the patch is skipped if this Keras lacks the attribute.
    """

    name: str
    topic: str
    otherwise: str

    def __init__(
        self,
        target: str,
        expects: str | tuple[str, ...] = "",
        *,
        why: str,
        driver: Callable[..., Any] | None = None,
        does: Callable[..., Any] | None = None,
        everywhere: bool = False,
        in_subclasses: bool = False,
        adds: Any = None,
        instead: Any = None,
        optional: bool = False,
    ) -> None:
        self.target, self.why = target, why
        self.expects = (expects,) if isinstance(expects, str) else expects
        self.everywhere, self.in_subclasses, self._optional = everywhere, in_subclasses, optional
        self.find_driver, self._does, self._adds, self._instead = driver, does, adds, instead
        self._changed: list[tuple[Any, str, Any]] = []
        self._changed_classes: weakref.WeakSet[type] = weakref.WeakSet()  # Weak: users may make a class in each call of a function.

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, driver: Any, owner: Any = None) -> Any:
        if driver is None:
            return self
        return self._keras_or_shared

    def _keras_or_shared(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self._does is None else self._does(original, *args, **kwargs)

    @property
    def row(self) -> Row:
        """The row of the patch in the table."""
        return Row(self.topic, self.target, self.expects[0], self.why, self.otherwise)

    def find(self) -> tuple[Any, str, Any]:
        """Finds the attribute to replace.

        Returns:
            The module or class that defines it, its name there, and its value as it is stored; `_MISSING` if there is none.
        """
        module_name, _, path = place(self.target).partition(":")
        if not path:
            return None, module_name, importlib.import_module(module_name)
        *holders, name = path.split(".")
        owner: Any = None
        try:
            owner = importlib.import_module(module_name if module_name.startswith("keras.") else f"keras.src.{module_name}")
            for holder in holders:
                owner = getattr(owner, holder)
            found = vars(owner).get(name, _MISSING)
        except (ImportError, AttributeError):
            owner, found = None, _MISSING
        return owner, name, found

    def misfit(self) -> str:
        """Describes how this Keras differs from the expected one; empty if it does not."""
        owner, _, found = self.find()
        target = place(self.target)
        if self._adds is not None:
            return f"`{target}` has no place." if owner is None else ""
        if found is _MISSING:
            # An attribute that an older Keras lacks was moved if a newer one lacks it.
            return f"`{target}` is gone." if not self._optional or KERAS.is_newer(keras.__version__) else ""
        if self.expects == ("",):
            return ""
        signature = str(inspect.signature(found)) if callable(found) else f"no function but {found!r}"
        return "" if signature in self.expects else f"`{target}` is {signature}, not {' or '.join(self.expects)}."

    def install(self) -> None:
        """Replaces the attribute."""
        if self._changed or self.in_subclasses:
            return
        owner, name, original = self.find()
        if self._adds is not None:
            if not hasattr(owner, name):
                self._set(owner, name, self._adds)
            return
        if original is _MISSING:
            return
        replacement = self._instead if self._instead is not None else self._replacement(original)
        if owner is not None:
            self._set(owner, name, replacement)
        if self.everywhere:
            for module, attribute in _attributes_that_are(original):
                self._set(module, attribute, replacement)

    def install_in(self, kind: type) -> None:
        """Replaces the attribute in a class and in the classes that it derives from, where they define it."""
        base, name, _ = self.find()
        for owner in kind.__mro__:
            if name in vars(owner) and owner is not base and not hasattr(vars(owner)[name], "is_patched"):
                setattr(owner, name, self._replacement(vars(owner)[name]))
                self._changed_classes.add(owner)

    def uninstall(self) -> None:
        """Restores the original attribute."""
        while self._changed:
            owner, name, original = self._changed.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if self._changed_classes:
            _, name, _ = self.find()
            for kind in self._changed_classes:
                found: Any = vars(kind).get(name)
                if hasattr(found, "is_patched"):  # Otherwise other code has replaced it since.
                    setattr(kind, name, found.__wrapped__)
            self._changed_classes.clear()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._changed.append((owner, name, _namespace(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def _replacement(self, original: Any) -> Any:
        find_driver: Any = self.find_driver
        method, without_driver = self.name, self._keras_or_shared

        def replaced(*args: Any, **kwargs: Any) -> Any:
            driver = find_driver(*args, **kwargs)
            return (without_driver if driver is None else getattr(driver, method))(original, *args, **kwargs)

        if isinstance(original, type):  # `wraps` would create other attributes that it reads of a class.
            replaced = functools.wraps(original, ("__module__", "__name__", "__qualname__", "__doc__"), ())(replaced)
        else:
            replaced = functools.wraps(original)(replaced)
        replaced.is_patched = True  # type: ignore[attr-defined]
        return replaced


def _attributes_that_are(value: Any) -> Iterator[tuple[Any, str]]:
    """Finds the modules that have imported an object by name, as Keras's data sets and programs import `get_file`.

    For a module, such as `warnings`, only modules of Keras are searched.
    """
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (not isinstance(value, types.ModuleType) or _is_of_keras(module_name)):
            yield from ((module, name) for name, found in list(_namespace(module).items()) if found is value)


def _is_of_keras(module_name: str) -> bool:
    return module_name.startswith("keras.src.")


def _namespace(owner: Any) -> Any:
    """Returns the attributes that a class or module defines itself. Some modules load themselves on attribute access."""
    return object.__getattribute__(owner, "__dict__") if isinstance(owner, types.ModuleType) else vars(owner)


@dataclass(frozen=True)
class Topic:
    """The head of a part of the table: it holds for the patches that follow it in the class.

    Args:
        title: The part of Keras that is changed.
        otherwise: The reason why neither a subclass nor a public hook of Keras suffices.
        driver: Finds the driver from the arguments of the call, for patches without their own `driver`.
    """

    title: str
    otherwise: str
    driver: Callable[..., Any]


class Registry:
    """The patches of a class and its bases, in order."""

    def __init__(self, table: type) -> None:
        self.patches: list[Patch] = []
        topic = None
        for entry in [entry for base in table.__mro__ for entry in vars(base).values()]:
            if isinstance(entry, Topic):
                topic = entry
            elif isinstance(entry, Patch):
                assert topic is not None, f"{entry.target} stands below no topic"
                entry.topic, entry.otherwise = topic.title, topic.otherwise
                entry.find_driver = entry.find_driver or topic.driver
                self.patches.append(entry)

    def misfits(self) -> list[str]:
        """Describes the patches that do not fit this Keras. Installed patches fit."""
        return [misfit for patch in self._fresh() if (misfit := patch.misfit())]

    def install(self) -> None:
        """Checks every patch, then installs all. Nothing is changed if one does not fit, or all are installed.

        Raises:
            UnsupportedVersionError: Patches do not fit this Keras. The message names each of them.
        """
        KERAS.refuse_misfits(keras.__version__, self.misfits())
        for patch in self._fresh():
            patch.install()

    def _fresh(self) -> list[Patch]:
        return [patch for patch in self.patches if not patch._changed]

    def uninstall(self) -> None:
        """Restores Keras to its state before `install`."""
        for patch in reversed(self.patches):
            patch.uninstall()

    def describe(self) -> list[Row]:
        """Lists the patches."""
        return [patch.row for patch in self.patches]
