"""A run from its options to its end: what `tfrep run` and `launch` have in common.

What the user has chosen for a run by variables of the environment, where no option says it.

The rounds of a run: its ranks are started, and started again after one was lost.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster import events as happenings
from tfrep_strategy.cluster import flight_recorder as flights
from tfrep_strategy.cluster.hardware import cores_of_ranks, thread_variables, visible_gpus
from tfrep_strategy.cluster.horovod.gloo import warn_of_open_ranks
from tfrep_strategy.cluster.identity import (
    check_communicator,
    common_hash_seed,
    horovod_is_installed,
    identities,
    inherited_environ,
    resolve_communicator,
)
from tfrep_strategy.cluster.notices import Step
from tfrep_strategy.cluster.profiles.requests import keep_profile_dir, profile_environ, profile_folder, traced_steps
from tfrep_strategy.cluster.signs_of_life import Patience
from tfrep_strategy.cluster.transports import wanted_communicator
from tfrep_strategy.core.limits import backup_seconds, check_keras_backend, grace_seconds
from tfrep_strategy.core.validation import MOST_PROCESSES, MOST_RANKS, check_fields
from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message
from tfrep_strategy.running.logs import RunFailed, describe, lines_shown, log_folder, remove_logs, signal_name
from tfrep_strategy.running.nodes import Node, Nodes
from tfrep_strategy.running.notes import clear_notes
from tfrep_strategy.running.ranks import Command, Events, Failure, run_ranks
from tfrep_strategy.running.shared_folder import SharedFolder, shared_folder


def chosen_by_user(variable: str) -> str | None:
    """Returns what the user has set a variable to. In a rank of a run, what that run has set is not the user's.

    Args:
        variable: One that also tells the processes of a run about it, such as `TFREP_BACKUP_DIR`.

    Returns:
        The value; None if there is none.

    Raises:
        ConfigurationError: It is `TFREP_COMMUNICATOR`, and this process knows no such transport.

    Example:
        >>> chosen_by_user("TFREP_BACKUP_DIR") is None
        True
    """
    if "TFREP_RESTARTS" in os.environ or "TFREP_NUM_REPLICAS" in os.environ:
        return None
    if variable == "TFREP_COMMUNICATOR":
        return wanted_communicator()
    return os.environ.get(variable) or None


@dataclass
class Round:
    """One start of all ranks of this machine.

    Attributes:
        number: How many rounds there were before.
        events: What ends the round early: signals to this process.
        nodes: The launchers of the round, if there are several. They have met.
        failure: How it failed. The code that runs the ranks sets it.
        story: The same, for the user.
        keeps_backups: Whether the run may go on although the ranks of this machine have ended well.
    """

    number: int
    events: Events
    nodes: Nodes | None = None
    failure: Failure | None = None
    story: str = ""
    keeps_backups: bool = False

    @property
    def first_rank(self) -> int:
        """The first rank of this machine."""
        return self.nodes.first_rank if self.nodes else 0


class Restarts:
    """Decides whether a run that was lost is started again: not too often, and not if it was lost twice at the same step.

    Args:
        most: How often it may be started again.
        backup_dir: The folder of its backups, if it has one.

    Example:
        >>> restarts = Restarts(3, None)
        >>> restarts.after_loss(Step(0, 2, 7))[0], restarts.after_loss(Step(0, 2, 7))[0]
        (True, False)
    """

    def __init__(self, most: int, backup_dir: SharedFolder | None) -> None:
        self._most, self._backup_dir = most, backup_dir
        self._count = 0
        self._last: Step | None = None

    def take_step(self) -> Step | None:
        """Returns the last step that rank 0 has noted, and removes the note; None if it has noted none."""
        if self._backup_dir is None:
            return None
        progress = self._backup_dir.progress
        step = progress.read()
        progress.clear()
        return step

    def after_loss(self, step: Step | None) -> tuple[bool, str]:
        """Decides after a loss.

        Args:
            step: Where it was lost; None if no step had begun.

        Returns:
            Whether the run is started again, and what the user is told of this.
        """
        before, self._last = self._last, step
        if self._count == self._most:
            return False, ""
        if step is not None and step == before:
            place = f"fit {step.fit}, epoch {step.epoch}, batch {step.batch}"
            return False, f"The run was lost twice at the same step: {place}. It is not started again."
        self._count += 1
        return True, f"All ranks are started again ({self._count} of {self._most}). {where_it_goes_on(self._backup_dir)}"


def rounds_here(events: Events, max_restarts: int, backup_dir: SharedFolder | None) -> Iterator[Round]:
    """Yields the rounds of a run on this machine: one more for each that lost a rank, as long as it may be restarted.

    Args:
        events: From `deferred_signals`.
        max_restarts: How many rounds there may be after the first.
        backup_dir: The folder of the run's backups.

    Yields:
        A round. Its `failure` must be set before the next is asked for.

    Example:
        >>> [each.number for each in rounds_here(Events(), 3, None)]
        [0]
    """
    restarts = Restarts(max_restarts, backup_dir)
    restarts.take_step()  # Of an earlier run.
    for number in itertools.count():
        this = Round(number, events)
        yield this
        if this.failure is None or not this.failure.was_lost:
            return
        again, told = restarts.after_loss(restarts.take_step())
        if told:
            print(f"tfrep: {how_lost(this.failure)}. {told}" if again else f"tfrep: {told}", file=sys.stderr)
        if not again:
            return


def no_backup_dir(max_restarts: int, **received: Any) -> ConfigurationError:
    """Returns the error of a run on several machines that is to be started again, and has no folder for that."""
    what = "A run on several machines is restarted from backups, in a folder that all of them can read and write."
    return ConfigurationError(message(what, hint="name it: --backup-dir.", backup_dir=None, max_restarts=max_restarts, **received))


def how_lost(failure: Failure) -> str:
    """Tells how a rank was lost.

    Example:
        >>> how_lost(Failure(1, 137))
        'rank 1 was lost (SIGKILL)'
    """
    return f"rank {failure.rank} {failure.frozen or f'was lost ({signal_name(failure.exit_code - 128)})'}"


def where_it_goes_on(backup_dir: SharedFolder | None) -> str:
    """Tells where the next round begins.

    Example:
        >>> where_it_goes_on(None)[:24]
        'No fit has a backup yet,'
    """
    if backup_dir is not None and backup_dir.has_backups():
        return "Each fit resumes from its last backup."
    what = "No fit has a backup yet, so the script starts from the beginning, except for what it saves and restores itself."
    return f"{what}\nHint: call fit, or save in your own loop with tf.train.CheckpointManager, and restore at its start."


STRATEGIES = ("auto", "mirrored", "multi-worker")
"""What a run may be asked for."""
_HOST = r"[\w.-]+:[1-9][0-9]{0,4}"


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Args:
        num_replicas: How many replicas take part. Default: as many as `hosts` has places, else all GPUs of this machine, else one.
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
        speaks: Whether the run says at its start what runs where, and at its end how fast it was.

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
    speaks: bool = False

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
        check_count("A run cannot have this number of restarts.", 0, max_restarts=self.max_restarts)
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

    @functools.cached_property
    def size(self) -> int:
        """How many replicas there will be; with `node`, on this machine. A process that decides by itself counts as one."""
        takes_all = self.resolved_strategy in ("mirrored", "multi-worker")
        return self.num_replicas or sum(self._places.values()) or (visible_gpus() if takes_all else 0) or 1

    @property
    def processes(self) -> int:
        """How many ranks there will be; with `node`, on this machine. One rank has all replicas of a mirrored run."""
        return 1 if self.strategy == "mirrored" else self.size

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
                    "The hosts have fewer slots than the run has replicas.",
                    hint="use fewer replicas, or more hosts or slots, as in host1:4.",
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
    begun = time.monotonic()
    deadline = None if options.timeout is None else begun + options.timeout
    patience, grace = Patience.of_environment(), grace_seconds(for_a_backup=options.is_backed_up)
    with log_folder(options.log_dir) as log_dir:
        backup_dir = backup_dir_of(options, log_dir)
        profile_dir = profile_folder(options.profile_dir, options.log_dir)
        more_environ = profile_environ(options.profile, profile_dir)
        if backup_dir is not None:
            more_environ |= backup_dir.environ
        more_environ[flights.VARIABLE] = str(log_dir.absolute())
        own_seed = common_hash_seed()
        last: Round | None = None
        keep_profile_dir(note_dir, profile_dir)
        for this in rounds or rounds_here(events, options.max_restarts, backup_dir):
            last = this
            clear_notes(note_dir)
            ranks = range(this.first_rank, this.first_rank + options.processes)
            own_logs = {rank: log_dir / f"rank{rank}.log" for rank in ranks}
            # Launchers of several machines may have one folder for their logs.
            file = (log_dir / happenings.FILE).absolute() if this.first_rank == 0 else None
            told = happenings.Events(file)
            if this.number == 0:
                remove_logs([*own_logs.values(), *filter(None, [file]), *log_dir.glob(flights.FLIGHTS), log_dir / flights.FILE])
            of_first = {happenings.VARIABLE: str(file)} if file else {}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            more_environ["PYTHONHASHSEED"] = this.nodes.hash_seed if this.nodes else own_seed
            with _output_shown(options, this, own_logs), _commands(options, arguments, this, more_environ, of_first) as commands:
                if options.speaks and this.first_rank == this.number == 0:
                    happenings.say(_what_runs(options, this, commands[0].environ.get("TFREP_COMMUNICATOR", ""), log_dir))
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
                    # No process waits for a rank that is alone, unless the run can go on from backups.
                    patience=patience if has_peers or options.is_backed_up else None,
                    grace=grace,
                    temporary=[note_dir],
                    on_start=functools.partial(_tell_start, told, this.number, list(ranks)),
                )
            if this.failure is not None:
                told.tell("loss", rank=this.failure.rank, exit_code=this.failure.exit_code)
                size = this.nodes.size if this.nodes else options.processes
                this.story = describe(this.failure, timeout=options.timeout, log_dir=log_dir, size=size)
        failure = last.failure if last else None
        if failure is None and backup_dir is not None and last and last.first_rank == 0 and not last.keeps_backups:
            backup_dir.remove_backups()
        if last:
            told.tell("end", exit_code=failure.exit_code if failure else 0)
            if options.speaks and failure is None and last.first_rank == 0:
                happenings.say(happenings.how_it_went(log_dir / happenings.FILE, time.monotonic() - begun))
        if last and failure is not None:
            raise RunFailed(last.story, failure, log_dir)


def _tell_start(told: happenings.Events, number: int, ranks: list[int], pids: list[int]) -> None:
    told.tell("restart" if number else "start", number=number, ranks=ranks, pids=pids)


def _what_runs(options: Options, this: Round, transport: str, log_dir: Path) -> str:
    """Returns the line at the start of a run."""
    gpus = visible_gpus()
    decides = options.resolved_strategy == "auto"  # The process takes all of its devices.
    replicas = this.nodes.size if this.nodes else max(1, gpus) if decides else options.size
    machines = len(this.nodes.met) if this.nodes else 1
    where = "on this machine" if machines == 1 else f"on {machines} machines"
    devices = "CPU" if not gpus else f"{min(gpus, replicas)} GPU{'s' * (min(gpus, replicas) > 1)}" if machines == 1 else "GPU"
    line = f"{replicas} replica{'s' * (replicas > 1)} {where} ({devices})"
    if replicas == 1:
        return f"{line}; `tfrep run -n 2` starts two" if options.num_replicas is None else line
    if decides or options.strategy == "mirrored":
        return f"{line}, in one process"
    kept = "" if options.log_dir is not None else ", kept if it fails"
    return f"{line}, {transport}; logs in {log_dir}{kept}"


@contextlib.contextmanager
def _output_shown(options: Options, this: Round, logs: Mapping[int, Path]) -> Iterator[None]:
    """Shows the output of all ranks of this machine, if that is wanted."""
    if this.nodes and this.first_rank and options.speaks:
        folder = logs[this.first_rank].parent
        happenings.say(f"{this.nodes.own.name} has {this.nodes.describe()}; logs in {folder}")
    if not options.prefix:
        yield
        return
    with lines_shown({f"[{rank}] ": log for rank, log in logs.items()}, only_new=this.number > 0):
        yield


@contextlib.contextmanager
def _commands(
    options: Options, arguments: Sequence[str], this: Round, more_environ: dict[str, str], of_first: dict[str, str]
) -> Iterator[list[Command]]:
    """Yields what each rank runs, of which the first has some variables more. Addresses are free as long as the body runs."""
    nodes = this.nodes
    environ = inherited_environ() | {"PYTHONUNBUFFERED": "1", "TFREP_RESTARTS": str(this.number)} | more_environ
    if not options.speaks:
        environ["TFREP_QUIET"] = "1"
    processes = options.processes
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
        own = [of_first, *[{}] * (len(identified) - 1)]
        yield [Command(arguments, environ | i | o, c) for i, o, c in zip(identified, own, cores, strict=True)]


def backup_dir_of(options: Options, log_dir: Path) -> SharedFolder | None:
    """Makes the folder of the backups, if the run has any."""
    if options.backup_dir is not None:
        return shared_folder(options.backup_dir)
    if not options.max_restarts:
        return None
    folder = SharedFolder(log_dir / "backups")
    folder.remove_backups()  # Of an earlier run, which is not to be continued.
    return folder
