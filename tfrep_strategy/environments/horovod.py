"""Processes started by `horovodrun` (Gloo), or by another launcher that sets Horovod's variables."""

from __future__ import annotations

import os

from tfrep_strategy.environments.base import Environment, known_hosts
from tfrep_strategy.validation import Rank, Size, variable


class HorovodEnvironment(Environment):
    """Reads `HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE` and `HOROVOD_HOSTNAME`.

    Horovod tells a process its own host only. The hosts of ranks on other machines stay empty.

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
        """Where the ranks look each other up."""
        return " ".join(os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")).strip()
