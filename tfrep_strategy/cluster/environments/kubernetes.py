"""The pods of a job of Kubernetes: an indexed Job, or a TrainJob of Kubeflow's Trainer."""

from __future__ import annotations

import os

from tfrep_strategy.cluster.environments.base import Environment, master_address
from tfrep_strategy.cluster.hardware import driver_gpus
from tfrep_strategy.core.validation import Rank, Size, variable
from tfrep_strategy.errors import ConfigurationError, message


class IndexedJobEnvironment(Environment):
    """Reads `JOB_COMPLETION_INDEX`, which Kubernetes sets, and `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, which you set.

    Raises:
        ConfigurationError: A variable is missing, or its value is not valid.

    Example:
        >>> os.environ.update(JOB_COMPLETION_INDEX="1", WORLD_SIZE="2", MASTER_ADDR="train-0.train", MASTER_PORT="29500")
        >>> IndexedJobEnvironment().rendezvous
        'train-0.train:29500'
    """

    name = "indexed Job"
    variables = ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    @classmethod
    def detect(cls) -> bool:
        """Returns whether the index is set."""
        return "JOB_COMPLETION_INDEX" in os.environ

    def __init__(self) -> None:
        missing = [name for name in self.variables if name not in os.environ]
        if missing and os.environ.get("WORLD_SIZE") != "1":
            raise ConfigurationError(
                message(
                    f"Kubernetes tells this pod its index only. {' and '.join(missing)} must be set, too.",
                    hint="in the manifest, set WORLD_SIZE to the Job's completions, MASTER_ADDR to the name of pod 0 in a headless"
                    " Service, and MASTER_PORT to a port; or unset JOB_COMPLETION_INDEX if each pod runs alone.",
                    JOB_COMPLETION_INDEX=os.environ["JOB_COMPLETION_INDEX"],
                )
            )
        size = variable(Size, "WORLD_SIZE")
        super().__init__(
            rank=variable(Rank, "JOB_COMPLETION_INDEX"),
            size=size,
            local_rank=0,
            local_size=1,
            rendezvous=master_address() if size > 1 else None,
        )


_ONE_PROCESS = ("", "1", "auto", "cpu")


class TrainJobEnvironment(Environment):
    """Reads `PET_NODE_RANK`, `PET_NNODES`, `PET_MASTER_ADDR`, `PET_MASTER_PORT` and `PET_NPROC_PER_NODE`.

    Each pod is a rank, also with `auto`, the default of the Trainer. If the job asks for several processes in a pod, or
    with `gpu` for one on each of several GPUs, `tfrep run` starts them there.

    Raises:
        ConfigurationError: A variable is missing, its value is not valid, or the job asks for several processes in a pod.

    Example:
        >>> os.environ.update(PET_NODE_RANK="1", PET_NNODES="2", PET_MASTER_ADDR="job-node-0-0.job", PET_MASTER_PORT="29400")
        >>> TrainJobEnvironment().rendezvous
        'job-node-0-0.job:29400'
    """

    name = "TrainJob"
    variables = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")

    @classmethod
    def detect(cls) -> bool:
        """Returns whether the number of this pod, or the number of pods, is set."""
        return "PET_NODE_RANK" in os.environ or "PET_NNODES" in os.environ

    @staticmethod
    def processes() -> int:
        """Returns the number of processes that `tfrep run` starts in this pod; 0 if the pod is one process."""
        asked = os.environ.get("PET_NPROC_PER_NODE", "")
        if asked == "gpu":
            count = len(driver_gpus())
            return count if count > 1 else 0
        return 0 if asked in _ONE_PROCESS else variable(Size, "PET_NPROC_PER_NODE")

    def __init__(self) -> None:
        rank, size = variable(Rank, "PET_NODE_RANK"), variable(Size, "PET_NNODES")
        if processes := self.processes():
            raise ConfigurationError(
                message(
                    "This pod is to run several processes, and this is one of them.",
                    hint="start the script with `tfrep run`, which starts them all, or ask for one process in a pod.",
                    PET_NPROC_PER_NODE=processes,
                )
            )
        super().__init__(
            rank=rank,
            size=size,
            local_rank=0,
            local_size=1,
            rendezvous=master_address("PET_") if size > 1 else None,
        )
