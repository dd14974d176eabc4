"""Makes rules wrong, to see whether that is found."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from tfrep_strategy.partitioner import planner
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard

MUTATIONS: dict[str, Callable[[Placement], Placement]] = {
    "a sum is taken for a whole": lambda p: REPLICATE if isinstance(p, Partial) else p,
    "rows are taken for a whole": lambda p: REPLICATE if isinstance(p, Shard) else p,
    "an axis is off by one": lambda p: Shard(p.axis + 1, p.per_row) if isinstance(p, Shard) else p,
    "a whole is taken for a sum": lambda p: PARTIAL if isinstance(p, Replicate) else p,
}


def mutated(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Placement], Placement], types: Collection[str] | None
) -> list[str]:
    """Has rules give the results of operations another placement than they mean.

    Args:
        monkeypatch: Ends it.
        change: What becomes of a placement.
        types: Of which operations; None: of all. Others, and what is computed of wholes alone, stay as they are.

    Returns:
        The names of the tensors that were changed, as they are.
    """
    original, changed = planner.Planner.put, list[str]()

    def put(plan: Any, tensor: Any, placement: Placement, *args: Any, **details: Any) -> None:
        if (
            (types is None or tensor.op.type in types)
            and (tensor.dtype.is_floating or tensor.dtype.is_complex)
            and any(not isinstance(plan.placement(x), Replicate) for x in tensor.op.inputs)
            and change(placement) != placement
        ):
            changed.append(tensor.name)
            placement = change(placement)
        original(plan, tensor, placement, *args, **details)

    monkeypatch.setattr(planner.Planner, "put", put)
    monkeypatch.setattr(planner.Planner, "_from_whole_inputs", lambda *_: None)  # To compute it again would mend it.
    return changed
