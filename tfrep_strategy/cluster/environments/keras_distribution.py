"""Processes described by the arguments of `keras.distribution.initialize`, or by the variables that stand for them."""

from __future__ import annotations

import os

from tfrep_strategy.cluster.environments.base import Environment
from tfrep_strategy.cluster.rendezvous.connections import is_loopback
from tfrep_strategy.core.validation import Address, Rank, Size, checked, variable
from tfrep_strategy.errors import ConfigurationError, message

ADDRESSES, SIZE, RANK = (f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"))


class KerasDistributionEnvironment(Environment):
    """Reads `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and `KERAS_DISTRIBUTION_PROCESS_ID`.

    The addresses are `host:port` of all processes, or of process 0 alone, where the others meet.

    Raises:
        ConfigurationError: A variable is missing, its value is not valid, or there are neither one nor `num_processes` addresses.

    Example:
        >>> os.environ.update(KERAS_DISTRIBUTION_JOB_ADDRESSES="a:1,b:1", KERAS_DISTRIBUTION_NUM_PROCESSES="2")
        >>> os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = "1"
        >>> KerasDistributionEnvironment().hosts
        ['a', 'b']
    """

    name = "keras.distribution"
    variables = (ADDRESSES, SIZE, RANK)

    @classmethod
    def detect(cls) -> bool:
        """Returns whether the rank and the number of processes are set."""
        return SIZE in os.environ and RANK in os.environ

    def __init__(self) -> None:
        rank, size = variable(Rank, RANK), variable(Size, SIZE)
        given = [each.strip() for each in os.environ.get(ADDRESSES, "").split(",") if each.strip()]
        addresses = checked(list[Address], ADDRESSES, given, hint='write "host1:port,host2:port".')
        if size > 1 and len(addresses) not in (1, size):
            raise ConfigurationError(
                message(
                    "The processes do not know where the others are.",
                    hint="give job_addresses: host:port of process 0, or of each process, separated by commas.",
                    job_addresses=",".join(given),
                    num_processes=size,
                )
            )
        if size == 1 or len(addresses) == size:
            hosts = [each.rpartition(":")[0] for each in addresses] if size > 1 else None
            super().__init__(rank=rank, size=size, hosts=hosts, addresses=addresses if size > 1 else None)
        else:
            here = is_loopback(addresses[0].rpartition(":")[0])
            super().__init__(
                rank=rank, size=size, rendezvous=addresses[0], local_rank=rank if here else 0, local_size=size if here else 1
            )
