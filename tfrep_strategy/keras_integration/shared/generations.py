"""Backups at an address, such as `gs://bucket/run`, where nothing can be renamed: each is a folder of its own, a *generation*.

The weights are written first. The metadata comes last, and is the marker: it has their checksum. What has no marker is no backup.
Older generations are removed when the new one has its marker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.errors import message
from tfrep_strategy.validation import check_scheme

_NAME = re.compile(r"generation-(\d{8,})")


class Backup(NamedTuple):
    """The paths of a backup's weights and metadata."""

    weights: str
    metadata: str


def read_metadata(path: str) -> dict[str, Any] | None:
    """Reads what belongs to weights: None where there is no file, an empty dictionary where it is not complete.

    Args:
        path: Of the file, or its address.
    """
    try:
        with tf.io.gfile.GFile(path, "r") as file:
            content = json.loads(file.read())
    except tf.errors.NotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("epoch"), int) else {}


class Generations:
    """The backups at an address.

    Args:
        address: What TensorFlow's `tf.io.gfile` can write to.
        names: What the two files of a backup are called.

    Raises:
        ConfigurationError: TensorFlow has no file system for such addresses.

    Example:
        >>> generations = Generations("ram://run", Backup("w", "m"))
        >>> with generations.added(1) as new:
        ...     for path in new:
        ...         written = Path(path).write_text('{"epoch": 1}')
        >>> generations.marked()
        [Backup(weights='ram://run/generation-00000001/w', metadata='ram://run/generation-00000001/m')]
    """

    def __init__(self, address: str, names: Backup) -> None:
        check_scheme(address, tf.io.gfile.get_registered_schemes())
        self._address, self._names = address.rstrip("/"), names

    def marked(self) -> list[Backup]:
        """Returns the paths of those that have a marker, the newest first. One that plain Keras has written comes last."""
        with self._told("read"):
            return [backup for backup in self._newest_first() if read_metadata(backup.metadata)]

    def files(self) -> dict[str, int]:
        """Returns all files of backups, also of those without a marker, and how many bytes they have."""
        with self._told("read"):
            paths = [path for backup in self._newest_first() for path in backup if tf.io.gfile.exists(path)]
            return {path.removeprefix(f"{self._address}/"): tf.io.gfile.stat(path).length for path in paths}

    @contextlib.contextmanager
    def added(self, kept: int) -> Iterator[Backup]:
        """Gives paths of this machine to write a backup to, and makes it the newest generation after the block.

        Args:
            kept: How many generations there are then.

        Raises:
            OSError: It cannot be written. Those that were there are as they were.
        """
        with tempfile.TemporaryDirectory(prefix="tfrep-backup-") as folder, self._told("written"):
            new = Backup(*(os.path.join(folder, name) for name in self._names))
            yield new
            before, kept_too = self._newest_first(), self.marked()[: kept - 1] if kept > 1 else []
            place = f"{self._address}/generation-{max(self._numbers(), default=0) + 1:08d}"
            tf.io.gfile.makedirs(place)
            for path, remote in zip(new, self._backup(place), strict=True):
                tf.io.gfile.copy(path, remote)
            for backup in before:
                if backup not in kept_too:
                    self._remove(backup)

    @contextlib.contextmanager
    def copied(self, backup: Backup) -> Iterator[Backup]:
        """Gives the paths of copies on this machine, for the time of the block.

        Raises:
            OSError: They cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="tfrep-backup-") as folder:
            copies = Backup(*(os.path.join(folder, name) for name in self._names))
            with self._told("read"):
                for path, copy in zip(backup, copies, strict=True):
                    tf.io.gfile.copy(path, copy)
            yield copies

    def unmark(self) -> None:
        """Takes their markers from all, the oldest first: what a kill leaves is no older state of the training."""
        with self._told("removed"):
            for backup in reversed(self._newest_first()):
                _remove_file(backup.metadata)

    def _newest_first(self) -> list[Backup]:
        folders = [f"generation-{number:08d}" for number in sorted(self._numbers(), reverse=True)]
        own = [self._backup(f"{self._address}/{folder}") for folder in folders]
        return [*own, self._backup(self._address)]

    def _numbers(self) -> list[int]:
        """Returns the numbers of the generations; folders are listed with a slash by some file systems."""
        try:
            names = tf.io.gfile.listdir(self._address)
        except tf.errors.NotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NAME.fullmatch(name.rstrip("/")))]

    def _backup(self, folder: str) -> Backup:
        return Backup(*(f"{folder}/{name}" for name in self._names))

    def _remove(self, backup: Backup) -> None:
        """Removes what was a backup: the marker first."""
        _remove_file(backup.metadata)
        folder = os.path.dirname(backup.metadata)
        if folder == self._address:
            _remove_file(backup.weights)
        else:
            tf.io.gfile.rmtree(folder)

    @contextlib.contextmanager
    def _told(self, done: str) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            text = f"A backup cannot be {done} there. Complete ones that were there are as they were."
            hint = "look whether the address is right, can be reached, and whether you may write there."
            raise OSError(message(text, hint, backup_dir=self._address, error=error.message)) from error


def _remove_file(path: str) -> None:
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)
