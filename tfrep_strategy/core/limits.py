"""Settings from outside: time limits, backups, trusted networks, ssh, checks of calls, quiet runs, Keras's backend."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from tfrep_strategy.core.validation import CommandLine, Limit, Network, Networks, Seconds, Size, variable
from tfrep_strategy.errors import ConfigurationError, message


def timeout_seconds() -> float:
    """Returns the seconds that a collective may wait for ranks that have not called it.

    `TFREP_TIMEOUT` sets it, in seconds; the default is 600. A rank may keep the others waiting for that long, for example
    while the chief writes a large file. A rank that has ended is noticed at once, without this limit.

    Returns:
        The seconds; `math.inf` if `TFREP_TIMEOUT` is 0, as under a debugger.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` is not a number of seconds, of 30 days at most.

    Example:
        >>> timeout_seconds()
        600.0
    """
    return variable(Limit, "TFREP_TIMEOUT", default=600.0) or math.inf


def longest_silence() -> float:
    """Returns the seconds that a rank may give no sign of life, for example in native code that holds Python's lock.

    `TFREP_SILENCE_TIMEOUT` sets it, in seconds; the default is 1800.

    Returns:
        The seconds; `math.inf` if `TFREP_SILENCE_TIMEOUT` is 0.

    Raises:
        ConfigurationError: `TFREP_SILENCE_TIMEOUT` is not a number of seconds, of 30 days at most.

    Example:
        >>> longest_silence()
        1800.0
    """
    return variable(Limit, "TFREP_SILENCE_TIMEOUT", default=1800.0) or math.inf


def machine_silence() -> float:
    """Returns the seconds without a message from the launcher of another machine after which that machine counts as lost.

    It is 15, or `TFREP_TIMEOUT` if that is smaller, but at least 5.

    Returns:
        The seconds; `math.inf` if `TFREP_TIMEOUT` is 0.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` is not a number of seconds, of 30 days at most.

    Example:
        >>> machine_silence()
        15.0
    """
    limit = timeout_seconds()
    return math.inf if limit == math.inf else min(15.0, max(5.0, limit))


def meeting_seconds() -> float:
    """Returns the seconds that ranks wait for each other at the rendezvous.

    `TFREP_RENDEZVOUS_TIMEOUT` sets it, in seconds; the default is 300. A cluster may start its machines minutes apart.

    Raises:
        ConfigurationError: `TFREP_RENDEZVOUS_TIMEOUT` is not a positive number, of 30 days at most.

    Example:
        >>> meeting_seconds()
        300.0
    """
    return variable(Seconds, "TFREP_RENDEZVOUS_TIMEOUT", default=300.0)


def backup_dir() -> str:
    """Returns the folder for backups of each `fit`, which `tfrep run` sets by `TFREP_BACKUP_DIR`; empty for no backups.

    Example:
        >>> backup_dir()
        ''
    """
    return os.environ.get("TFREP_BACKUP_DIR", "")


def progress_dir() -> str:
    """Returns the folder in which rank 0 records its steps, which `tfrep run` sets by `TFREP_PROGRESS_DIR`.

    Default: the folder for backups.

    Example:
        >>> progress_dir() == backup_dir()
        True
    """
    return os.environ.get("TFREP_PROGRESS_DIR") or backup_dir()


def backup_seconds() -> float | None:
    """Returns the seconds between two backups of a run.

    `TFREP_BACKUP_SECONDS` sets it, in seconds. By default backups take a fiftieth of the time.

    Returns:
        The seconds, 0 for a backup after each step; None for the default.

    Raises:
        ConfigurationError: `TFREP_BACKUP_SECONDS` is not a number of seconds, of 30 days at most.

    Example:
        >>> backup_seconds() is None
        True
    """
    return variable(Limit, "TFREP_BACKUP_SECONDS", default=None)


def grace_seconds(*, for_a_backup: bool) -> float:
    """Returns the seconds that a rank may take to end after its launcher was asked to end the run; then it is killed.

    `TFREP_GRACE` sets it, in seconds. The default is 3, or 25 if ranks write a backup first: schedulers wait for 30.

    Args:
        for_a_backup: Whether ranks may write a backup.

    Raises:
        ConfigurationError: `TFREP_GRACE` is not a positive number, of 30 days at most.

    Example:
        >>> grace_seconds(for_a_backup=False)
        3.0
    """
    return variable(Seconds, "TFREP_GRACE", default=25.0 if for_a_backup else 3.0)


def trusted_networks() -> tuple[Network, ...]:
    """Returns the networks whose machines may connect to the servers of a run on several machines, beside the run's own.

    `TFREP_TRUSTED_NETWORKS` lists them, for machines whose address differs from the one in the run.

    Raises:
        ConfigurationError: `TFREP_TRUSTED_NETWORKS` is not a list of networks.

    Example:
        >>> os.environ["TFREP_TRUSTED_NETWORKS"] = "10.0.0.0/8,fd00::/8"
        >>> trusted_networks()
        (IPv4Network('10.0.0.0/8'), IPv6Network('fd00::/8'))
    """
    return variable(Networks, "TFREP_TRUSTED_NETWORKS", default=())


def ssh_command() -> tuple[str, ...]:
    """Returns the command that reaches other hosts.

    `TFREP_SSH` sets it, with options: `ssh -F my_config`. The default is `ssh`, which reads the user's own configuration.

    Raises:
        ConfigurationError: `TFREP_SSH` is not a command line.

    Example:
        >>> os.environ["TFREP_SSH"] = "ssh -F 'my config'"
        >>> ssh_command()
        ('ssh', '-F', 'my config')
    """
    return variable(CommandLine, "TFREP_SSH", default=("ssh",))


def is_debugging() -> bool:
    """Returns whether `TFREP_DEBUG` is set, so that every collective is checked before it runs.

    Example:
        >>> is_debugging()
        False
    """
    return os.environ.get("TFREP_DEBUG", "0") not in ("", "0")


def is_quiet() -> bool:
    """Tells whether runs and strategies say neither what they are nor how fast they were.

    Returns:
        Whether `TFREP_QUIET` is set.

    Example:
        >>> is_quiet()
        False
    """
    return os.environ.get("TFREP_QUIET", "0") not in ("", "0")


class Verification(NamedTuple):
    """The settings of `tfrep verify` for a process.

    Attributes:
        folder: The folder for values to compare.
        steps: Number of steps of each function to compare.
        shortens: Whether each epoch ends after these steps.
        nudge: Whether weights are changed in their last bit for these steps.
        stands_for: Number of replicas that this run of one device is compared with; 0 in a run with replicas.
    """

    folder: Path
    steps: int
    shortens: bool
    nudge: bool
    stands_for: int


def verification() -> Verification | None:
    """Returns the settings of `tfrep verify` for this process; None without it.

    It sets `TFREP_VERIFY_DIR`, `TFREP_VERIFY_STEPS`, `TFREP_VERIFY_FULL`, `TFREP_VERIFY_NUDGE` and `TFREP_VERIFY_STANDS_FOR`.

    Example:
        >>> os.environ.update(TFREP_VERIFY_DIR="/tmp/verified", TFREP_VERIFY_STEPS="2")
        >>> verification().steps
        2
    """
    folder = os.environ.get("TFREP_VERIFY_DIR", "")
    if not folder:
        return None
    steps, is_full, nudge = variable(Size, "TFREP_VERIFY_STEPS", default=3), "TFREP_VERIFY_FULL", "TFREP_VERIFY_NUDGE"
    replicas = int(os.environ.get("TFREP_VERIFY_STANDS_FOR", 0))
    return Verification(Path(folder), steps, os.environ.get(is_full) != "1", os.environ.get(nudge) == "1", replicas)


def check_keras_backend() -> None:
    """Refuses a backend of Keras other than TensorFlow, in its variable or its file, without loading Keras.

    Raises:
        ConfigurationError: Keras would be loaded with another backend.

    Example:
        >>> os.environ["KERAS_BACKEND"] = "jax"
        >>> check_keras_backend()
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: Only Keras's TensorFlow backend works here. Received: KERAS_BACKEND='jax'
        Hint: set KERAS_BACKEND=tensorflow. [TFREP-E001]
    """
    if backend := os.environ.get("KERAS_BACKEND"):
        received = {"KERAS_BACKEND": backend}
    else:
        file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
        backend = "tensorflow"
        with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):  # Keras ignores such a file as well.
            backend = json.loads(file.read_text("utf-8")).get("backend", backend)
        received = {"file": str(file), "backend": backend}
    if backend != "tensorflow":
        raise ConfigurationError(
            message(
                "Only Keras's TensorFlow backend works here.", hint="set KERAS_BACKEND=tensorflow.", code="TFREP-E001", **received
            )
        )
