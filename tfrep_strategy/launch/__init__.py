"""Starts the processes of a run, and ends them."""

from __future__ import annotations

from tfrep_strategy.launch.function import launch
from tfrep_strategy.launch.runs import Options, RunFailed
from tfrep_strategy.launch.script import run_script

__all__ = ["Options", "RunFailed", "launch", "run_script"]
