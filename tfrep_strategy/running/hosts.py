"""A run on several hosts that is started on one. A launcher on each of them is started through ssh, and told all through pipes."""

from __future__ import annotations

import math
import os
import queue
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.limits import grace_seconds, machine_silence, ssh_command, timeout_seconds
from tfrep_strategy.processes.command import piped_command, search_path
from tfrep_strategy.processes.identity import inherited_environ
from tfrep_strategy.processes.ranks import Events, Failure
from tfrep_strategy.processes.remote import Remote, ssh_to
from tfrep_strategy.rendezvous.addresses import with_port
from tfrep_strategy.rendezvous.confinement import is_this_machine
from tfrep_strategy.running.failures import RunFailed
from tfrep_strategy.running.runs import Options

LAUNCHER = "tfrep_strategy.running.on_host"
"""The module of a launcher on a host."""
_OF_NETWORKS = ("HOROVOD_GLOO_IFACE",)
"""Variables that other hosts need, though they tell a process of Horovod who it is."""

EXPORTED = ("CUDA_", "GLOO_", "HOROVOD_", "KERAS_", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "PYTHON", "TFREP_", "TF_", "XLA_")
"""How variables are named that other hosts get, beside `PATH`."""
BEAT_SECONDS = 2.0
"""How often this launcher and those on hosts tell each other that they are alive."""
SILENCE_SECONDS = 30.0
"""How long this launcher may be silent before those on hosts count it as gone. ssh gives up a connection after 15."""
ALL_ENDED_WELL = 0
"""What hosts are told, in place of the number of a signal, when the ranks of all have ended well."""

_HELLO_SECONDS = 25.0
_SETTLE_SECONDS = 1.0
"""How long the other hosts may take to notice a failure by themselves, so that it is known where the first one was."""
_END_SECONDS = 20.0
"""How long a host may take to end, beside its grace. ssh needs 15 to notice that the host is gone."""
_LOST = 255


def runs_on_other_hosts(options: Options) -> bool:
    """Tells whether ranks will be on other machines than this one.

    Example:
        >>> runs_on_other_hosts(Options(hosts="localhost:2"))
        False
    """
    return not all(map(is_this_machine, options.shares))


def run_on_hosts(options: Options, program: Sequence[str], events: Events) -> None:
    """Runs a program on the ranks of several hosts, and returns when all have ended well.

    Args:
        options: What is wanted, with `hosts`.
        program: What each rank runs, as for `script.main`: "script" or "module", its name, and its arguments.
        events: From `deferred_signals`.

    Raises:
        ConfigurationError: A host cannot be reached, or lacks something; or the launchers do not fit.
        PeerError: The launchers on the hosts did not meet.
        RunFailed: A rank failed, a host was lost, or a signal came.

    Example:
        >>> with deferred_signals() as events:  # doctest: +SKIP
        ...     run_on_hosts(Options(hosts="host1:4,host2:4"), ["script", "train.py"], events)
    """
    if options.max_restarts:
        what = "A run whose machines are reached through ssh is not started again by itself."
        hint = "start `tfrep run --nnodes N --rendezvous HOST:PORT --max-restarts K` on each machine, or leave --max-restarts out."
        raise ConfigurationError(message(what, hint=hint, hosts=options.hosts, max_restarts=options.max_restarts))
    run = _Launchers(options, events)
    try:
        run.start(_given(options, program))
        number = run.go()
    except BaseException:
        run.end(signal.SIGTERM)
        raise
    run.finish(number)


