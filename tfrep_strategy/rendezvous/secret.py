"""The secret without which a process cannot join a run."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from platformdirs import user_cache_dir

from tfrep_strategy.errors import ConfigurationError, message

_SHORTEST, _LONGEST = 16, 1 << 16
_MAKE_ONE = "(umask 077; openssl rand -hex 32 > FILE) makes one; copy it to all machines."


def shared_secret(one_machine: bool) -> bytes:
    """Returns the secret that the processes of a run share.

    `TFREP_SECRET_FILE` names a file with it. On one machine the user's own is used by default. It is made when it is first
    needed, in the user's cache folder.

    Args:
        one_machine: Whether all processes are on this machine.

    Returns:
        The secret.

    Raises:
        ConfigurationError: The file cannot be read, or others may read it, or there is none, and the processes are on
            several machines.

    Example:
        >>> shared_secret(one_machine=True) == shared_secret(one_machine=True)
        True
    """
    named = os.environ.get("TFREP_SECRET_FILE")
    if named:
        return _read(Path(named), TFREP_SECRET_FILE=named)
    if not one_machine:
        raise ConfigurationError(
            message(
                "Processes on several machines need a secret to meet.",
                hint=f"set TFREP_SECRET_FILE to a file with the same content everywhere, with mode 600. {_MAKE_ONE}",
                TFREP_SECRET_FILE=None,
            )
        )
    own = Path(user_cache_dir("tfrep-strategy"), "rendezvous.secret")
    try:
        if not own.exists():
            _make(own)
    except OSError as error:
        raise ConfigurationError(
            message(f"Cannot make a secret ({error.strerror}).", hint=f"set TFREP_SECRET_FILE. {_MAKE_ONE}", file=str(own))
        ) from None
    return _read(own, file=str(own))


def _read(path: Path, **setting: str) -> bytes:
    try:
        found = path.stat()
        # What is no file may be read for ever.
        secret = path.read_bytes().strip() if stat.S_ISREG(found.st_mode) and found.st_size <= _LONGEST else None
    except OSError as error:
        raise ConfigurationError(
            message(
                f"The secret cannot be read ({error.strerror}).",
                hint="name a file of yours; a pod of Kubernetes that does not run as root needs `fsGroup`.",
                **setting,
            )
        ) from None
    if secret is None:
        raise ConfigurationError(message(f"The secret is no file of up to {_LONGEST} bytes.", hint=_MAKE_ONE, **setting))
    # Kubernetes gives a Secret to a pod that does not run as root through the group of the pod (fsGroup).
    from_root = found.st_uid == 0 and os.geteuid() != 0
    mode = stat.S_IMODE(found.st_mode)
    if mode & (0o037 if from_root else 0o077):
        raise ConfigurationError(
            message(
                f"Others may read the secret: its file has mode {mode:o}.",
                hint="chmod 600; for a Secret of Kubernetes, `defaultMode: 0400`, and `fsGroup` if the pod does not run as root.",
                **setting,
            )
        )
    if len(secret) < _SHORTEST:
        raise ConfigurationError(message(f"The secret is shorter than {_SHORTEST} characters.", hint=_MAKE_ONE, **setting))
    return secret


def _make(file: Path) -> None:
    """Writes a new secret. Processes may do so at once; all read the one that was first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
        new.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink()
