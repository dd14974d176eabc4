"""What becomes of each operation: which placements it takes, and which it gives."""

from tfrep_strategy.partitioner.rules import (
    chosen_rows,  # noqa: F401
    conditionals,  # noqa: F401
    contractions,  # noqa: F401
    drawing,  # noqa: F401
    effects,  # noqa: F401
    elementwise,  # noqa: F401
    images,  # noqa: F401
    indexing,  # noqa: F401
    joined_tensors,  # noqa: F401
    lists,  # noqa: F401
    loops,  # noqa: F401
    marked,  # noqa: F401
    matrices,  # noqa: F401
    on_purpose,  # noqa: F401
    reducing,  # noqa: F401
    rows_again,  # noqa: F401
    scattering,  # noqa: F401
    shapes,  # noqa: F401
)