class _Launchers:
    """The launchers of one start of a run, in the order of the ranks.

    Args:
        options: What is wanted.
        events: From `deferred_signals`.
    """

    def __init__(self, options: Options, events: Events) -> None:
        self._options, self._events = options, events
        self._remotes: list[Remote] = []
        self._grace = grace_seconds(for_a_backup=options.backup_dir is not None)
        self._last_beat, self._patience = time.monotonic(), machine_silence()

    def start(self, given: dict[str, Any]) -> None:
        """Starts a launcher on each host."""
        mark, changed = f"\x1e{secrets.token_hex(16)}", lambda: self._events.put((0, 0))
        command, shares = piped_command(LAUNCHER), self._options.shares
        # By that variable a launcher tells how ssh has reached it. Here it would tell from where the user has come.
        here = ["env", "-u", "SSH_CONNECTION", *command]
        for rank, (host, size) in enumerate(shares.items()):
            own = {"mark": mark, "node": {"rank": rank, "count": len(shares), "name": host}, "size": size}
            start = here if is_this_machine(host) else ssh_to(host, command)
            self._remotes.append(Remote(host, start, mark, given | own, changed, by_line=self._options.prefix))

    def go(self) -> int | None:
        """Lets the launchers start ranks when all are there; returns at the first failure, when all have ended, or at a signal.

        Returns:
            The number of the signal, if one came.
        """
        number = self._wait(lambda: self._has_failed() or all("hello" in each.said for each in self._remotes), _HELLO_SECONDS)
        if number is not None:
            return number
        self._check_all_are_there()
        for each in self._remotes:
            each.tell({"rendezvous": self._rendezvous()})
        number = self._wait(lambda: self._has_failed() or self._have_ended())
        return number or self._wait(self._have_ended, _SETTLE_SECONDS)

    def finish(self, number: int | None) -> None:
        """Ends the launchers, and raises the error of the run, if there is one.

        Args:
            number: Of the signal that has ended the run, if one has.

        Raises:
            ConfigurationError, PeerError, RunFailed: As for `run_on_hosts`.
        """
        has_ended_well = self._have_ended() and not self._has_failed()
        self.end(number or (ALL_ENDED_WELL if has_ended_well else signal.SIGTERM))
        self._raise_failure(number)

    def end(self, number: int) -> None:
        """Ends the launchers that are left: asks, waits, then ends the connections, at which they end everything.

        Args:
            number: Of the signal that they are told.
        """
        here = [each for each in self._remotes if each.code is None and "hello" in each.said]
        for each in here:
            each.tell(number)
        deadline = time.monotonic() + self._grace + _END_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            impatient = self._wait(lambda: all(each.code is not None for each in here), left)
            if impatient is None:
                break
            for each in here:
                each.tell(impatient)
        for each in self._remotes:
            each.close()

    def _raise_failure(self, number: int | None) -> None:
        """Raises the error of the run, if there is one."""
        if number is not None:
            raise RunFailed(f"The run was stopped by {signal.Signals(number).name}.", Failure(None, 128 + number))
        self._raise_error()
        failed = [each for each in self._remotes if each.said.get("report")]
        lost = [each for each in self._remotes if each.is_lost]
        story = "".join(f"{each.host} was lost{_in_brackets(each.last_words[-1:])}; all ranks were ended.\n" for each in lost)
        if failed:
            first = min(failed, key=_failed_at)
            failure = Failure(**first.said["report"]["failure"])
            story += f"On {first.host}: {first.said['report']['story']}"
            raise RunFailed(story, failure, was_lost=bool(lost) or failure.was_lost)
        if lost:
            raise RunFailed(story.rstrip(), Failure(None, _LOST), was_lost=True)

    def _wait(self, condition: Callable[[], bool], seconds: float = math.inf) -> int | None:
        """Waits for a condition, or for some seconds; returns the number of a signal that came instead."""
        deadline = time.monotonic() + seconds
        while not condition() and (left := deadline - time.monotonic()) > 0:
            if (passed := time.monotonic() - self._last_beat) >= BEAT_SECONDS:
                self._last_beat += passed
                for each in self._remotes:
                    if "hello" in each.said and each.code is None:
                        each.tell(None)
                        each.look(min(passed, 2 * BEAT_SECONDS), self._patience)  # This process may have stood still itself.
            try:
                about, number = self._events.get(timeout=min(left, BEAT_SECONDS))
            except queue.Empty:
                continue
            if about is None:
                return number
        return None

    def _has_failed(self) -> bool:
        return any("error" in each.said or each.said.get("report") or each.is_lost for each in self._remotes)

    def _have_ended(self) -> bool:
        return all("report" in each.said or each.is_lost for each in self._remotes)

    def _check_all_are_there(self) -> None:
        self._raise_error()
        silent = [each for each in self._remotes if "hello" not in each.said]
        for each in silent:
            if each.is_lost:
                raise each.unreachable()
        if silent and not self._has_failed():
            names = ", ".join(each.host for each in silent)
            what = f"{names} did not answer within {_HELLO_SECONDS:g} seconds."
            hint = f"check that `{shlex.join(ssh_command())} {silent[0].host} {sys.executable} -V` ends soon."
            raise ConfigurationError(message(what, hint=hint, hosts=[each.host for each in self._remotes]))

    def _raise_error(self) -> None:
        for each in sorted(self._remotes, key=lambda each: each.heard_at.get("error", math.inf)):
            if error := each.said.get("error"):
                kind = ConfigurationError if error["kind"] == ConfigurationError.__name__ else PeerError
                raise kind(f"{each.host}: {error['text']}")

    def _rendezvous(self) -> str:
        """Returns where the first host listens, as the others reach it: where ssh has reached it, or where ssh has come from."""
        hellos = [each.said["hello"] for each in self._remotes]
        seen = [hello["seen_from"] for hello in hellos if hello["seen_from"]]
        found = next(filter(None, [hellos[0]["address"], *seen]), None)
        if found is None:
            what = f"The address at which the other hosts reach {self._remotes[0].host} is not known."
            hint = "have the command of TFREP_SSH set SSH_CONNECTION on the host, as OpenSSH does."
            raise ConfigurationError(message(what, hint=hint, hosts=[each.host for each in self._remotes]))
        return with_port(found, hellos[0]["port"])


