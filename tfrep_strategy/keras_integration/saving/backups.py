"""A backup of `BackupAndRestore` is one unit: weights, and what belongs to them.

It has the two files of Keras, so that Keras can read it. The metadata holds the checksum of the weights. While a backup is written,
the one before has the names that end in ".bkp". Whatever a kill leaves, one of the two metadata files finds its weights.

At an address, where nothing can be renamed, backups are `Generations`.

Backups at an address, such as `gs://bucket/run`, where nothing can be renamed: each is a folder of its own, a *generation*.
The weights are written first. The metadata comes last, and is the marker: it has their checksum. What has no marker is no backup.
Older generations are removed when the new one has its marker.
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


_BLOCK = 2**20
_CHECKSUM, _BATCHES = "weights_sha256", "batches_done"


class Backups(KerasDriver):
    """Writes, restores and removes backups."""

    def save_backup(self, original: Any, callback: Any) -> None:
        """Writes a backup, which replaces the one before when it is complete."""
        _save(callback, _metadata(callback), lambda path: callback.model.save_weights(path, overwrite=True))

    def restore_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Restores the newest backup that is whole."""
        restore(original, callback, logs, find(callback))

    def remove_backup(self, original: Any, callback: Any, logs: Any = None) -> None:
        """Removes a backup, the metadata first: weights alone are no backup if this ends early."""
        if callback.delete_checkpoint and not is_local(callback.backup_dir):
            _generations(callback).unmark()
        elif callback.delete_checkpoint:
            for path in (callback._prev_training_metadata_path, callback._training_metadata_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
        original(callback, logs)


def exists(callback: Any) -> bool:
    """Whether there is anything to restore, whole or not; no checksum is computed.

    Args:
        callback: A `BackupAndRestore`.
    """
    if is_local(callback.backup_dir):
        return os.path.exists(callback._weights_path)
    return bool(_generations(callback).marked())


def newest_metadata(callback: Any) -> dict[str, Any]:
    """Reads what belongs to the newest weights; no checksum is computed.

    Args:
        callback: A `BackupAndRestore`.

    Returns:
        The metadata; an empty dictionary where there is none that is complete.
    """
    found = _pairs(callback) if is_local(callback.backup_dir) else _generations(callback).marked()
    return next((content for backup in found if (content := read_metadata(backup.metadata))), {})


def find(callback: Any) -> list[Backup]:
    """Finds the backups that are whole. Those at an address have a marker, and `restore` looks at their checksums.

    A backup of plain Keras has no checksum, and counts as whole.

    Args:
        callback: A `BackupAndRestore`.

    Returns:
        The newest one first; nothing where no backup was ever complete.

    Raises:
        OSError: There were backups, and none is whole.
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
        original: What Keras does.
        callback: A `BackupAndRestore`.
        logs: What Keras passes.
        found: What `find` has returned.

    Returns:
        How many batches of the interrupted epoch are done.

    Raises:
        OSError: None can be read.
    """
    if not callback.model.built:
        original(callback, logs)  # Keras refuses it.
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
    """Returns what writes a backup of what now holds. It may run on any thread, while training goes on.

    Args:
        callback: A `BackupAndRestore`.
        weights: The content of the file of weights, a copy.
        more: What is added to the metadata.
    """
    content = {**more, **_metadata(callback)}

    def write_weights(path: str) -> None:
        data = weights.getbuffer()
        with whole(path, data.nbytes) as unfinished, open(unfinished, "wb", buffering=0) as file:
            while data:  # One call may write a part only.
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
    """Gives a backup its names; each step leaves a whole one."""
    current, previous = _pairs(callback)
    replaced = read_metadata(current.metadata)
    # Where both are equal, a save was interrupted, and the weights that belong to them may be those that are kept already.
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
    """Has a backup where Keras reads it.

    Raises:
        OSError: It comes from an address, and is not whole.
    """
    current = _pairs(callback)[0]
    if is_local(callback.backup_dir):
        if backup != current:
            with hidden_folder(callback.backup_dir) as unfinished:
                for path, place in zip(backup, current, strict=True):
                    if path != place:  # Each step leaves a whole one.
                        _give_name(path, place, unfinished)
        yield
        return
    with _generations(callback).copied(backup) as copies:
        if (read_metadata(copies.metadata) or {}).get(_CHECKSUM) not in (None, _checksum(copies.weights)):
            raise OSError(message("These weights are not those of the metadata.", weights=backup.weights))
        callback._weights_path, callback._training_metadata_path = copies
        try:
            yield
        finally:
            callback._weights_path, callback._training_metadata_path = current


def _generations(callback: Any) -> Generations:
    names = Backup(*(os.path.basename(path) for path in _pairs(callback)[0]))
    return Generations(os.fspath(callback.backup_dir), names)


def _give_name(path: str, name: str, folder: str) -> None:
    """Gives a file a second name, which another file may have."""
    link = os.path.join(folder, f"{os.path.basename(name)}.link")
    try:
        os.link(path, link)
    except OSError:  # Some file systems have no links.
        shutil.copyfile(path, link)
        synchronize(link)
    os.replace(link, name)


def _pairs(callback: Any) -> list[Backup]:
    """Returns the paths of the current backup, and of the one before."""
    return [
        Backup(os.fspath(callback._weights_path), os.fspath(callback._training_metadata_path)),
        Backup(callback._prev_weights_path, callback._prev_training_metadata_path),
    ]


def _batches_done(callback: Any) -> int:
    """Returns how many batches of the interrupted epoch the restored backup has seen; Keras starts that epoch again."""
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
    return OSError(message("No backup in this folder is whole.", hint, backup_dir=callback.backup_dir, found=found))
