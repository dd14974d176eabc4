"""Runs a script or a module that need not know about strategies."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from tfrep_strategy.cluster.command import check_script, module_command
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.profiles.requests import answer_requests, name_of_folder
from tfrep_strategy.cluster.signs_of_life import give_signs
from tfrep_strategy.running.hosts import run_on_hosts, runs_on_other_hosts
from tfrep_strategy.running.joining import for_this_pod, join_outer_run, outer_run
from tfrep_strategy.running.nodes import meet_nodes
from tfrep_strategy.running.notes import noted_failure
from tfrep_strategy.running.ranks import Events, deferred_signals
from tfrep_strategy.running.runs import Options, Round, run_to_end
from tfrep_strategy.running.scope import run_strategy_scope
from tfrep_strategy.running.together import together


def run_script(target: str, arguments: Sequence[str], options: Options, *, as_module: bool = False) -> None:
    """Runs a script on every replica, inside the scope of the run's strategy.

    Args:
        target: Path of the script, or name of the module.
        arguments: What follows it in `sys.argv`.
        options: What kind of run is wanted.
        as_module: Whether `target` is a module, as for `python -m`.

    Inside the run of another launcher (`srun tfrep run train.py`) this process becomes the rank that it is there, and
    this does not return. With `options.node` it first meets the launchers on the other machines, and stays together with them
    if the run may be started again. With `options.hosts` it starts a launcher on each.

    Raises:
        ConfigurationError: There is no such script, or the options do not fit the run of another launcher.
        PeerError: The launchers on other machines did not come.
        RunFailed: A rank failed.

    Example:
        >>> size = Path("train.py").write_text("print('The script runs here.')")
        >>> run_script("train.py", ["--epochs", "3"], Options(num_replicas=2))
    """
    kind = "module" if as_module else "script"
    check_script(kind, target)
    program = [kind, target, *arguments]
    options = for_this_pod(options)
    if options.has_rounds:
        with together(options) as launcher, deferred_signals() as events:
            run_ranks_of_script(program, options, events, launcher.rounds(events))
        return
    nodes = None
    if options.node is not None:
        nodes = meet_nodes(options.node, options.size, options.resolved_communicator)
    elif outer := outer_run():
        join_outer_run(outer, options, program)
    with deferred_signals() as events:
        if runs_on_other_hosts(options):
            run_on_hosts(options, program, events)
        else:
            run_ranks_of_script(program, options, events, None if nodes is None else [Round(0, events, nodes)])


def run_ranks_of_script(program: Sequence[str], options: Options, events: Events, rounds: Iterable[Round] | None = None) -> None:
    """Runs a script on the ranks of this machine.

    Args:
        program: "script" or "module", its path or name, and its arguments.
        options: What kind of run is wanted.
        events: From `deferred_signals`.
        rounds: When the ranks are started, if launchers on other machines decide that, too.

    Raises:
        ConfigurationError: The options cannot be used on this machine.
        RunFailed: A rank failed.

    Example:
        >>> size = Path("train.py").write_text("print('The script runs here.')")
        >>> with deferred_signals() as events:
        ...     run_ranks_of_script(["script", "train.py"], Options(num_replicas=2), events)
    """
    with tempfile.TemporaryDirectory(prefix=name_of_folder()) as notes:
        run_to_end(options, module_command(__name__, notes, "", *program), Path(notes), events, rounds)


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs a rank from start to end.

    Args:
        arguments: Folder of the notes and signs of life if a launcher of this package reads them, folder of the logs if this
            process has to open its own, "script" or "module", its name, and its arguments.
        own_path: The search path with which Python started.
    """
    note_dir, log_dir, kind, target, *rest = arguments
    rank = detect_environment().rank
    if log_dir and rank:
        _write_to(Path(log_dir, f"rank{rank}.log"))
    notes = Path(note_dir) if note_dir else None
    give_signs(notes, rank)
    with noted_failure(notes, rank):
        # Both are as Python would have set them for `python target` and `python -m target`.
        sys.argv = [target, *rest]
        first = os.getcwd() if kind == "module" else str(Path(target).resolve().parent)
        with run_strategy_scope():
            answer_requests(notes, "coordinator" if os.environ["TFREP_STRATEGY"] == "parameter-server" else f"rank{rank}")
            sys.path[:] = own_path if getattr(sys.flags, "safe_path", False) else [first, *own_path[1:]]
            if kind == "module":
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            elif os.path.isdir(target) or target.endswith(".pyc") or zipfile.is_zipfile(target):
                runpy.run_path(target, run_name="__main__")
            else:
                _run_file(target)


def _run_file(target: str) -> None:
    """Runs a file as `python target` does: its path is absolute, but in `sys.argv`. `runpy.run_path` leaves both as they are."""
    path = os.path.abspath(target)
    loader = SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _write_to(log: Path) -> None:
    """Sends all further output of this process to a file; ranks that another launcher has started would share one terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