def _given(options: Options, program: Sequence[str]) -> dict[str, Any]:
    """Returns what all launchers are told, secrets among it."""
    missing = [name for name in options.export if name not in os.environ]
    if missing:
        raise ConfigurationError(message("Variables that are to be exported are not set.", hint="set them.", export=missing))
    environ = inherited_environ() | {name: os.environ[name] for name in _OF_NETWORKS if name in os.environ}
    refused = [name for name in options.export if name not in environ]
    if refused:
        what = "Variables that tell a process its rank, or its run, cannot be exported: each rank gets its own."
        raise ConfigurationError(message(what, hint="leave them out; most of them are options of `tfrep run`.", export=refused))
    chosen = {name for name in environ if name == "PATH" or name.startswith(EXPORTED) or name in options.export}
    return {
        "path": [os.path.abspath(each) for each in search_path()],
        "folder": os.getcwd(),
        "environ": {name: environ[name] for name in chosen},
        "secret": secrets.token_hex(32),
        "program": list(program),
        "patience": None if math.isinf(timeout_seconds()) else SILENCE_SECONDS,  # Under a debugger this launcher may stand still.
        "options": {
            "strategy": options.strategy,
            "communicator": options.communicator,
            "log_dir": None if options.log_dir is None else os.fspath(options.log_dir),
            "backup_dir": None if options.backup_dir is None else os.fspath(options.backup_dir),
            "timeout": options.timeout,
            "prefix": options.prefix,
            "profile": options.profile,
            "profile_dir": None if options.profile_dir is None else os.fspath(options.profile_dir),
            "bind_cores": options.bind_cores,
        },
    }


def _in_brackets(words: Sequence[str]) -> str:
    return f" ({words[0]})" if words else ""


def _failed_at(remote: Remote) -> tuple[bool, float]:
    """Returns when a host's rank failed, on this machine's clock. Ranks that were only told to end failed last."""
    failure = remote.said["report"]["failure"]
    return failure["rank"] is None, failure["time"] + remote.clock_difference
