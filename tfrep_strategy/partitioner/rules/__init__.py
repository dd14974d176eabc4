"""The rules of operations: the placements that they take and give."""

from tfrep_strategy.partitioner.rules import (
    all_rows,  # noqa: F401
    contractions,  # noqa: F401
    control_flow,  # noqa: F401
    drawing,  # noqa: F401
    effects,  # noqa: F401
    elementwise,  # noqa: F401
    images,  # noqa: F401
    indexing,  # noqa: F401
    lists,  # noqa: F401
    parts,  # noqa: F401
    reducing,  # noqa: F401
    shapes,  # noqa: F401
)
