"""Processes described by `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun and many schedulers set them."""

from __future__ import annotations

import os

from tfrep_strategy.cluster.environments.base import Environment, master_address
from tfrep_strategy.cluster.rendezvous.connections import is_loopback
from tfrep_strategy.core.validation import Rank, Size, variable


class TorchrunEnvironment(Environment):
    """Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

    The ranks meet at `MASTER_ADDR` to get each other's addresses. Torchrun itself listens on `MASTER_PORT`, and sets
    `TORCHELASTIC_USE_AGENT_STORE`. The ranks then meet on the next port.

    Without `LOCAL_RANK` all ranks are on this machine if `MASTER_ADDR` is its loopback address; otherwise each is on a separate
    machine.

    Raises:
        ConfigurationError: A variable is missing, or its value is not valid.

    Example:
        >>> os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="node1", MASTER_PORT="29500")
        >>> TorchrunEnvironment().rendezvous
        'node1:29500'
    """

    name = "torchrun"
    variables = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether the rank is set, and the number of ranks or their address."""
        return "RANK" in os.environ and ("WORLD_SIZE" in os.environ or "MASTER_ADDR" in os.environ)

    def __init__(self) -> None:
        rank, size = variable(Rank, "RANK"), variable(Size, "WORLD_SIZE")
        agent_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rendezvous = master_address(after=int(agent_listens)) if size > 1 else None
        if "LOCAL_RANK" in os.environ:
            local_rank, local_size = variable(Rank, "LOCAL_RANK"), variable(Size, "LOCAL_WORLD_SIZE")
        else:
            one_machine = rendezvous is None or is_loopback(rendezvous.rpartition(":")[0])
            local_rank, local_size = (rank, size) if one_machine else (0, 1)
        super().__init__(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            rendezvous=rendezvous,
        )
