"""Processes started by Slurm's `srun`, on one node or many."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator

from tfrep_strategy.cluster.environments.base import Environment
from tfrep_strategy.core.validation import MOST_RANKS, Rank, Size, variable
from tfrep_strategy.errors import ConfigurationError, message

# All ranks compute the same ports from the job and its step, so no port has to be passed around. The range stays below the
# ports that Linux assigns by itself (32768 and up).
_FIRST_PORT, _PORTS = 10_000, 20_000
_FEWEST = 16
"""The smallest number of ports for a step on a node, so that jobs of various sizes have separate ports."""

_INTERACTIVE_STEP = "4294967290"
"""Number of the step in which Slurm runs the shell of `salloc`."""

_LONGEST_NAME = 253
_NUMBER = r"[0-9]{1,12}"
_RANGE = rf"{_NUMBER}(?:-{_NUMBER})?"


class SlurmEnvironment(Environment):
    """Reads `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, the node list and the number of tasks on each node.

    Tasks may be spread over the nodes in blocks (Slurm's default) or cyclically.

    Raises:
        ConfigurationError: A variable is missing, cannot be read, or contradicts another.

    Example:
        >>> os.environ.update(SLURM_PROCID="2", SLURM_NTASKS="3", SLURM_STEP_NODELIST="node[1-2]",
        ...                   SLURM_STEP_TASKS_PER_NODE="2,1", SLURM_JOB_ID="7")
        >>> SlurmEnvironment().addresses
        ['node1:10112', 'node1:10113', 'node2:10112']
    """

    name = "Slurm"
    variables = (
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "SLURM_DISTRIBUTION",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether `srun` started this process. An interactive shell and the script of a batch job do not count."""
        described = "SLURM_PROCID" in os.environ and "SLURM_NTASKS" in os.environ
        return described and not _in_shell() and not _is_batch_script()

    def __init__(self) -> None:
        rank, size = variable(Rank, "SLURM_PROCID"), variable(Size, "SLURM_NTASKS")
        nodes = expand_nodes(_first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", default="localhost"))
        counts = expand_counts(_first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=_even(size, len(nodes))))
        if len(counts) != len(nodes) or sum(counts) != size:
            raise ConfigurationError(
                message(
                    "Slurm: the tasks per node do not match the nodes and the number of tasks.",
                    hint="start the processes with srun, and without variables of another job.",
                    nodes=nodes,
                    tasks_per_node=counts,
                    SLURM_NTASKS=size,
                )
            )
        hosts = list(_spread(nodes, counts, cyclic=os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic")))
        here = variable(Rank, "SLURM_NODEID", default=-1)
        if 0 <= rank < size and 0 <= here < len(nodes) and hosts[rank] != nodes[here]:
            raise ConfigurationError(
                message(
                    "Slurm: this task is not on the node where it was expected.",
                    hint="use srun --distribution=block or --distribution=cyclic.",
                    SLURM_PROCID=rank,
                    node=nodes[here],
                    expected=hosts[rank],
                )
            )
        next_ports = {node: itertools.count(_first_port(max(counts))) for node in nodes}
        super().__init__(
            rank=rank,
            size=size,
            hosts=hosts,
            addresses=[f"{host}:{next(next_ports[host])}" for host in hosts],
            local_rank=variable(Rank, "SLURM_LOCALID", default=None),
        )


def expand_nodes(text: str) -> list[str]:
    """Expands a compact node list.

    Args:
        text: Names with ranges in square brackets, separated by commas.

    Returns:
        The names, in Slurm's order.

    Raises:
        ConfigurationError: The list cannot be read.

    Example:
        >>> expand_nodes("node[01-03,07],gpu5")
        ['node01', 'node02', 'node03', 'node07', 'gpu5']
    """
    # A name consists of plain pieces and of ranges in brackets. A comma outside brackets ends it.
    refusal = ConfigurationError(message("Slurm: cannot read the node list.", hint='write it like "node[01-03,07]".', nodes=text))
    if not re.fullmatch(rf"(?:[^\[\],\s]|\[{_RANGE}(?:,{_RANGE})*\]|(?<=[^,]),(?=[^,]))+", text):
        raise refusal
    names: list[str] = []
    for pattern in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", pattern)
        # Checked before expanding: a few digits may stand for millions of names.
        if sum(len(plain) or 1 for _, plain in pieces) > _LONGEST_NAME:
            raise refusal
        counts = [sum(len(numbers) for numbers, _ in _ranges(ranges)) for ranges, _ in pieces if ranges]
        if not 0 < math.prod(counts) <= MOST_RANKS - len(names):
            raise refusal
        choices = [_expand_ranges(ranges) if ranges else [plain] for ranges, plain in pieces]
        names += ["".join(parts) for parts in itertools.product(*choices)]
    return names


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's compact numbers of tasks per node.

    Args:
        text: Numbers separated by commas. `(xN)` after a number repeats it for N nodes in a row.

    Returns:
        One number per node.

    Raises:
        ConfigurationError: The text cannot be read.

    Example:
        >>> expand_counts("4(x2),2")
        [4, 4, 2]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(rf"({_NUMBER})(?:\(x({_NUMBER})\))?", part.strip())
        if not match or len(counts) + int(match[2] or 1) > MOST_RANKS:
            raise ConfigurationError(
                message("Slurm: cannot read the tasks per node.", hint='write it like "4(x2),2".', tasks_per_node=text)
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_ranges(text: str) -> list[str]:
    return [str(number).zfill(width) for numbers, width in _ranges(text) for number in numbers]


def _ranges(text: str) -> Iterator[tuple[range, int]]:
    """Yields the numbers of each range, and their minimum number of digits."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield range(int(first), int(last or first) + 1), len(first)


def _spread(nodes: list[str], counts: list[int], *, cyclic: bool) -> Iterator[str]:
    """Yields the node of each rank."""
    places = [(turn, index) for index, count in enumerate(counts) for turn in range(count)]
    for _, index in sorted(places) if cyclic else places:
        yield nodes[index]


def _in_shell() -> bool:
    """Returns whether this process belongs to a shell that `salloc` or `srun --pty` has started for a user.

    Tasks that `srun` starts from that shell inherit `SLURM_PTY_PORT`, but their standard input is not a terminal.
    """
    if os.environ.get("SLURM_STEP_ID") == _INTERACTIVE_STEP:
        return True
    is_task = os.environ.get("SLURM_TASK_PID") == str(os.getpid())  # As with `srun --pty -n 2 python train.py`.
    has_terminal = "SLURM_PTY_PORT" in os.environ and os.environ["SLURM_PROCID"] == "0" and os.isatty(0)
    return has_terminal and not is_task


def _is_batch_script() -> bool:
    """Returns whether this process runs a batch script. Slurm numbers it 0 of all tasks, and starts no other process."""
    step = any(name in os.environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"))
    return os.environ["SLURM_PROCID"] == "0" and "SLURM_JOB_ID" in os.environ and not step


def _even(size: int, nodes: int) -> str:
    """Returns tasks per node if Slurm does not set them: as equal as possible, with the remainder on the first nodes."""
    return ",".join(str(size // nodes + (index < size % nodes)) for index in range(nodes))


def _first(*names: str, default: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), default)


def _first_port(count: int) -> int:
    """Returns the first port of this step on each node. Consecutive steps and jobs, as those of an array, have different ports.

    Args:
        count: Number of ports that the step needs on a node.
    """
    block = max(_FEWEST, 1 << (count - 1).bit_length())
    job, step = variable(int, "SLURM_JOB_ID", "SLURM_JOBID", default=0), variable(int, "SLURM_STEP_ID", default=0)
    return _FIRST_PORT + block * ((job + 1021 * step) % max(1, _PORTS // block))
