"""MPI-like collectives between replicas, callable inside a step: nest in, nest out, and gradients flow through them.

All replicas call the same collectives in the same order, with nests of the same structure, dtypes and (but for what is
said at `all_gather` and `all_to_all`) shapes. Pass a dict as one nest; do not loop over it. Outside a step, and under no
strategy, each gives the answer of a replica that is alone.
"""

from tfrep_strategy.collectives.chief import chief_first, is_chief
from tfrep_strategy.collectives.exchanges import all_gather, all_to_all, broadcast
from tfrep_strategy.collectives.mapping import map_gather, map_reduce
from tfrep_strategy.collectives.processes import all_gather_object, barrier, broadcast_object
from tfrep_strategy.collectives.reductions import all_mean, all_reduce, all_sum, reduce_scatter
from tfrep_strategy.collectives.replicas import num_replicas, replica_id

__all__ = [
    "all_gather", "all_gather_object", "all_mean", "all_reduce", "all_sum", "all_to_all", "barrier", "broadcast",
    "broadcast_object", "chief_first", "is_chief", "map_gather", "map_reduce", "num_replicas", "reduce_scatter", "replica_id",
]  # fmt: skip
