"""Which releases of TensorFlow and Keras the package is tested with."""

from __future__ import annotations

from dataclasses import dataclass

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

    def warn_of_newer(self, installed: str) -> None:
        """Warns of a release that is newer than those that are tested. All that is replaced or imported there fits."""
        if self.is_newer(installed):
            what = f"tfrep_strategy is not tested with {self.name} {installed}, but all that it needs is there."
            warn(message(what, self.hint, newest_tested=self.newest))


TENSORFLOW = Tested("TensorFlow", "2.19", "2.21")
KERAS = Tested("Keras", "3.12", "3.15")
