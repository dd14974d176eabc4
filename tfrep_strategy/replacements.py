"""How attributes of another package are replaced: declared with their signatures and reasons, checked, undone to the letter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfrep_strategy.versions import Tested

_MISSING = object()


@dataclass(frozen=True)
class Row:
    """What a person reads about a replacement.

    Attributes:
        topic: What part of the package it belongs to.
        target: The attribute.
        expects: The signature that it has to have; empty for what is no function, or is added.
        why: Why it has to be replaced.
        otherwise: Why neither a subclass nor a public hook does it.
    """

    topic: str
    target: str
    expects: str
    why: str
    otherwise: str


@dataclass
class Replacement:
    """One attribute, and what makes the one that stands in its place.

    Attributes:
        owner: The module or class that defines it, or a dictionary that holds it.
        name: Its name there, or its key.
        expects: Its signature, without annotations; one for each release where they differ. Empty for what is no function.
        makes: Gets what is there, and returns what is to be there.
        why: Why it has to be replaced.
        also: Further owners, which have imported it by name.
    """

    owner: Any
    name: Any
    expects: str | tuple[str, ...]
    makes: Callable[[Any], Any]
    why: str
    also: Sequence[Any] = ()
    _before: Any = field(default=_MISSING, init=False)

    @property
    def target(self) -> str:
        """What is replaced, as a person reads it."""
        if isinstance(self.owner, dict):
            return f"{self.name.__module__}:{self.name.__qualname__} (a loop over it)"
        module = getattr(self.owner, "__module__", None)
        place = f"{module}:{self.owner.__qualname__}." if module else f"{self.owner.__name__}:"
        return f"{place}{self.name}"

    def misfit(self) -> str:
        """Says how what is there differs from what is expected; empty if it does not."""
        found = self._found(self.owner)
        if found is _MISSING:
            return f"`{self.target}` is gone."
        if not self.expects:
            return ""
        signature = _signature(found) if callable(found) else f"no function but {found!r}"
        expected = (self.expects,) if isinstance(self.expects, str) else self.expects
        return "" if signature in expected else f"`{self.target}` is {signature}, not {' or '.join(expected)}."

    def install(self) -> None:
        """Replaces the attribute, if that is not done yet."""
        if self._before is _MISSING:
            self._before = self._found(self.owner)
            self._put(self.makes(self._before))

    def uninstall(self) -> None:
        """Puts back what was there."""
        if self._before is not _MISSING:
            self._put(self._before)
            self._before = _MISSING

    def _found(self, owner: Any) -> Any:
        return owner.get(self.name, _MISSING) if isinstance(owner, dict) else getattr(owner, self.name, _MISSING)

    def _put(self, value: Any) -> None:
        for owner in (self.owner, *self.also):
            if isinstance(owner, dict):
                owner[self.name] = value
            else:
                setattr(owner, self.name, value)


@dataclass(frozen=True)
class Replacements:
    """A table of what is replaced in another package.

    Attributes:
        of: The releases of it that are tested.
        topic: A title.
        otherwise: Why neither a subclass nor a public hook does it.
        entries: The table.
    """

    of: Tested
    topic: str
    otherwise: str
    entries: Sequence[Replacement]

    def install(self, installed: str) -> None:
        """Checks every entry, and then makes them all; none where one does not fit.

        Args:
            installed: The release that is installed.

        Raises:
            UnsupportedVersionError: Some do not fit. It names each of them.
        """
        fresh = [each for each in self.entries if each._before is _MISSING]
        self.of.refuse_misfits(installed, [misfit for each in fresh if (misfit := each.misfit())])
        for each in fresh:
            each.install()

    def uninstall(self) -> None:
        """Makes the other package what it was."""
        for each in reversed(self.entries):
            each.uninstall()

    def describe(self) -> list[Row]:
        """Lists the entries."""

        def first(expects: str | tuple[str, ...]) -> str:
            return expects if isinstance(expects, str) else expects[0]

        return [Row(self.topic, each.target, first(each.expects), each.why, self.otherwise) for each in self.entries]


def _signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
