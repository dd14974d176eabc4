"""Processes started by `mpirun` (Open MPI, MVAPICH, or a PMI launcher such as MPICH's and Intel's Hydra), or by `horovodrun`."""

from __future__ import annotations

import os
import zlib

from tfrep_strategy.cluster.environments.base import Environment, known_hosts, master_address
from tfrep_strategy.cluster.environments.slurm import SlurmEnvironment
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK
from tfrep_strategy.core.validation import Rank, Size, variable

# Below the ports that Linux assigns by itself, and above those of Slurm's jobs.
_FIRST_PORT, _PORTS = 30_000, 2_700


class MpiEnvironment(Environment):
    """Reads `OMPI_COMM_WORLD_*`, else `MV2_COMM_WORLD_*`, else `PMI_*` with Hydra's `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.

    A launcher that sets only `PMIX_RANK`, such as `prun`, does not report the number of ranks. Then you set `PMI_SIZE`.

    MPI tells a process only its own host. To get each other's addresses, ranks on several machines meet at `MASTER_ADDR` and
    `MASTER_PORT`, if you set these. Ranks on one machine meet on a port derived from Open MPI's number of the job.

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
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "PMIX_RANK",
        "PMIX_NAMESPACE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether an MPI launcher set a rank. Ranks that Slurm repeats for MPI libraries do not count."""
        if "OMPI_COMM_WORLD_RANK" in os.environ or "MV2_COMM_WORLD_RANK" in os.environ:
            return True
        # `srun --mpi` sets these beside its own variables, which also describe the hosts. Under Hydra inside a Slurm job the
        # two differ; then Hydra started this process.
        if "PMI_RANK" in os.environ:
            return not (SlurmEnvironment.detect() and _repeats_slurm(PMI_RANK="SLURM_PROCID", PMI_SIZE="SLURM_NTASKS"))
        in_step = "SLURM_STEP_ID" in os.environ
        return "PMIX_RANK" in os.environ and not (in_step and _repeats_slurm(PMIX_RANK="SLURM_PROCID"))

    def __init__(self) -> None:
        rank = variable(Rank, "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
        size = variable(Size, "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
        of_rank = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
        of_size = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
        local_size = variable(Size, *of_size, default=size)
        super().__init__(
            rank=rank,
            size=size,
            local_rank=variable(Rank, *of_rank, default=rank),
            local_size=local_size,
            rendezvous=_rendezvous(one_machine=local_size == size) if size > 1 else None,
        )

    @property
    def run_name(self) -> str:
        """The name of MPI's job."""
        return os.environ.get("PMIX_NAMESPACE") or super().run_name


def _repeats_slurm(**names: str) -> bool:
    return all(os.environ.get(own) == os.environ.get(of_slurm) for own, of_slurm in names.items())


def _rendezvous(one_machine: bool) -> str | None:
    if "MASTER_ADDR" in os.environ:
        return master_address()
    if one_machine and "PMIX_NAMESPACE" in os.environ:
        return f"{LOOPBACK}:{_FIRST_PORT + zlib.crc32(os.environb[b'PMIX_NAMESPACE']) % _PORTS}"
    return None


class HorovodEnvironment(Environment):
    """Reads `HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE` and `HOROVOD_HOSTNAME`.

    Horovod tells a process only its own host. The hosts of ranks on other machines stay empty.

    Raises:
        ConfigurationError: A variable is missing, or its value is not valid.

    Example:
        >>> os.environ.update(HOROVOD_RANK="1", HOROVOD_SIZE="2")
        >>> HorovodEnvironment().rank
        1
    """

    name = "Horovod"
    variables = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_HOSTNAME",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "HOROVOD_GLOO_RENDEZVOUS_SECRET",
        "HOROVOD_GLOO_IFACE",
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether Horovod's rank or size is set."""
        return "HOROVOD_RANK" in os.environ or "HOROVOD_SIZE" in os.environ

    def __init__(self) -> None:
        rank, size = variable(Rank, "HOROVOD_RANK"), variable(Size, "HOROVOD_SIZE")
        local_size = variable(Size, "HOROVOD_LOCAL_SIZE", default=size)
        super().__init__(
            rank=rank,
            size=size,
            hosts=known_hosts(rank, size, local_size, os.environ.get("HOROVOD_HOSTNAME") or "localhost"),
            local_rank=variable(Rank, "HOROVOD_LOCAL_RANK", default=rank),
            local_size=local_size,
        )

    @property
    def run_name(self) -> str:
        """The address where the ranks look each other up."""
        return " ".join(os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")).strip()
