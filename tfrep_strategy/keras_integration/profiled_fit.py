"""The steps of a `fit`: how fast they are, and their traces.

Each step has an event in traces. The steps that a run profiles are traced on all ranks.
Processes of parameter servers do not step together. All of them trace the time in which the coordinator hands out the steps.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from tfrep_strategy.cluster import events
from tfrep_strategy.cluster.profiles import requests
from tfrep_strategy.cluster.profiles.requests import TracedSteps, folder_of_environment, new_run_folder, steps_of_environment
from tfrep_strategy.cluster.profiles.summary import TraceReport, show_summary, write_summary
from tfrep_strategy.cluster.profiles.traces import STEP, Trace
from tfrep_strategy.data.step_clock import Counts, StepClock
from tfrep_strategy.errors import ConfigurationError, TfrepError, message


class Traces(Protocol):
    """The traces of all processes, from their creation until `end`. Errors are reported, and training continues.

    Attributes:
        run_folder: The folder of the traces.
    """

    run_folder: Path

    def end(self) -> list[TraceReport]:
        """Ends the traces. Returns the reports; none if another process shows them."""

    def abandon(self) -> None:
        """Ends the traces after a step has failed, when other processes may not answer."""


class TracesOfRanks:
    """One trace on each rank. All ranks start and end it between the same steps.

    Args:
        strategy: The strategy of the model.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.run_folder: Path = strategy.extended.broadcast_object(new_run_folder(folder_of_environment()))
        self._trace = Trace(self.run_folder, f"rank{getattr(strategy, 'rank', 0)}")
        strategy.extended.barrier()  # Otherwise the first step would include the wait for the slowest rank.
        self._trace.begin()

    def end(self) -> list[TraceReport]:
        reports = self._strategy.extended.all_gather_object(self._trace.end())
        return reports if self._strategy.extended.is_chief else []

    def abandon(self) -> None:
        self._trace.end()


class TracesOfCluster:
    """Traces of the coordinator, the workers and the servers of a run of parameter servers."""

    def __init__(self) -> None:
        self.run_folder = new_run_folder(folder_of_environment())
        self._asked: requests.ProfileRequest | None = None
        self._problem = ""
        try:
            self._asked = requests.ProfileRequest(_folder_of_requests(), self.run_folder)
        except (TfrepError, OSError) as error:
            self._problem = str(error)

    def end(self) -> list[TraceReport]:
        try:
            if self._asked is not None:
                return self._asked.end()
        except (TfrepError, OSError) as error:
            self._problem = str(error)
        return [TraceReport("coordinator", problem=self._problem)]

    def abandon(self) -> None:
        self.end()


def _folder_of_requests() -> Path:
    if requests.here is None:
        what = "Workers trace themselves only if `tfrep run` has started them."
        raise ConfigurationError(message(what, hint="unset TFREP_PROFILE.", TFREP_PROFILE=str(steps_of_environment())))
    folder, _ = requests.here
    return folder


def check_cluster() -> None:
    """Refuses a profile of parameter servers that `tfrep run` has not started.

    Raises:
        ConfigurationError: `TFREP_PROFILE` is set there.
    """
    if steps_of_environment() is not None:
        _folder_of_requests()


class _Watched:
    """Data whose iterators count their batches.

    Args:
        data: The data.
        clock: What counts.
    """

    def __init__(self, data: Any, clock: StepClock) -> None:
        self._data, self._clock = data, clock

    def __iter__(self) -> Any:
        return self._clock.watching(iter(self._data))


@functools.cache
def _clock() -> StepClock:
    """Returns the clock of all fits: with another one a step would be traced again."""
    return StepClock()


class Pace:
    """How fast a `fit` is: without its first step, which is compiled, and without validation and what is between epochs.

    Args:
        fit: The number of the `fit`.
    """

    def __init__(self, fit: int) -> None:
        self._fit, self._clock = fit, _clock()
        self._has_stepped = False
        self._since: tuple[float, Counts] | None = None
        self._seconds = self._steps = self._examples = self._data_seconds = 0.0

    def watching(self, data: Any) -> Any:
        """Returns data whose iterators count batches, and the time in which steps wait for them."""
        return _Watched(data, self._clock)

    def step(self) -> None:
        """Notes that a step begins, or would begin if the data had not ended."""
        if self._since is None and self._has_stepped:
            self._since = time.perf_counter(), self._clock.read()
        self._has_stepped = True

    def pause(self) -> None:
        """Notes that the steps of an epoch are over."""
        if self._since is not None:
            (begun, before), self._since = self._since, None
            now = self._clock.read()
            self._seconds += time.perf_counter() - begun
            self._steps += now.steps - before.steps
            self._examples += now.examples - before.examples
            self._data_seconds += now.data_seconds - before.data_seconds

    def tell(self) -> None:
        """Tells programs, and the launcher, of the `fit`, which has ended."""
        if self._steps:
            events.of_run().tell(
                "fit", fit=self._fit, seconds=round(self._seconds, 3), steps=int(self._steps), examples=int(self._examples),
                data_wait=round(min(1.0, self._data_seconds / self._seconds), 4),
            )  # fmt: skip


