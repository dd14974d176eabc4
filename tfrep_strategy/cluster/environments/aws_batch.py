"""The nodes of a multi-node parallel job of AWS Batch."""

from __future__ import annotations

import os
import socket

from tfrep_strategy.cluster.environments.base import Environment
from tfrep_strategy.core.validation import Port, Rank, Size, variable
from tfrep_strategy.errors import ConfigurationError, message

_PORT = 29500


class AwsBatchEnvironment(Environment):
    """Reads `AWS_BATCH_JOB_NODE_INDEX`, `AWS_BATCH_JOB_NUM_NODES` and the index and address of the main node.

    Each node is a rank, and the main node is rank 0. The ranks meet there, at port 29500 or `MASTER_PORT`. AWS Batch tells the main
    node's address to the others only. To run a process on each of several GPUs of a node, use `tfrep run --nnodes`.

    Raises:
        ConfigurationError: A variable is missing, or its value is not valid.

    Example:
        >>> os.environ.update(AWS_BATCH_JOB_NODE_INDEX="1", AWS_BATCH_JOB_NUM_NODES="2", AWS_BATCH_JOB_MAIN_NODE_INDEX="0",
        ...                   AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS="10.0.0.7")
        >>> AwsBatchEnvironment().rendezvous
        '10.0.0.7:29500'
    """

    name = "AWS Batch"
    variables = (
        "AWS_BATCH_JOB_NODE_INDEX",
        "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        "MASTER_PORT",
    )

    @classmethod
    def detect(cls) -> bool:
        """Returns whether this process is on a node of a multi-node job. Other jobs, also arrays, have no index of a node."""
        return "AWS_BATCH_JOB_NODE_INDEX" in os.environ

    def __init__(self) -> None:
        node, size = variable(Rank, "AWS_BATCH_JOB_NODE_INDEX"), variable(Size, "AWS_BATCH_JOB_NUM_NODES")
        main = variable(Rank, "AWS_BATCH_JOB_MAIN_NODE_INDEX", default=0)
        if max(node, main) >= size:
            raise ConfigurationError(
                message(
                    "AWS Batch: the indices of nodes must be below their number.",
                    hint="unset variables left over from another job.",
                    AWS_BATCH_JOB_NODE_INDEX=node,
                    AWS_BATCH_JOB_MAIN_NODE_INDEX=main,
                    AWS_BATCH_JOB_NUM_NODES=size,
                )
            )
        super().__init__(
            rank=(node - main) % size,
            size=size,
            local_rank=0,
            local_size=1,
            rendezvous=self._rendezvous(node == main) if size > 1 else None,
        )

    @staticmethod
    def _rendezvous(is_main: bool) -> str:
        host = socket.gethostname() if is_main else variable(str, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        return f"{host}:{variable(Port, 'MASTER_PORT', default=_PORT)}"
