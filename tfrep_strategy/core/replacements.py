"""Private parts of TensorFlow and Keras: tested releases, names that are used, and attributes that are replaced."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from tfrep_strategy.errors import UnsupportedVersionError, message, warn


@dataclass(frozen=True)
class Tested:
    """A distribution, and its tested releases. `pyproject.toml` has the same bounds.

    Attributes:
        name: Its name, as its users write it.
        oldest: The oldest supported release, such as "3.12".
        newest: The newest tested minor release.
    """

    name: str
    oldest: str
    newest: str

    @property
    def requirement(self) -> str:
        """The requirement for pip.

        Example:
            >>> Tested("Keras", "3.12", "3.15").requirement
            'keras>=3.12,<3.16'
        """
        major, minor = Version(self.newest).release
        return f"{self.name.lower()}>={self.oldest},<{major}.{minor + 1}"

    @property
    def hint(self) -> str:
        """The command that installs a release that fits."""
        return f"pip install '{self.requirement}'"

    def is_newer(self, installed: str) -> bool:
        """Returns whether a release, or the nightly before it, is newer than the tested ones.

        Example:
            >>> keras = Tested("Keras", "3.12", "3.15")
            >>> keras.is_newer("3.15.9"), keras.is_newer("3.16.0.dev2026112900")
            (False, True)
        """
        return Version(installed).release[:2] > Version(self.newest).release

    def refuse_older(self, installed: str) -> None:
        """Refuses a release that is too old.

        Raises:
            UnsupportedVersionError: The release is too old.
        """
        if Version(installed) < Version(self.oldest):
            what = f"tfrep_strategy needs {self.name} {self.oldest} or newer."
            raise UnsupportedVersionError(message(what, self.hint, code="TFREP-E003", installed=installed))

    def refuse_misfits(self, installed: str, misfits: Sequence[str]) -> None:
        """Refuses a release that has changed names that the package needs, with one error for all of them.

        Args:
            installed: The release.
            misfits: Its changes, a sentence each.

        Raises:
            UnsupportedVersionError: There are changes.

        Example:
            >>> Tested("Keras", "3.12", "3.15").refuse_misfits("3.16.0", ["`losses.Loss` is gone."])
            Traceback (most recent call last):
            ...
            tfrep_strategy.errors.UnsupportedVersionError: tfrep_strategy does not fit Keras 3.16.0 (1 misfit):
            `losses.Loss` is gone.
            Hint: pip install 'keras>=3.12,<3.16' [TFREP-E003]
        """
        if misfits:
            count = f"{len(misfits)} misfit{'s' if len(misfits) > 1 else ''}"
            what = f"tfrep_strategy does not fit {self.name} {installed} ({count}):"
            raise UnsupportedVersionError(message("\n".join([what, *misfits]), self.hint, code="TFREP-E003"))

    def warn_of_newer(self, installed: str) -> None:
        """Warns of a release that is newer than the tested ones, although everything that is replaced or imported fits."""
        if self.is_newer(installed):
            what = f"tfrep_strategy is not tested with {self.name} {installed}, but all that it needs is there."
            warn(message(what, self.hint, newest_tested=self.newest))


def private(module: str, name: str = "", *, misfits: list[str]) -> Any:
    """Returns a private module, or a name in it.

    Args:
        module: The module.
        name: The name, such as "Class.method"; empty for the module itself.
        misfits: A sentence is added if it is gone, so that one error can list all.

    Returns:
        The module or object; None if it is gone.

    Example:
        >>> misfits = []
        >>> private("json", "Gone", misfits=misfits), misfits
        (None, ['`json.Gone` is gone.'])
    """
    try:
        found = importlib.import_module(module)
        return operator.attrgetter(name)(found) if name else found
    except (ImportError, AttributeError):
        misfits.append(f"`{module}{'.' if name else ''}{name}` is gone.")
        return None


TENSORFLOW = Tested("TensorFlow", "2.19", "2.21")
KERAS = Tested("Keras", "3.12", "3.15")


_MISSING = object()


@dataclass(frozen=True)
class Row:
    """A row of the table of replacements.

    Attributes:
        topic: The part of the package.
        target: The attribute.
        expects: Its expected signature; empty if it is not a function, or is added.
        why: The reason for the replacement.
        otherwise: The reason why neither a subclass nor a public hook suffices.
    """

    topic: str
    target: str
    expects: str
    why: str
    otherwise: str


@dataclass
class Replacement:
    """One attribute, and its replacement.

    Attributes:
        owner: The module or class that defines it, or a dictionary that holds it.
        name: Its name there, or its key.
        expects: Its signature, without annotations; one for each release if they differ. Empty if it is not a function.
        makes: Takes the attribute, and returns its replacement.
        why: The reason for the replacement.
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
        """The readable name of the attribute."""
        if isinstance(self.owner, dict):
            return f"{self.name.__module__}:{self.name.__qualname__} (a loop over it)"
        module = getattr(self.owner, "__module__", None)
        place = f"{module}:{self.owner.__qualname__}." if module else f"{self.owner.__name__}:"
        return f"{place}{self.name}"

    def misfit(self) -> str:
        """Describes how the attribute differs from the expected one; empty if it fits."""
        found = self._found(self.owner)
        if found is _MISSING:
            return f"`{self.target}` is gone."
        if not self.expects:
            return ""
        signature = _signature(found) if callable(found) else f"no function but {found!r}"
        expected = (self.expects,) if isinstance(self.expects, str) else self.expects
        return "" if signature in expected else f"`{self.target}` is {signature}, not {' or '.join(expected)}."

    def install(self) -> None:
        """Replaces the attribute, unless that is done already."""
        if self._before is _MISSING:
            self._before = self._found(self.owner)
            self._put(self.makes(self._before))

    def uninstall(self) -> None:
        """Restores the original attribute."""
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
    """The table of replacements in another package.

    Attributes:
        of: The package's tested releases.
        topic: A title.
        otherwise: The reason why neither a subclass nor a public hook suffices.
        entries: The table.
    """

    of: Tested
    topic: str
    otherwise: str
    entries: Sequence[Replacement]

    def install(self, installed: str) -> None:
        """Checks every entry, and then installs all; none if one does not fit.

        Args:
            installed: The release that is installed.

        Raises:
            UnsupportedVersionError: Entries do not fit. The message names each of them.
        """
        fresh = [each for each in self.entries if each._before is _MISSING]
        self.of.refuse_misfits(installed, [misfit for each in fresh if (misfit := each.misfit())])
        for each in fresh:
            each.install()

    def uninstall(self) -> None:
        """Restores the other package."""
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
