"""The pods of an indexed Job of Kubernetes."""

from __future__ import annotations

import os

from tfrep_strategy.environments.base import Environment, master_address
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.validation import Rank, Size, variable


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
