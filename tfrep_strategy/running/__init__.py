"""Starts the processes of a run, and ends them."""

from __future__ import annotations

from tfrep_strategy.running.function import launch
from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.runs import Options
from tfrep_strategy.running.script import run_script

__all__ = ["Options", "RunFailed", "launch", "run_script"]
