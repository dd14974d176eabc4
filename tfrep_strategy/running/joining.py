"""A launcher that runs inside the run of another one, as in `srun tfrep run train.py`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tfrep_strategy.environments import Environment, TrainJobEnvironment, detect_environment, kind_of_environment
from tfrep_strategy.environments.base import master_address
from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.processes.command import module_command
from tfrep_strategy.processes.identity import RUN_VARIABLES, common_hash_seed
from tfrep_strategy.processes.nodes import Node
from tfrep_strategy.processes.shared_folder import shared_folder
from tfrep_strategy.processes.under_init import run_under_init
from tfrep_strategy.profiles.wanted import profile_environ, profile_folder
from tfrep_strategy.running.runs import Options
from tfrep_strategy.validation import Rank, Size, variable, writable

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
        raise _refusal(outer, f"{command} would start a run of its own in each of them", "call it in one process only", {})


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
                f"{command} starts a run of its own in each of the {outer.size} processes that another launcher has"
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
        what = "`tfrep run` would start a run of its own in each of them"
        remedy = "leave these options out, so that the processes are the ranks" if conflicts else "call it outside of a run"
        raise _refusal(outer, what, remedy, conflicts)
    environ = {name: value for name, value in os.environ.items() if name not in RUN_VARIABLES} | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": common_hash_seed(_HASH_SEED),
        "TFREP_STRATEGY": "multi-worker",
        "TFREP_NUM_REPLICAS": str(outer.size),
        "TFREP_COMMUNICATOR": options.communicator,
    }
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
            **received,
            environment=outer.describe(),
        )
    )
