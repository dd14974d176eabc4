"""Backups of `BackupAndRestore`: weights and their metadata, which form one unit.

A backup has the two files of Keras, so Keras can read it. The metadata holds the checksum of the weights. While a backup is
written, the names of the previous one end in ".bkp". After a kill at any moment, one of the two metadata files matches its weights.

An address such as `gs://bucket/run` does not allow renaming. There each backup is a folder, a *generation* (`Generations`). The
weights are written first, then the metadata with their checksum, which is the marker. A folder without a marker is not a backup.
Older generations are removed once the new one has its marker.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.core.validation import check_scheme
from tfrep_strategy.errors import message, warn
from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import file_utils
from tfrep_strategy.keras_integration.saving.model_files import is_local
from tfrep_strategy.keras_integration.whole_files import hidden_folder, synchronize, whole

_NAME = re.compile(r"generation-(\d{8,})")


class Backup(NamedTuple):
    """The paths of a backup's weights and metadata."""

    weights: str
    metadata: str


def read_metadata(path: str) -> dict[str, Any] | None:
    """Reads the metadata of weights: None if there is no file, an empty dictionary if it is incomplete.

    Args:
        path: The path or address of the file.
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
        address: An address that `tf.io.gfile` can write to.
        names: The names of the two files of a backup.

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
        """Returns the backups that have a marker, the newest first. A backup of plain Keras comes last."""
        with self._explaining_errors("read"):
            return [backup for backup in self._newest_first() if read_metadata(backup.metadata)]

    def files(self) -> dict[str, int]:
        """Returns the sizes in bytes of all files of backups, by their names, including backups without a marker."""
        with self._explaining_errors("read"):
            paths = [path for backup in self._newest_first() for path in backup if tf.io.gfile.exists(path)]
            return {path.removeprefix(f"{self._address}/"): tf.io.gfile.stat(path).length for path in paths}

    @contextlib.contextmanager
    def added(self, kept: int) -> Iterator[Backup]:
        """Yields local paths to write a backup to, and makes it the newest generation after the block.

        Args:
            kept: The number of generations to keep, including the new one.

        Raises:
            OSError: The backup cannot be written. Existing backups are unchanged.
        """
        with tempfile.TemporaryDirectory(prefix="tfrep-backup-") as folder, self._explaining_errors("written"):
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
        """Yields the paths of local copies, which exist during the block.

        Raises:
            OSError: The files cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="tfrep-backup-") as folder:
            copies = Backup(*(os.path.join(folder, name) for name in self._names))
            with self._explaining_errors("read"):
                for path, copy in zip(backup, copies, strict=True):
                    tf.io.gfile.copy(path, copy)
            yield copies

    def unmark(self) -> None:
        """Removes the markers of all generations, the oldest first, so that a kill cannot leave an older state of the training."""
        with self._explaining_errors("removed"):
            for backup in reversed(self._newest_first()):
                _remove_file(backup.metadata)

    def _newest_first(self) -> list[Backup]:
        folders = [f"generation-{number:08d}" for number in sorted(self._numbers(), reverse=True)]
        own = [self._backup(f"{self._address}/{folder}") for folder in folders]
        return [*own, self._backup(self._address)]

    def _numbers(self) -> list[int]:
        """Returns the numbers of the generations. Some file systems list folders with a slash."""
        try:
            names = tf.io.gfile.listdir(self._address)
        except tf.errors.NotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NAME.fullmatch(name.rstrip("/")))]

    def _backup(self, folder: str) -> Backup:
        return Backup(*(f"{folder}/{name}" for name in self._names))

    def _remove(self, backup: Backup) -> None:
        """Removes a backup, the marker first."""
        _remove_file(backup.metadata)
        folder = os.path.dirname(backup.metadata)
        if folder == self._address:
            _remove_file(backup.weights)
        else:
            tf.io.gfile.rmtree(folder)

    @contextlib.contextmanager
    def _explaining_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            text = f"A backup cannot be {done} there. Complete backups in that place are unchanged."
            hint = "check that the address is right and can be reached, and that you may write there."
            raise OSError(message(text, hint, backup_dir=self._address, error=error.message)) from error


def _remove_file(path: str) -> None:
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


_BLOCK = 2**20
_CHECKSUM, _BATCHES = "weights_sha256", "batches_done"


