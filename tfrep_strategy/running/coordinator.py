"""Runs a script as the coordinator of servers and workers on this machine, and starts all of it again if a server dies."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.command import check_script, module_command
from tfrep_strategy.cluster.events import how_it_went, say
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.local_cluster import LocalCluster, check_counts
from tfrep_strategy.cluster.profiles.requests import keep_profile_dir, profile_environ, profile_folder, traced_steps
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.cluster.signs_of_life import Patience
from tfrep_strategy.core.limits import check_keras_backend, grace_seconds
from tfrep_strategy.core.validation import check_fields, writable
from tfrep_strategy.errors import PeerError, ServerLostError, check_count
from tfrep_strategy.running.joining import refuse_inside_a_run
from tfrep_strategy.running.ranks import Command, Failure, deferred_signals, run_ranks

_SHORT_LIFE_SECONDS = 5.0
"""A worker that ends sooner again is started after a pause, which doubles each time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0

SERVER_LOST = 75
"""Exit code of a coordinator that lost a server: with the cluster started again, it can resume from a checkpoint."""


@dataclass(frozen=True)
class ClusterOptions:
    """The kind of cluster that a run has.

    Args:
        workers: How many workers.
        servers: How many parameter servers.
        max_restarts: How often the cluster and the script are started again after a server, or the script's process, was
            lost. Workers that are lost are always started again.
        log_dir: Folder for the output of workers and servers; by default it is kept as long as they run.
        profile: Steps of the first `fit` while which all processes are traced: their number, or "20:30"; see `traced_steps`.
        profile_dir: Folder for traces; by default `profile` in `log_dir`, or `tfrep-profile` in the current folder.
        speaks: Whether the run says at its start what runs, and at its end how long it has taken.

    Raises:
        ConfigurationError: A number cannot be used, or Keras would be loaded with another backend.

    Example:
        >>> ClusterOptions(workers=2, servers=1, max_restarts=3)
        ClusterOptions(workers=2, servers=1, max_restarts=3, log_dir=None, profile=None, profile_dir=None, speaks=False)
    """

    workers: int = 2
    servers: int = 1
    max_restarts: int = 0
    log_dir: Path | None = None
    profile: str | None = None
    profile_dir: Path | None = None
    speaks: bool = False

    def __post_init__(self) -> None:
        check_keras_backend()
        check_fields(self)
        check_counts(workers=self.workers, servers=self.servers)
        check_count("A run cannot have this number of restarts.", 0, max_restarts=self.max_restarts)
        if self.profile is not None:
            traced_steps(self.profile)


def run_coordinator(target: str, arguments: Sequence[str], options: ClusterOptions, *, as_module: bool = False) -> Failure | None:
    """Runs a script as the coordinator of a cluster on this machine, in the scope of its strategy.

    Args:
        target: Path of the script, or name of the module.
        arguments: What follows it in `sys.argv`.
        options: What kind of cluster is wanted.
        as_module: Whether `target` is a module, as for `python -m`.

    Returns:
        None if the script ended well, else how it failed the last time. No process is left.

    Raises:
        ConfigurationError: There is no such script, another launcher has started this process as one of several, or
            a limit (`TFREP_TIMEOUT`, `TFREP_GRACE`) is no number of seconds.

    Example:
        >>> size = Path("train.py").write_text("print('The script runs here.')")
        >>> run_coordinator("train.py", ["--epochs", "3"], ClusterOptions(workers=2, servers=1)) is None
        True
    """
    kind = "module" if as_module else "script"
    check_script(kind, target)
    refuse_inside_a_run("`tfrep run --strategy parameter-server`")
    log_dir = None if options.log_dir is None else writable("log_dir", options.log_dir)
    profile_dir = profile_folder(options.profile_dir, options.log_dir)
    of_profile = profile_environ(options.profile, profile_dir)
    patience, grace = Patience.of_environment(), grace_seconds(for_a_backup=False)
    begun = time.monotonic()
    if options.speaks:
        say(_what_runs(options))
    with deferred_signals() as events:
        for attempt in range(options.max_restarts + 1):
            try:
                with _RestartingCluster(options.workers, options.servers, log_dir) as cluster:
                    jobs = {"chief": [f"127.0.0.1:{free_ports(1)[0]}"], **cluster.spec}
                    notes = cluster.folder
                    environ = inherited_environ() | {
                        "PYTHONUNBUFFERED": "1",
                        "TFREP_STRATEGY": "parameter-server",
                        "TFREP_RESTARTS": str(attempt),
                        "TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}}),
                        **of_profile,
                    }
                    of_script = ["tfrep_strategy.running.script", str(notes), "", kind, target, *arguments]
                    command = Command(module_command(*of_script), environ)
                    keep_profile_dir(notes, profile_dir)
                    failure = run_ranks(
                        [command], events, log_dir=notes, note_dir=notes, patience=patience, name="The coordinator", grace=grace
                    )
                    if failure is not None and failure.frozen:
                        what = f"The coordinator {failure.frozen}, and was ended."
                        print(f"tfrep: {what} TFREP_TIMEOUT=0 has others wait, as under a debugger.", file=sys.stderr)
                    if failure is None and options.speaks:
                        say(how_it_went(None, time.monotonic() - begun))
                    if not (failure is not None and cluster.explains(failure)) or attempt == options.max_restarts:
                        return failure
            except PeerError as error:  # A server was lost before the script began.
                if attempt == options.max_restarts:
                    raise
                print(f"tfrep: {error}", file=sys.stderr)
            left = options.max_restarts - attempt
            print(f"tfrep: the cluster is started again ({left} of {options.max_restarts} left).", file=sys.stderr)
    return None


