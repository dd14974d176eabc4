"""A run whose machines Ray chooses. An actor on each runs the launcher that `--hosts` starts through ssh."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.limits import meeting_seconds
from tfrep_strategy.processes.command import piped_command
from tfrep_strategy.processes.ranks import Events, Failure
from tfrep_strategy.processes.ray_cluster import RayCluster, RayMachine, RayPlaces, Stopped, ray_cluster, wait
from tfrep_strategy.processes.ray_process import LOST, RayProcess
from tfrep_strategy.processes.remote import Remote
from tfrep_strategy.processes.shared_folder import shared_folder
from tfrep_strategy.rendezvous.connections import LOOPBACK
from tfrep_strategy.running.failures import RunFailed
from tfrep_strategy.running.hosts import LAUNCHER, Launchers, OnHost, say_what_is_awaited
from tfrep_strategy.running.rounds import Losses, how_lost, no_backup_dir, where_it_goes_on
from tfrep_strategy.running.run_logs import log_folder
from tfrep_strategy.running.runs import Options, backup_dir_of

_NO_GPU = "-1"
_LEAST_SECONDS = 0.1
_PAUSE_SECONDS = 2.0


def run_on_ray(options: Options, places: RayPlaces, program: Sequence[str], events: Events) -> None:
    """Runs a program on ranks that Ray places, and returns when all have ended well.

    Args:
        options: What is wanted.
        places: Where Ray is, and how large places are.
        program: As for `script.main`: "script" or "module", its name, and its arguments.
        events: From `deferred_signals`.

    Raises:
        ConfigurationError: There is no Ray, it has too few places, or a machine lacks something.
        PeerError: The launchers on the machines did not meet.
        RunFailed: A rank failed, a machine was lost, or a signal came.

    Example:
        >>> with deferred_signals() as events:  # doctest: +SKIP
        ...     run_on_ray(Options(2, ray=RayPlaces()), RayPlaces(), ["script", "train.py"], events)
    """
    deadline = math.inf if options.timeout is None else time.monotonic() + options.timeout
    with ray_cluster(places, options.size) as cluster, _folders_made(options, cluster) as options:
        losses, over_at = Losses(), 0.0
        for restarts in range(options.max_restarts + 1):
            try:
                wait(events, max(0.0, over_at - time.monotonic()))
                _run_once(options, cluster, program, events, restarts, deadline)
                break
            except Stopped as stopped:
                what = f"The run was stopped by {signal.Signals(stopped.number).name}."
                raise RunFailed(what, Failure(None, 128 + stopped.number)) from None
            except RunFailed as failed:
                if not failed.was_lost or restarts == options.max_restarts or losses.forbid_another_start(failed.step):
                    raise
                what = f"{how_lost(failed.failure)}." if failed.failure.was_lost else str(failed)
                again = f"All ranks are started again ({restarts + 1} of {options.max_restarts})."
                folder = None if options.backup_dir is None else shared_folder(options.backup_dir)
                print(f"tfrep: {what} {again} {where_it_goes_on(folder)}", file=sys.stderr)
                over_at = failed.over_at
                say_what_is_awaited(over_at)


def _run_once(
    options: Options, cluster: RayCluster, program: Sequence[str], events: Events, restarts: int, deadline: float
) -> None:
    """Runs the ranks once. It may take Ray some time to notice that a machine is lost, on which it still has places."""
    give_up_at = time.monotonic() + meeting_seconds()
    while True:
        machines = cluster.machines(events)
        if deadline < math.inf:
            options = replace(options, timeout=max(deadline - time.monotonic(), _LEAST_SECONDS))
        is_one = len({each.ip for each in machines}) == 1
        launchers = Launchers(options, events, [OnRay.of(each, cluster, is_one) for each in machines])
        try:
            return launchers.run(program, restarts)
        except _PlaceLost:
            if time.monotonic() > give_up_at:
                raise
        wait(events, _PAUSE_SECONDS)


class _PlaceLost(ConfigurationError):
    """Ray has lost a place before there was anything in it."""


@dataclass(frozen=True)
class OnRay(OnHost):
    """What a machine of Ray is to run, and how its launcher is started.

    Args:
        machine: The machine.
        cluster: The places on it, and on others.
        own_address: Where other machines reach it.
    """

    machine: RayMachine
    cluster: RayCluster
    own_address: str

    @classmethod
    def of(cls, machine: RayMachine, cluster: RayCluster, is_one: bool) -> OnRay:
        """Describes a machine; if it `is_one`, its ranks meet where no other machine can connect."""
        return cls(machine.name, len(machine.bundles), machine, cluster, LOOPBACK if is_one else machine.ip)

    @property
    def address(self) -> str:
        return self.own_address

    @property
    def environ(self) -> dict[str, str]:
        # A rank must not take a GPU that Ray gives to others.
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.machine.gpus) or _NO_GPU}

    def start(self, *args: Any, **kwargs: Any) -> Remote:
        return _RemoteOnRay(self, *args, **kwargs)

    def hint(self) -> str:
        return "look at the logs of Ray on that machine, and whether it is busy."


class _RemoteOnRay(Remote):
    """A launcher that an actor runs."""

    def __init__(self, place: OnRay, *args: Any, **kwargs: Any) -> None:
        self._place = place
        super().__init__(place.name, piped_command(LAUNCHER), *args, **kwargs)

    def unreachable(self) -> ConfigurationError:
        if self.code in (126, 127):
            return super().unreachable()
        told = "".join(f"\n  {line}" for line in self.last_words)
        if self.code == LOST:
            what = f"Ray has lost a place on {self.host} ({''.join(self.last_words[-1:])})."
            return _PlaceLost(message(what, hint="look at the logs of Ray.", host=self.host))
        what = f"tfrep does not start on {self.host} (exit code {self.code}).{told}\n"
        hint = "install tfrep_strategy in the same place on all machines of the cluster."
        return ConfigurationError(message(what, hint=hint, host=self.host))

    def _start(self, command: Sequence[str]) -> RayProcess:
        return self._place.cluster.start(self._place.machine.bundles[0], command)


@contextlib.contextmanager
def _folders_made(options: Options, cluster: RayCluster) -> Iterator[Options]:
    """Gives the options with their folders. If Ray has this machine only, they are where a run without Ray has them."""
    if not cluster.is_here:
        if options.max_restarts and options.backup_dir is None:
            raise no_backup_dir(options.max_restarts, engine="ray")
        yield options
        return
    with log_folder(options.log_dir) as log_dir:
        folder = backup_dir_of(options, log_dir)
        yield replace(options, log_dir=log_dir, backup_dir=folder.place if folder else None)
