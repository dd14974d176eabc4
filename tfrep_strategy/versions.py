"""Which releases of TensorFlow and Keras the package is tested with, and what it needs of them that is private."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from tfrep_strategy.errors import UnsupportedVersionError, message, warn


@dataclass(frozen=True)
class Tested:
    """A distribution, and its releases that are tested. `pyproject.toml` has the same bounds.

    Attributes:
        name: Its name, as its users write it.
        oldest: The oldest release that is taken, such as "3.12".
        newest: The newest minor release that is tested.
    """

    name: str
    oldest: str
    newest: str

    @property
    def requirement(self) -> str:
        """The releases that pip is told to install.

        Example:
            >>> Tested("Keras", "3.12", "3.15").requirement
            'keras>=3.12,<3.16'
        """
        major, minor = Version(self.newest).release
        return f"{self.name.lower()}>={self.oldest},<{major}.{minor + 1}"

    @property
    def hint(self) -> str:
        """What to do about a release that does not fit."""
        return f"pip install '{self.requirement}'"

    def is_newer(self, installed: str) -> bool:
        """Returns whether a release, or the nightly before it, is newer than those that are tested.

        Example:
            >>> keras = Tested("Keras", "3.12", "3.15")
            >>> keras.is_newer("3.15.9"), keras.is_newer("3.16.0.dev2026112900")
            (False, True)
        """
        return Version(installed).release[:2] > Version(self.newest).release

    def refuse_older(self, installed: str) -> None:
        """Refuses a release that is too old.

        Raises:
            UnsupportedVersionError: It is.
        """
        if Version(installed) < Version(self.oldest):
            what = f"tfrep_strategy needs {self.name} {self.oldest} or newer."
            raise UnsupportedVersionError(message(what, self.hint, installed=installed))

    def refuse_misfits(self, installed: str, misfits: Sequence[str]) -> None:
        """Refuses a release that has changed what the package needs, with one error for all of it.

        Args:
            installed: The release.
            misfits: What it has changed, a sentence each.

        Raises:
            UnsupportedVersionError: There are some.

        Example:
            >>> Tested("Keras", "3.12", "3.15").refuse_misfits("3.16.0", ["`losses.Loss` is gone."])
            Traceback (most recent call last):
            ...
            tfrep_strategy.errors.UnsupportedVersionError: tfrep_strategy does not fit Keras 3.16.0 (1 misfit):
            `losses.Loss` is gone.
            Hint: pip install 'keras>=3.12,<3.16'
        """
        if misfits:
            count = f"{len(misfits)} misfit{'s' if len(misfits) > 1 else ''}"
            what = f"tfrep_strategy does not fit {self.name} {installed} ({count}):"
            raise UnsupportedVersionError(message("\n".join([what, *misfits]), self.hint))

    def warn_of_newer(self, installed: str) -> None:
        """Warns of a release that is newer than those that are tested. All that is replaced or imported there fits."""
        if self.is_newer(installed):
            what = f"tfrep_strategy is not tested with {self.name} {installed}, but all that it needs is there."
            warn(message(what, self.hint, newest_tested=self.newest))


def private(module: str, name: str = "", *, misfits: list[str]) -> Any:
    """Returns a private module, or something from it.

    Args:
        module: The module.
        name: What is wanted from it, such as "Class.method"; empty for the module itself.
        misfits: Gets a sentence if it is gone, so that one error can tell all that is.

    Returns:
        What was found; None if it is gone.

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