def _what_runs(options: ClusterOptions) -> str:
    workers = f"{options.workers} worker{'s' * (options.workers > 1)}"
    servers = f"{options.servers} parameter server{'s' * (options.servers > 1)}"
    logs = "" if options.log_dir is None else f"; logs in {options.log_dir}"
    return f"{workers} and {servers} on this machine{logs}"


class _RestartingCluster(LocalCluster):
    """A cluster whose workers are started again when they end by themselves. It is stopped at the end of its block."""

    def __init__(self, workers: int, servers: int, log_dir: Path | None) -> None:
        self._stopping = threading.Event()
        self._kept_logs = log_dir
        self._lost_servers: list[int] = []
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        super().__init__(workers, servers, self._answer_end, log_dir)

    def __enter__(self) -> _RestartingCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self.stop()

    def explains(self, failure: Failure) -> bool:
        """Whether the coordinator failed because it, or a server, was lost. It does not know a server that is lost early."""
        is_lost = failure.was_lost or failure.exit_code == SERVER_LOST
        return is_lost or failure.rank is not None and (bool(self._lost_servers) or self.has_ended)

    def _answer_end(self, job: str, index: int, code: int) -> None:
        if self._stopping.is_set():
            return
        log = f" Log: {self._kept_logs / f'{job}{index}.log'}" if self._kept_logs else ""
        if job == "worker":
            print(f"tfrep: worker {index} ended with code {code}, and is started again.{log}", file=sys.stderr)
            # Not here: what reads the cluster's messages must not wait for one.
            threading.Thread(target=self._start_again, args=(index,), daemon=True).start()
        else:
            print(f"tfrep: parameter server {index} ended with code {code}.{log}", file=sys.stderr)
            self._lost_servers.append(index)

    def _start_again(self, index: int) -> None:
        now = time.monotonic()
        has_lived = now - self._started.get(index, -math.inf) > _SHORT_LIFE_SECONDS
        self._pauses[index] = 0.0 if has_lived else min(max(_FIRST_PAUSE, 2 * self._pauses[index]), _LONGEST_PAUSE)
        if self._stopping.wait(self._pauses[index]):
            return
        self._started[index] = time.monotonic()
        try:
            self.start("worker", index)
        except PeerError as error:
            if not self._stopping.is_set():
                print(f"tfrep: worker {index} was not started again. {error}", file=sys.stderr)


@contextlib.contextmanager
def exit_on_server_loss(strategy: Any, code: int = SERVER_LOST) -> Iterator[None]:
    """Ends this process with a message and an exit code when a parameter server is lost.

    Args:
        strategy: The parameter-server strategy.
        code: The exit code, by which whatever started this process knows that a restart may help.

    Yields:
        Nothing.

    Example:
        >>> with tfrep.local_cluster() as cluster:
        ...     strategy = tfrep.ParameterServerStrategy(cluster)
        ...     with strategy.scope():
        ...         model = make_model()
        ...     with tfrep.exit_on_server_loss(strategy):
        ...         history = model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup")])
    """
    try:
        with strategy.extended.step_runner.naming_lost_servers():
            yield
    except ServerLostError as error:
        print(f"tfrep: {error}", file=sys.stderr, flush=True)
        sys.exit(code)