class Backups(KerasDriver):
    """Writes, restores and removes backups."""

    def save_backup(self, original: Any, callback: Any) -> None:
        """Writes a backup. It replaces the previous one when it is complete."""
        _save(callback, _metadata(callback), lambda path: callback.model.save_weights(path, overwrite=True))

    def restore_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Restores the newest complete backup."""
        restore(original, callback, logs, find(callback))

    def remove_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Removes a backup, the metadata first: if the removal is interrupted, weights alone do not count as a backup."""
        if callback.delete_checkpoint and not is_local(callback.backup_dir):
            _generations(callback).unmark()
        elif callback.delete_checkpoint:
            for path in (callback._prev_training_metadata_path, callback._training_metadata_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
        original(callback, logs)


def exists(callback: Any) -> bool:
    """Returns whether there is a backup to restore, complete or not. No checksum is computed.

    Args:
        callback: A `BackupAndRestore`.
    """
    if is_local(callback.backup_dir):
        return os.path.exists(callback._weights_path)
    return bool(_generations(callback).marked())


def newest_metadata(callback: Any) -> dict[str, Any]:
    """Reads the metadata of the newest weights. No checksum is computed.

    Args:
        callback: A `BackupAndRestore`.

    Returns:
        The metadata; an empty dictionary if none is complete.
    """
    found = _pairs(callback) if is_local(callback.backup_dir) else _generations(callback).marked()
    return next((content for backup in found if (content := read_metadata(backup.metadata))), {})


def find(callback: Any) -> list[Backup]:
    """Finds the complete backups. At an address these have a marker, and `restore` checks their checksums.

    A backup of plain Keras has no checksum, and counts as complete.

    Args:
        callback: A `BackupAndRestore`.

    Returns:
        The complete backups, the newest first; none if no backup was ever complete.

    Raises:
        OSError: There are backups, but none is complete.
    """
    if not is_local(callback.backup_dir):
        generations = _generations(callback)
        marked = generations.marked()
        if not marked and generations.files():
            _warn_of_interruption(callback)
        return marked
    pairs = _pairs(callback)
    weights = [pair.weights for pair in pairs if file_utils.exists(pair.weights)]
    contents = [read_metadata(pair.metadata) for pair in pairs]
    checksum = functools.cache(_checksum)
    found: dict[Backup, tuple[int, int]] = {}
    for pair, content in zip(pairs, contents, strict=True):
        if content:
            wanted = content.get(_CHECKSUM)
            own = [path for path in weights if (path == pair.weights if wanted is None else checksum(path) == wanted)]
            found |= {Backup(path, pair.metadata): (content["epoch"], content.get(_BATCHES, 0)) for path in own[:1]}
    if found or not weights and contents == [None, None]:
        return sorted(found, key=lambda backup: found[backup], reverse=True)
    if contents != [None, None]:
        raise _none_is_whole(callback)
    _warn_of_interruption(callback)
    return []


def restore(original: Any, callback: Any, logs: Any, found: list[Backup]) -> int:
    """Restores the first backup that can be read.

    Args:
        original: Keras's method.
        callback: A `BackupAndRestore`.
        logs: The argument of Keras's method.
        found: The result of `find`.

    Returns:
        Number of completed batches of the interrupted epoch.

    Raises:
        OSError: No backup can be read.
    """
    if not callback.model.built:
        original(callback, logs)  # Keras raises an error.
    failure = None
    for backup in found:
        try:
            with _in_place(callback, backup):
                callback._load_model()
                return _batches_done(callback)
        except OSError as error:
            failure = error
    if failure is not None:
        raise _none_is_whole(callback) from failure
    return 0


def prepared(callback: Any, weights: io.BytesIO, more: Mapping[str, Any]) -> Callable[[], None]:
    """Snapshots the metadata, and returns a function that writes the backup. It may run on any thread while training continues.

    Args:
        callback: A `BackupAndRestore`.
        weights: A copy of the content of the file of weights.
        more: Further metadata.
    """
    content = {**more, **_metadata(callback)}

    def write_weights(path: str) -> None:
        data = weights.getbuffer()
        with whole(path, data.nbytes) as unfinished, open(unfinished, "wb", buffering=0) as file:
            while data:  # One call may write only a part.
                data = data[file.write(data) :]

    return lambda: _save(callback, content, write_weights)


def _metadata(callback: Any) -> dict[str, int]:
    batch = callback._last_batch_seen
    done = 0 if callback.save_freq == "epoch" else batch + 1
    return {"epoch": callback._current_epoch, "batch": batch, _BATCHES: done}


def _save(callback: Any, content: dict[str, Any], write_weights: Callable[[str], None]) -> None:
    if is_local(callback.backup_dir):
        os.makedirs(callback.backup_dir, exist_ok=True)
        with hidden_folder(callback.backup_dir) as unfinished:
            new = Backup(*(os.path.join(unfinished, os.path.basename(path)) for path in _pairs(callback)[0]))
            _write(new, content, write_weights)
            _replace_current(callback, new, unfinished)
    else:
        with _generations(callback).added(2 if callback.double_checkpoint else 1) as new:
            _write(new, content, write_weights)


def _write(new: Backup, content: dict[str, Any], write_weights: Callable[[str], None]) -> None:
    write_weights(new.weights)
    with whole(new.metadata) as path, open(path, "w", encoding="utf-8") as file:
        json.dump(content | {_CHECKSUM: _checksum(new.weights)}, file)


def _replace_current(callback: Any, new: Backup, unfinished: str) -> None:
    """Renames a new backup to the current one. After each step one backup is complete."""
    current, previous = _pairs(callback)
    replaced = read_metadata(current.metadata)
    # If both are equal, a save was interrupted, and their weights may already be the previous ones.
    if replaced and replaced != read_metadata(previous.metadata) and os.path.exists(current.weights):
        for path, kept in zip(current, previous, strict=True):
            _give_name(path, kept, unfinished)
        synchronize(callback.backup_dir)
    for path, place in zip(new, current, strict=True):
        os.replace(path, place)
    synchronize(callback.backup_dir)
    if not callback.double_checkpoint:
        for path in reversed(previous):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


@contextlib.contextmanager
def _in_place(callback: Any, backup: Backup) -> Iterator[None]:
    """Puts a backup where Keras reads it, during the block.

    Raises:
        OSError: The backup comes from an address, and is incomplete.
    """
    current = _pairs(callback)[0]
    if is_local(callback.backup_dir):
        if backup != current:
            with hidden_folder(callback.backup_dir) as unfinished:
                for path, place in zip(backup, current, strict=True):
                    if path != place:  # After each step one backup is complete.
                        _give_name(path, place, unfinished)
        yield
        return
    with _generations(callback).copied(backup) as copies:
        if (read_metadata(copies.metadata) or {}).get(_CHECKSUM) not in (None, _checksum(copies.weights)):
            raise OSError(message("The weights of this backup do not match its metadata.", weights=backup.weights))
        callback._weights_path, callback._training_metadata_path = copies
        try:
            yield
        finally:
            callback._weights_path, callback._training_metadata_path = current


def _generations(callback: Any) -> Generations:
    names = Backup(*(os.path.basename(path) for path in _pairs(callback)[0]))
    return Generations(os.fspath(callback.backup_dir), names)


def _give_name(path: str, name: str, folder: str) -> None:
    """Gives a file a second name, and replaces any file of that name."""
    link = os.path.join(folder, f"{os.path.basename(name)}.link")
    try:
        os.link(path, link)
    except OSError:  # Some file systems have no links.
        shutil.copyfile(path, link)
        synchronize(link)
    os.replace(link, name)


def _pairs(callback: Any) -> list[Backup]:
    """Returns the paths of the current and the previous backup."""
    return [
        Backup(os.fspath(callback._weights_path), os.fspath(callback._training_metadata_path)),
        Backup(callback._prev_weights_path, callback._prev_training_metadata_path),
    ]


def _batches_done(callback: Any) -> int:
    """Returns the number of batches of the interrupted epoch that the backup has seen. Keras starts that epoch again."""
    content = read_metadata(callback._training_metadata_path) or {}
    return content.get(_BATCHES, 0 if callback.save_freq == "epoch" else content.get("batch", -1) + 1)


def _checksum(path: str) -> str:
    return file_utils.hash_file(path, "sha256", _BLOCK)


def _warn_of_interruption(callback: Any) -> None:
    what = "A first backup was interrupted: there are weights, and no metadata. Training starts from the beginning."
    warn(message(what, backup_dir=callback.backup_dir))


def _none_is_whole(callback: Any) -> OSError:
    if is_local(callback.backup_dir):
        paths = [path for pair in _pairs(callback) for path in pair if os.path.exists(path)]
        sizes = {os.path.basename(path): os.path.getsize(path) for path in paths}
    else:
        sizes = _generations(callback).files()
    found = {name: f"{size} bytes" for name, size in sizes.items()}
    hint = "put back files that are whole, or remove the folder to train from the beginning."
    return OSError(
        message("No backup in this folder is whole.", hint, code="TFREP-E024", backup_dir=callback.backup_dir, found=found)
    )
