"""Profiles a run that is running."""

from __future__ import annotations

import sys
from pathlib import Path

from tfrep_strategy.errors import PeerError, message
from tfrep_strategy.profiles.requests import Asked, find_run
from tfrep_strategy.profiles.summary import show_summary, write_summary
from tfrep_strategy.profiles.wanted import new_run_folder, writable_folder
from tfrep_strategy.validation import ProfiledSeconds, checked


def profile_run(run: int, seconds: float, profile_dir: Path | None = None) -> None:
    """Has all processes of a run on this machine trace themselves for some seconds, and prints what the traces say.

    Args:
        run: The process id of its launcher.
        seconds: For how long, at most 60.
        profile_dir: Folder for the traces; by default that of the run.

    Raises:
        ConfigurationError: There is no such run, or it cannot be profiled now, or an argument cannot be used.
        PeerError: The run has ended meanwhile, or no process could trace itself.
    """
    checked(ProfiledSeconds, "seconds", seconds, hint="e.g. 2.")
    folder, own_dir = find_run(run)
    run_folder = new_run_folder(writable_folder(profile_dir or own_dir))
    asked = Asked(folder, run_folder)
    asked.wait(seconds)
    reports = asked.end()
    write_summary(reports, run_folder)
    show_summary(reports, f"{seconds:g} seconds", run_folder, sys.stdout)
    if all(report.problem for report in reports):
        hint = "see the problem of each process above; one can only be traced once at a time."
        raise PeerError(message("No process of the run could be traced.", hint, run=run))