class ProfiledFit:
    """Marks the steps of a `fit` in traces, and traces some of them.

    Args:
        wanted: The steps to trace; None for no step of this `fit`.
        make_traces: Starts the traces.
        speaks: Whether this process reports the traces to the user.

    Attributes:
        done: Number of steps that have begun.
        pace: Measures them, in a run whose launcher asks for that.
    """

    _fits = 0
    """Number of `fit`s of this program that have begun."""

    def __init__(self, wanted: TracedSteps | None, make_traces: Any, speaks: bool) -> None:
        self.wanted, self._make_traces, self._speaks = wanted, make_traces, speaks
        self._traces: Traces | None = None
        self.done = self._began = 0
        self._events = events.Steps(ProfiledFit._fits - 1)
        self.pace: Pace | None = Pace(ProfiledFit._fits - 1) if events.is_measured() else None

    def count(self, count: int) -> None:
        """Notes that `count` steps begin. Rank 0 of a run tells of them now and then."""
        self._events.note(self.done)
        self.done += count

    def step(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context for each execution of `count` steps."""
        return self._marked(count) if self.wanted is None else self._traced(self.wanted, count)

    def _marked(self, count: int) -> contextlib.AbstractContextManager[None]:
        self.count(count)
        return tf.profiler.experimental.Trace(STEP, step_num=self.done - count, _r=1)

    @contextlib.contextmanager
    def _traced(self, wanted: TracedSteps, count: int) -> Iterator[None]:
        if self._traces is None and self.done >= wanted.first:
            self._began, self._traces = self.done, self._make_traces()
        with self._marked(count):
            yield
        if self.done >= wanted.end:
            self.end()

    def end(self) -> None:
        """Ends the traces, and reports them. Every rank must call it."""
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return
        what = f"steps {self._began} to {self.done - 1}"
        if self.done < wanted.end:
            what = f"the steps from {self._began} on"
            kept = "What was traced until then is kept." if self._traces is not None else "Nothing was traced."
            self._say(f"the first fit ended before step {wanted.end - 1}, which was to be profiled. {kept}")
        if self._traces is not None:
            reports = self._traces.end()
            if reports:
                with contextlib.suppress(OSError):  # The disk may be full. The user sees the summary anyway.
                    write_summary(reports, self._traces.run_folder)
                show_summary(reports, what, self._traces.run_folder, sys.stderr)

    def abandon(self) -> None:
        """Ends the traces of a `fit` that has failed, and keeps them."""
        wanted, self.wanted = self.wanted, None
        if wanted is not None and self._traces is not None:
            self._traces.abandon()
            self._say(f"fit failed while it was profiled. Traces from step {self._began} on: {self._traces.run_folder}")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(f"tfrep: {text}", file=sys.stderr, flush=True)


def say_without_fit() -> None:
    """Tells the user that nothing was profiled, if a profile was wanted and the program has ended without a `fit`."""
    if not ProfiledFit._fits and steps_of_environment() is not None:
        print("tfrep: no step was profiled: the script did not call fit.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def profiled(make_traces: Any, speaks: bool) -> Iterator[ProfiledFit]:
    """Profiles the body, which runs a `fit`.

    Args:
        make_traces: Starts the traces.
        speaks: Whether this process reports the traces to the user.

    Yields:
        The `ProfiledFit`, which marks the steps.
    """
    wanted = None if ProfiledFit._fits else steps_of_environment()
    ProfiledFit._fits += 1
    fit = ProfiledFit(wanted, make_traces, speaks)
    try:
        yield fit
    except BaseException:
        fit.abandon()
        raise
    fit.end()
    if fit.pace is not None:
        fit.pace.tell()
