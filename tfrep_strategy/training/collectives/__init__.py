"""MPI-like collectives between replicas, callable inside a step. They take and return nests; gradients flow through them.

All replicas call the same collectives in the same order. Their nests have the same structure, dtypes and shapes;
`all_gather` and `all_to_all` document the one dimension that may differ. Pass a dict as one nest; do not loop over it.
Outside a step, and without a strategy, a collective returns the result for a single replica.

The set follows TF-Replicator (Buchlovsky et al., arXiv:1902.00465), which took it from MPI.
"""

from tfrep_strategy.training.collectives.between_processes import (
    all_gather_object,
    barrier,
    broadcast_object,
    chief_first,
    is_chief,
)
from tfrep_strategy.training.collectives.calls import num_replicas, replica_id
from tfrep_strategy.training.collectives.mapping import map_gather, map_reduce
from tfrep_strategy.training.collectives.operations import (
    all_gather,
    all_mean,
    all_reduce,
    all_sum,
    all_to_all,
    broadcast,
    reduce_scatter,
)

__all__ = [
    "all_gather", "all_gather_object", "all_mean", "all_reduce", "all_sum", "all_to_all", "barrier", "broadcast",
    "broadcast_object", "chief_first", "is_chief", "map_gather", "map_reduce", "num_replicas", "reduce_scatter", "replica_id",
]  # fmt: skip
