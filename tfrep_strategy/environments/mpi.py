"""Processes started by `mpirun`: Open MPI, or a PMI launcher such as MPICH's and Intel's Hydra."""

from __future__ import annotations

import os
import socket

from tfrep_strategy.environments.base import Environment, read_int
from tfrep_strategy.environments.horovod import known_hosts
from tfrep_strategy.environments.slurm import SlurmEnvironment


class MpiEnvironment(Environment):
    """Reads `OMPI_COMM_WORLD_*`, else `PMI_*` with Hydra's `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.

    MPI tells a process its own host only. The hosts of ranks on other machines stay empty.

    Raises:
        ConfigurationError: A variable is missing, or its value is not valid.

    Example:
        >>> os.environ.update(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
        >>> MpiEnvironment().rank
        1
    """

    name = "MPI"
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether an MPI launcher set a rank. Ranks that Slurm repeats for MPI libraries do not count."""
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            return True
        # `srun --mpi=pmi2` sets PMI_* beside its own variables, which also describe the hosts. Under Hydra inside a Slurm
        # job the two differ; then Hydra started this process.
        repeated = SlurmEnvironment.detect() and all(
            os.environ.get(slurm) == os.environ.get(pmi)
            for slurm, pmi in (("SLURM_PROCID", "PMI_RANK"), ("SLURM_NTASKS", "PMI_SIZE"))
        )
        return "PMI_RANK" in os.environ and not repeated

    def __init__(self) -> None:
        rank = read_int("OMPI_COMM_WORLD_RANK", "PMI_RANK")
        size = read_int("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        local_size = read_int("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=size)
        super().__init__(
            rank=rank,
            size=size,
            hosts=known_hosts(rank, size, local_size, socket.gethostname()),
            local_rank=read_int("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", default=rank),
            local_size=local_size,
        )
