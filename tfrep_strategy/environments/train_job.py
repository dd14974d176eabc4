"""The pods of a TrainJob of Kubeflow's Trainer, as its runtime for torchrun describes them."""

from __future__ import annotations

import os

from tfrep_strategy.environments.base import Environment, master_address
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.nvidia import driver_gpus
from tfrep_strategy.validation import Rank, Size, variable

_ONE_PROCESS = ("", "1", "auto", "cpu")


class TrainJobEnvironment(Environment):
    """Reads `PET_NODE_RANK`, `PET_NNODES`, `PET_MASTER_ADDR`, `PET_MASTER_PORT` and `PET_NPROC_PER_NODE`.

    Each pod is a rank, also with `auto`, which the Trainer sets by default. If the job asks for several processes in a pod, or
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
        """Returns whether the number of this pod is set, or how many there are."""
        return "PET_NODE_RANK" in os.environ or "PET_NNODES" in os.environ

    @staticmethod
    def processes() -> int:
        """Returns how many processes `tfrep run` is to start in this pod; 0 if the pod is one process."""
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
