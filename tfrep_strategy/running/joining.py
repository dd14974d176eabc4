"""A launcher that runs inside the run of another one, as in `srun tfrep run train.py`.

What the first process of a container has to do for the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.environments import Environment, TrainJobEnvironment, detect_environment, kind_of_environment
from tfrep_strategy.cluster.environments.base import master_address
from tfrep_strategy.cluster.identity import RUN_VARIABLES, common_hash_seed
from tfrep_strategy.cluster.profiles.requests import profile_environ, profile_folder
from tfrep_strategy.core.validation import Rank, Size, variable, writable
from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.running.nodes import Node
from tfrep_strategy.running.runs import Options
from tfrep_strategy.running.shared_folder import shared_folder

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG,
              signal.SIGXCPU)  # fmt: skip
_OTHERS_SECONDS = 3.0


def run_under_init(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command as a child of this process, passes signals on to it, and takes up what processes leave behind.

    The kernel shields the first process of a container (process 1) from signals that it does not handle, from SIGKILL within the
    container too (`man 7 pid_namespaces`). So a rank that is frozen could not be ended there, nor one that does not expect SIGTERM.

    Args:
        command: The path of a program, and its arguments.
        environ: Its variables.

    Returns:
        Its exit code; 128 + n if signal n ended it.

    Example:
        >>> run_under_init(["/bin/sh", "-c", "exit 3"], os.environ)
        3
    """
    child = os.spawnve(os.P_NOWAIT, command[0], list(command), environ)

    def pass_on(number: int, frame: object) -> None:
        if number == signal.SIGINT and os.isatty(0):  # A terminal sends Ctrl-C to all of its processes.
            return
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            os.kill(child, number)

    previous = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        while True:
            pid, status = os.wait()
            if pid == child:
                _let_others_end()
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _let_others_end() -> None:
    """Waits for what the command has left and is about to end, such as its watcher. The kernel kills all when process 1 ends."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


_HASH_SEED = "0"
"""All ranks have to hash alike, and those that another launcher has started cannot agree on a number."""


def outer_run() -> Environment | None:
    """Tells whether another launcher has started this process as one of several.

    Returns:
        The place of this process among them; None if it is alone.

    Raises:
        ConfigurationError: The environment variables that say so cannot be used.

    Example:
        >>> outer_run() is None
        True
    """
    environment = detect_environment()
    return environment if environment.size > 1 else None


def refuse_inside_a_run(command: str) -> None:
    """Refuses what would be done once by each process of another run.

    Args:
        command: What the user called.

    Raises:
        ConfigurationError: This process is one of several.

    Example:
        >>> refuse_inside_a_run("`tfrep demo`")
    """
    outer = outer_run()
    if outer is not None:
        raise _refusal(outer, f"{command} would start a separate run in each of them", "call it in one process only", {})


def warn_inside_a_run(command: str) -> None:
    """Warns of what is done once by each process of another run; variables that cannot be read describe none.

    Args:
        command: What the user called.

    Example:
        >>> warn_inside_a_run("`tfrep.launch`")
    """
    with contextlib.suppress(ConfigurationError):
        outer = outer_run()
        if outer is not None:
            warn(
                f"{command} starts a separate run in each of the {outer.size} processes that another launcher has"
                f" started. Environment: {outer.describe()}",
            )


def for_this_pod(options: Options) -> Options:
    """Completes the options in a pod of a TrainJob that is to run several processes in each pod.

    Args:
        options: What is wanted.

    Returns:
        The options, with this pod among the others, and the number of its processes.

    Raises:
        ConfigurationError: A variable of the job is missing, or its value is not valid.

    Example:
        >>> os.environ.update(PET_NODE_RANK="1", PET_NNODES="2", PET_NPROC_PER_NODE="4", PET_MASTER_ADDR="a", PET_MASTER_PORT="1")
        >>> for_this_pod(Options()).node
        Node(rank=1, count=2, rendezvous='a:1', name='This machine', least=None)
    """
    if options.node is not None or kind_of_environment() is not TrainJobEnvironment or not TrainJobEnvironment.processes():
        return options
    node = Node(variable(Rank, "PET_NODE_RANK"), variable(Size, "PET_NNODES"), master_address("PET_"))
    return replace(options, num_replicas=options.num_replicas or TrainJobEnvironment.processes(), node=node)


def join_outer_run(outer: Environment, options: Options, arguments: Sequence[str]) -> NoReturn:
    """Becomes the rank that the other launcher has made this process; that one watches it and ends it.

    Args:
        outer: From `outer_run`.
        options: What kind of run is wanted.
        arguments: What follows the folders in the arguments of `script.main`.

    Raises:
        ConfigurationError: Something else than a rank of the outer run is wanted.
    """
    other_size = options.num_replicas not in (None, outer.size)
    wanted = {
        "num_replicas": options.num_replicas if other_size else None,
        "hosts": options.hosts,
        "max_restarts": options.max_restarts or None,
        "prefix": options.prefix or None,
        "bind_cores": options.bind_cores or None,
        "strategy": options.strategy if options.strategy == "mirrored" else None,
    }
    conflicts = {name: value for name, value in wanted.items() if value is not None}
    if conflicts or os.environ.get("TFREP_NUM_REPLICAS"):
        what = "`tfrep run` would start a separate run in each of them"
        remedy = "leave these options out, so that the processes are the ranks" if conflicts else "call it outside of a run"
        raise _refusal(outer, what, remedy, conflicts)
    environ = {name: value for name, value in os.environ.items() if name not in RUN_VARIABLES} | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": common_hash_seed(_HASH_SEED),
        "TFREP_STRATEGY": "multi-worker",
        "TFREP_NUM_REPLICAS": str(outer.size),
        "TFREP_COMMUNICATOR": options.communicator,
    }
    if not options.speaks:
        environ["TFREP_QUIET"] = "1"
    if options.backup_dir is not None:
        environ["TFREP_BACKUP_DIR"] = shared_folder(options.backup_dir).place
    environ |= profile_environ(options.profile, profile_folder(options.profile_dir, options.log_dir))
    log_dir = "" if options.log_dir is None else str(writable("log_dir", options.log_dir))
    command = module_command("tfrep_strategy.running.script", "", log_dir, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpid() == 1:
        sys.exit(run_under_init(command, environ))
    os.execve(command[0], command, environ)


def _refusal(outer: Environment, what: str, remedy: str, received: dict[str, Any]) -> ConfigurationError:
    variables = ", ".join(outer.found) or "its variables"
    return ConfigurationError(
        message(
            f"This process is one of {outer.size} that another launcher has started, and {what}.",
            hint=f"{remedy}; or unset {variables} if they are left over from another run.",
            code="TFREP-E007",
            **received,
            environment=outer.describe(),
        )
    )
