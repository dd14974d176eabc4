"""A run from its options to its end: what `tfrep run` and `launch` have in common."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message
from tfrep_strategy.limits import backup_seconds, check_keras_backend, grace_seconds
from tfrep_strategy.processes.cores import cores_of_ranks, thread_variables
from tfrep_strategy.processes.identity import (
    check_communicator,
    common_hash_seed,
    horovod_is_installed,
    identities,
    inherited_environ,
    resolve_communicator,
)
from tfrep_strategy.processes.nodes import Node
from tfrep_strategy.processes.notes import clear_notes
from tfrep_strategy.processes.output import lines_shown
from tfrep_strategy.processes.ranks import Command, Events, run_ranks
from tfrep_strategy.processes.shared_folder import SharedFolder, shared_folder
from tfrep_strategy.processes.signs_of_life import Patience
from tfrep_strategy.profiles.requests import keep_profile_dir
from tfrep_strategy.profiles.wanted import profile_environ, profile_folder, traced_steps
from tfrep_strategy.rendezvous.horovod_server import warn_of_open_ranks
from tfrep_strategy.running.failures import RunFailed, describe
from tfrep_strategy.running.rounds import Round, no_backup_dir, rounds_here
from tfrep_strategy.running.run_logs import log_folder, remove_logs
from tfrep_strategy.validation import MOST_PROCESSES, MOST_RANKS, check_fields

STRATEGIES = ("auto", "mirrored", "multi-worker")
"""What a run may be asked for."""
_HOST = r"[\w.-]+:[1-9][0-9]{0,4}"


@dataclass(frozen=True)
class Options:
    """What kind of run is wanted.

    Args:
        num_replicas: How many replicas take part; by default as many as `hosts` has places, else one.
        strategy: "multi-worker": one process per replica, "mirrored": one process with all replicas, or "auto": as in
            `auto_strategy()`, one process per replica if there are several, or one process that uses all its devices if
            neither `num_replicas` nor `hosts` is given. `None`: one process per replica, which is left to make its own
            strategy.
        communicator: "auto", "horovod", "tf", "mpi", "shared_memory" or the name of an installed transport.
        hosts: Machines and how many replicas each can take, as "host1:4,host2:4"; by default this machine. Others are reached
            through ssh.
        export: Names of environment variables that other hosts get, beside those of libraries.
        node: This machine among those of a run that is started on each of them. `num_replicas` are then those of this machine.
        log_dir: Folder of the log files; by default a temporary one, which stays only if the run fails.
        timeout: Seconds after which the run is stopped; by default it may take for ever.
        prefix: Whether the output of all ranks is shown, each line with its rank, and not that of rank 0 alone.
        max_restarts: How often all ranks are started again after one, or a machine, was lost. Errors of the script end the run.
        backup_dir: Folder in which each `fit` of the script is backed up, to go on from there when the run is started again. By
            default one beside the logs, which begins empty, if the run may be restarted, else none. Several machines need one that
            all reach. It may be an address that TensorFlow can write to, such as "gs://bucket/run".
        profile: Steps of the first `fit` that all ranks trace: their number, or "20:30"; see `traced_steps`.
        profile_dir: Folder for traces; by default `profile` in `log_dir`, or `tfrep-profile` in the current folder.
        bind_cores: Whether each rank may use only its own part of the cores that its launcher may use.

    Raises:
        ConfigurationError: An option cannot be used, alone or beside the others, `TFREP_BACKUP_SECONDS` is no number, or Keras
            would be loaded with another backend.

    Example:
        >>> Options(num_replicas=2).size
        2
    """

    num_replicas: int | None = None
    strategy: str | None = "auto"
    communicator: str = "auto"
    hosts: str | None = None
    export: tuple[str, ...] = ()
    log_dir: str | os.PathLike[str] | None = None
    timeout: float | None = None
    prefix: bool = False
    node: Node | None = None
    max_restarts: int = 0
    backup_dir: str | os.PathLike[str] | None = None
    profile: str | None = None
    profile_dir: str | os.PathLike[str] | None = None
    bind_cores: bool = False

    def __post_init__(self) -> None:
        check_keras_backend()
        check_fields(self)
        if self.num_replicas is not None:
            most = MOST_RANKS if self.hosts else MOST_PROCESSES
            check_count("A run cannot have this number of replicas.", 1, most, num_replicas=self.num_replicas)
        if self.strategy is not None and self.strategy not in STRATEGIES:
            hint = f"use {', '.join(STRATEGIES)}."
            raise ConfigurationError(message("Unknown strategy.", hint=hint, strategy=self.strategy))
        check_communicator(self.communicator)
        check_count("A run cannot be restarted that often.", 0, max_restarts=self.max_restarts)
        if self.profile is not None:
            traced_steps(self.profile)
        if self.timeout is not None:
            check_seconds(timeout=self.timeout)
        backup_seconds()  # Ranks read it in the middle of the script.
        if self.hosts is not None:
            self._check_hosts(self.hosts)
        elif self.export:
            hint = "name the hosts, or leave it out: ranks of one machine inherit all variables."
            raise ConfigurationError(message("Variables are exported to other machines only.", hint=hint, export=self.export))
        if self.bind_cores and self.strategy == "mirrored":
            hint = "leave --bind-cores out: one process has all cores for itself."
            raise ConfigurationError(message("A mirrored run has no ranks to bind.", hint=hint, strategy=self.strategy))
        if self.node is not None:
            self._check_node(self.node)

    @property
    def size(self) -> int:
        """How many replicas there will be; with `node`, on this machine."""
        return self.num_replicas or sum(self._places.values()) or 1

    @property
    def shares(self) -> dict[str, int]:
        """How many replicas each host has: the first hosts are filled first, and one that gets none is left out."""
        left, shares = self.size, {}
        for host, places in self._places.items():
            if left:
                shares[host] = min(left, places)
                left -= shares[host]
        return shares

    @property
    def resolved_strategy(self) -> str | None:
        """The strategy of each process. A process that is alone, and may use all its devices, decides by itself ("auto")."""
        uses_all_devices = self.num_replicas is None and self.hosts is None and self.node is None
        return self.strategy if self.strategy != "auto" or uses_all_devices else "multi-worker"

    @property
    def resolved_communicator(self) -> str:
        """The communicator of the run. "auto" is TensorFlow's on several machines: their launchers know the addresses of all ranks.

        Raises:
            ConfigurationError: Horovod is asked for and not installed.
        """
        is_auto = self.node is not None and self.communicator == "auto"
        return resolve_communicator("tf" if is_auto else self.communicator, self.size)

    @property
    def is_backed_up(self) -> bool:
        """Whether each `fit` is backed up, so that the run can go on."""
        return self.backup_dir is not None or self.max_restarts > 0

    @property
    def has_rounds(self) -> bool:
        """Whether launchers on several machines start all ranks again, after a loss or when machines come and go."""
        return self.node is not None and (self.max_restarts > 0 or self.node.is_elastic)

    @property
    def _places(self) -> dict[str, int]:
        places = Counter[str]()
        for each in self.hosts.split(",") if self.hosts else ():
            host, _, count = each.rpartition(":")
            places[host] += int(count)
        return places

    def _check_node(self, node: Node) -> None:
        if self.strategy == "mirrored" or self.hosts is not None:
            what = "The machines of a run are given as hosts, or each by its own launcher."
            what = "A mirrored run is one process, on one machine." if self.strategy == "mirrored" else what
            hint = "leave the number of machines out, or use multi-worker without hosts."
            raise ConfigurationError(message(what, hint=hint, strategy=self.strategy, hosts=self.hosts, nnodes=node.count))
        if self.has_rounds and self.backup_dir is None:
            raise no_backup_dir(self.max_restarts, nnodes=node.count if node.least is None else f"{node.least}:{node.count}")

    def _check_hosts(self, hosts: str) -> None:
        if not re.fullmatch(rf"{_HOST}(,{_HOST})*", hosts) or sum(self._places.values()) > MOST_RANKS:
            raise ConfigurationError(
                message(
                    "Cannot read the hosts.",
                    hint='e.g. "host1:4,host2:4"; give an IPv6 address a name in ~/.ssh/config.',
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
        if self.size > sum(self._places.values()):
            raise ConfigurationError(
                message(
                    "The hosts do not have that many places.",
                    hint="use fewer replicas or more hosts.",
                    num_replicas=self.size,
                    hosts=hosts,
                )
            )


def run_to_end(
    options: Options,
    arguments: Sequence[str],
    note_dir: Path,
    events: Events,
    rounds: Iterable[Round] | None = None,
) -> None:
    """Starts the ranks of a run and returns when all have ended well.

    Args:
        options: What is wanted.
        arguments: A rank's command line.
        note_dir: An empty folder for the notes of failed ranks, and the signs of life of all. It is removed if this process is
            killed.
        events: From `deferred_signals`, which the caller holds around all that must be cleaned up.
        rounds: When the ranks are started, if launchers on other machines decide that, too. Default: `rounds_here`.

    Raises:
        ConfigurationError: The log folder cannot be made, a limit cannot be used, or Horovod is needed and not installed.
        RunFailed: A rank failed or is frozen, the time was over, or a signal came.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as notes:
        ...     run_to_end(Options(num_replicas=2), ["true"], Path(notes), Events())
    """
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    patience, grace = Patience.of_environment(), grace_seconds(for_a_backup=options.is_backed_up)
    with log_folder(options.log_dir) as log_dir:
        backup_dir = backup_dir_of(options, log_dir)
        profile_dir = profile_folder(options.profile_dir, options.log_dir)
        more_environ = profile_environ(options.profile, profile_dir)
        if backup_dir is not None:
            more_environ |= backup_dir.environ
        own_seed = common_hash_seed()
        last: Round | None = None
        keep_profile_dir(note_dir, profile_dir)
        for this in rounds or rounds_here(events, options.max_restarts, backup_dir):
            last = this
            clear_notes(note_dir)
            ranks = range(this.first_rank, this.first_rank + (1 if options.strategy == "mirrored" else options.size))
            own_logs = {rank: log_dir / f"rank{rank}.log" for rank in ranks}
            if this.number == 0:
                remove_logs(own_logs.values())
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            more_environ["PYTHONHASHSEED"] = this.nodes.hash_seed if this.nodes else own_seed
            with _output_shown(options, this, own_logs), _commands(options, arguments, this, more_environ) as commands:
                has_peers = (this.nodes.size if this.nodes else options.size) > 1 and options.strategy != "mirrored"
                this.failure = run_ranks(
                    commands,
                    this.events,
                    log_dir=log_dir,
                    note_dir=note_dir,
                    timeout=left,
                    logs_all=options.prefix,
                    first_rank=this.first_rank,
                    again=this.number > 0,
                    # Nobody waits for a rank that is alone, unless the run can go on from backups.
                    patience=patience if has_peers or options.is_backed_up else None,
                    grace=grace,
                    temporary=[note_dir],
                )
            if this.failure is not None:
                this.story = describe(this.failure, timeout=options.timeout, log_dir=log_dir)
        failure = last.failure if last else None
        if failure is None and backup_dir is not None and last and last.first_rank == 0 and not last.keeps_backups:
            backup_dir.remove_backups()
        if last and failure is not None:
            raise RunFailed(last.story, failure, log_dir)


@contextlib.contextmanager
def _output_shown(options: Options, this: Round, logs: Mapping[int, Path]) -> Iterator[None]:
    """Shows the output of all ranks of this machine, if that is wanted."""
    if this.nodes and this.first_rank:
        folder = logs[this.first_rank].parent
        print(f"{this.nodes.own.name} has {this.nodes.describe()}. Their output is in {folder}", file=sys.stderr)
    if not options.prefix:
        yield
        return
    with lines_shown({f"[{rank}] ": log for rank, log in logs.items()}, only_new=this.number > 0):
        yield


@contextlib.contextmanager
def _commands(options: Options, arguments: Sequence[str], this: Round, more_environ: dict[str, str]) -> Iterator[list[Command]]:
    """Yields what each rank runs. Addresses of ranks are free as long as the body runs."""
    nodes = this.nodes
    environ = inherited_environ() | {"PYTHONUNBUFFERED": "1", "TFREP_RESTARTS": str(this.number)} | more_environ
    processes = 1 if options.strategy == "mirrored" else options.size
    environ |= thread_variables(processes)
    strategy = options.resolved_strategy
    if strategy is not None:
        environ["TFREP_STRATEGY"] = strategy
    cores = cores_of_ranks(processes) if options.bind_cores else [frozenset[int]()] * processes
    if strategy not in (None, "auto"):
        environ["TFREP_NUM_REPLICAS"] = str(nodes.size if nodes else options.size)
    with contextlib.ExitStack() as stack:
        identified: list[dict[str, str]] = [{}]
        if options.strategy != "mirrored":
            environ["TFREP_COMMUNICATOR"] = communicator = nodes.communicator if nodes else options.resolved_communicator
            if communicator == "horovod" and this.number == this.first_rank == 0:
                warn_of_open_ranks()
            if nodes:
                identified = stack.enter_context(nodes.identities())
            else:
                # A program that names no communicator may call Horovod itself.
                for_horovod = options.communicator == "auto" and communicator == "shared_memory" and horovod_is_installed()
                identified = stack.enter_context(identities("horovod" if for_horovod else communicator, options.size))
        yield [Command(arguments, environ | variables, own) for variables, own in zip(identified, cores, strict=True)]


def backup_dir_of(options: Options, log_dir: Path) -> SharedFolder | None:
    """Makes the folder of the backups, if the run has any."""
    if options.backup_dir is not None:
        return shared_folder(options.backup_dir)
    if not options.max_restarts:
        return None
    folder = SharedFolder(log_dir / "backups")
    folder.remove_backups()  # Of an earlier run, which nobody has asked to continue.
    return folder
