"""How ranks agree to talk through common memory: over the communicator that connects them already."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.common_memory import MOST_SHARING, SHARES_MEMORY, problem_of_sharing
from tfrep_strategy.communicators.base import Communicator
from tfrep_strategy.communicators.shared_memory import SharedMemoryCommunicator
from tfrep_strategy.errors import TfrepError, warn
from tfrep_strategy.transports import no_common_memory

_MEETING_SECONDS = 15.0
"""How long ranks that are all there may take to meet. Where the names of sockets are not common, they never do."""


def over_common_memory(connected: Communicator, environment: Any, *, has_gpu: bool) -> Communicator:
    """Moves all ranks to common memory, or none. Every rank must call it.

    Each rank tells the others whether it can share memory. If all can, they try to meet, and tell each other whether they have met.

    Args:
        connected: Connects all ranks. They use it if they cannot share memory, and rank 0 warns if they are on one machine.
        environment: Knows the rank, the size, and what tells this run from others on this machine.
        has_gpu: Whether this rank has a GPU. Then no rank moves.

    Returns:
        A communicator over common memory on all ranks, or `connected` on all.
    """
    stays = has_gpu or not SHARES_MEMORY or environment.local_size < environment.size or environment.size > MOST_SHARING
    told = connected.all_gather_object((stays, None if stays else problem_of_sharing(environment.size)))
    if any(stays for stays, _ in told):
        return connected
    made, problems = None, [problem for _, problem in told]
    if not any(problems):
        problem = None
        try:
            made = SharedMemoryCommunicator(environment, seconds=_MEETING_SECONDS)
        except (TfrepError, OSError) as error:
            problem = str(error)
        problems = connected.all_gather_object(problem)
    if made is not None and not any(problems):
        return made
    if made is not None:
        made.close()
    if environment.rank == 0:
        rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
        warn(no_common_memory(f"on rank {rank}, {problem}", connected.name))
    return connected
