"""A run from its options to its end: what `tfrep run` and `launch` have in common."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message
from tfrep_strategy.processes.identity import (
    check_communicator,
    common_hash_seed,
    identities,
    inherited_environ,
    resolve_communicator,
)
from tfrep_strategy.processes.ranks import Command, Events, Failure, run_ranks
from tfrep_strategy.running.failures import describe

STRATEGIES = ("auto", "mirrored", "multi-worker")
"""What a run may be asked for."""


@dataclass(frozen=True)
class Options:
    """What kind of run is wanted.

    Args:
        num_replicas: How many replicas take part; by default as many as `hosts` has places, else one.
        strategy: "multi-worker": one process per replica, "mirrored": one process with all replicas, or "auto": as in
            `auto_strategy()`, one process per replica if there are several, or one process that uses all its devices if
            neither `num_replicas` nor `hosts` is given. `None`: one process per replica, which is left to make its own
            strategy.
        communicator: "auto", "horovod", "tf" or the name of an installed transport.
        hosts: Machines and how many replicas each can take, as "host1:4,host2:4"; by default this machine.
        log_dir: Folder of the log files; by default a temporary one, which stays only if the run fails.
        timeout: Seconds after which the run is stopped; by default it may take for ever.

    Raises:
        ConfigurationError: An option cannot be used, alone or beside the others.

    Example:
        >>> Options(num_replicas=2).size
        2
    """

    num_replicas: int | None = None
    strategy: str | None = "auto"
    communicator: str = "auto"
    hosts: str | None = None
    log_dir: str | os.PathLike[str] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.num_replicas is not None:
            check_count("A run needs at least one replica.", num_replicas=self.num_replicas)
        if self.strategy is not None and self.strategy not in STRATEGIES:
            hint = f"use {', '.join(STRATEGIES)}."
            raise ConfigurationError(message("Unknown strategy.", hint=hint, strategy=self.strategy))
        check_communicator(self.communicator)
        if self.timeout is not None:
            check_seconds(timeout=self.timeout)
        if self.hosts is not None:
            self._check_hosts(self.hosts)

    @property
    def size(self) -> int:
        """How many replicas there will be."""
        return self.num_replicas or (_places(self.hosts) if self.hosts else 1)

    @property
    def resolved_strategy(self) -> str | None:
        """The strategy of each process. A process that is alone, and may use all its devices, decides by itself ("auto")."""
        uses_all_devices = self.num_replicas is None and self.hosts is None
        return self.strategy if self.strategy != "auto" or uses_all_devices else "multi-worker"

    def _check_hosts(self, hosts: str) -> None:
        if not re.fullmatch(r"[\w.-]+:[1-9]\d*(,[\w.-]+:[1-9]\d*)*", hosts):
            raise ConfigurationError(
                message(
                    "Cannot read the hosts.",
                    hint='e.g. "host1:4,host2:4".',
                    hosts=hosts,
                )
            )
        if self.strategy == "mirrored":
            raise ConfigurationError(
                message(
                    "A mirrored run is one process.",
                    hint="leave the hosts out, or use multi-worker.",
                    hosts=hosts,
                )
            )
        if self.communicator not in ("auto", "horovod"):
            raise ConfigurationError(
                message(
                    "Other hosts are reached through horovodrun.",
                    hint='use communicator "horovod", or set TF_CONFIG and start the script on each host yourself.',
                    hosts=hosts,
                    communicator=self.communicator,
                )
            )
        if self.size > _places(hosts):
            raise ConfigurationError(
                message(
                    "The hosts do not have that many places.",
                    hint="use fewer replicas or more hosts.",
                    num_replicas=self.size,
                    hosts=hosts,
                )
            )


class RunFailed(Exception):  # noqa: N818
    """A run that did not end well; its text is the story for the user.

    Args:
        failure: Who failed, and how.
        options: What kind of run it was.
        log_dir: Folder of the log files.

    Example:
        >>> print(RunFailed(Failure(0, 3), Options(), Path("logs")))
        Rank 0 failed with exit code 3; all ranks were ended. Its output is above.
    """

    def __init__(self, failure: Failure, options: Options, log_dir: Path) -> None:
        story = describe(
            failure, timeout=options.timeout, through_horovodrun=options.hosts is not None, log_dir=log_dir
        )
        super().__init__(story)
        self.failure = failure
        self.log_dir = log_dir


def run_to_end(
    options: Options,
    make_arguments: Callable[[Path], list[str]],
    note_dir: Path,
    events: Events,
) -> None:
    """Starts the ranks of a run and returns when all have ended well.

    Args:
        options: What is wanted.
        make_arguments: Gives a rank's command line, from the folder of the logs.
        note_dir: An empty folder for the notes of failed ranks.
        events: From `deferred_signals`, which the caller holds around all that must be cleaned up.

    Raises:
        ConfigurationError: The log folder cannot be made, or Horovod is needed and not installed.
        RunFailed: A rank failed, the time was over, or a signal came.

    Example:
        >>> run_to_end(Options(num_replicas=2), lambda logs: ["true"], Path(), Events())
    """
    with contextlib.ExitStack() as stack:
        environ = inherited_environ() | {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": common_hash_seed()}
        strategy = options.resolved_strategy
        if strategy is not None:
            environ["TFREP_STRATEGY"] = strategy
        if strategy not in (None, "auto"):
            environ["TFREP_NUM_REPLICAS"] = str(options.size)
        prefix: list[str] = []
        identified: list[dict[str, str]] = [{}]
        if options.strategy != "mirrored":
            communicator = resolve_communicator("horovod" if options.hosts else options.communicator, options.size)
            environ["TFREP_COMMUNICATOR"] = communicator
            if options.hosts:
                prefix = _horovodrun(options.size, options.hosts)
            else:
                identified = stack.enter_context(identities(communicator, options.size))
        log_dir = make_log_dir(options.log_dir)
        arguments = prefix + make_arguments(log_dir)
        failure = run_ranks(
            [Command(arguments, environ | variables) for variables in identified],
            events,
            log_dir=log_dir,
            note_dir=note_dir,
            timeout=options.timeout,
        )
        if options.log_dir is None and (failure is None or failure.stopped_by_signal):
            shutil.rmtree(log_dir, ignore_errors=True)
        if failure is not None:
            raise RunFailed(failure, options, log_dir)


def make_log_dir(wanted: str | os.PathLike[str] | None) -> Path:
    """Returns the folder that logs are written to; a temporary one where none is wanted.

    Raises:
        ConfigurationError: It cannot be made.
    """
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="tfrep-logs-"))
    folder = Path(wanted).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            message(
                f"Cannot make the log folder ({error.strerror}).",
                hint="name another one.",
                log_dir=str(wanted),
            )
        ) from None
    return folder


def _horovodrun(size: int, hosts: str) -> list[str]:
    beside = Path(sys.executable).with_name("horovodrun")
    command = str(beside) if beside.exists() else shutil.which("horovodrun")
    if command is None:
        raise ConfigurationError(
            message(
                "The command horovodrun is missing.",
                hint="run `tfrep horovod install`.",
            )
        )
    return [command, "--gloo", "-np", str(size), "-H", hosts]


def _places(hosts: str) -> int:
    return sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
