"""Operations on the last axes of tensors: linear algebra, Fourier transforms, lookups and counts. Other axes are left alone."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.partitioner.placements import PARTIAL, Partial, Replicate, Shard
from tfrep_strategy.partitioner.planner import Planner, rule
from tfrep_strategy.partitioner.rules.elementwise import aligned_rows

_INNER = {
    "Cholesky": 2, "Cross": 1, "Eig": 2, "FFT": 1, "FFT2D": 2, "FFT3D": 3, "IFFT": 1, "IFFT2D": 2, "IFFT3D": 3,
    "IRFFT": 1, "IRFFT2D": 2, "LogMatrixDeterminant": 2, "MatrixBandPart": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "MatrixDiagV3": 1, "MatrixInverse": 2, "MatrixSolve": 2, "MatrixTriangularSolve": 2, "Qr": 2,
    "RFFT": 1, "RFFT2D": 2, "SelfAdjointEigV2": 2, "Svd": 2,
}  # fmt: skip
"""How many of the last axes an operation works on."""

_SEVERAL = ("Cross", "MatrixSolve", "MatrixTriangularSolve")
"""The other axes of their two operands are the same, or broadcast against each other."""


@rule(*_INNER)
def of_last_axes(plan: Planner, operation: Any) -> None:
    """Rows stay rows where they are in none of the axes that the operation works on."""
    operands = list(operation.inputs[: 2 if operation.type in _SEVERAL else 1])
    for x in operands:
        if isinstance(plan.placement(x), Partial):
            plan.replicated(x)
    aligned = aligned_rows(plan, operands, have_one_shape=operation.type != "MatrixTriangularSolve")
    rank = max(plan.rank(x) or 0 for x in operands)
    if aligned is None or aligned[0].axis >= rank - _INNER[operation.type]:
        plan.replicate(operation)
        return
    shard, local = aligned
    others = [plan.replicated(x) for x in operation.inputs[len(operands) :]]
    plan.emit(operation, [*local, *others], shard)


@rule("MatrixSetDiagV3")
def set_diagonal(plan: Planner, operation: Any) -> None:
    """Matrices and their diagonals are in the same rows."""
    x, diagonal, which = operation.inputs
    shards = {p for p in map(plan.placement, (x, diagonal)) if isinstance(p, Shard)}
    shard, rank = shards.pop() if len(shards) == 1 else None, plan.rank(x)
    if shard is None or rank is None or shard.axis >= rank - 2:
        plan.replicate(operation)
    else:
        plan.emit(operation, [plan.sharded(x, shard), plan.sharded(diagonal, shard), plan.replicated(which)], shard)


@rule("LookupTableFindV2")
def lookup(plan: Planner, operation: Any) -> None:
    """Each element is looked up by itself, in the table of the process."""
    table, keys, default = operation.inputs
    placement = plan.placement(keys)
    if not isinstance(placement, Shard) or not isinstance(plan.placement(table), Replicate):
        plan.replicate(operation)
        return
    plan.emit(operation, [plan.local(table), plan.local(keys), plan.replicated(default)], placement)
    plan.access(plan.local(table), plan.node_of(operation), writes=False)


@rule("LowerBound", "UpperBound")
def bound(plan: Planner, operation: Any) -> None:
    """Each value is looked up among the sorted numbers of its row; where there is one row of these, also values are cut."""
    among, values = operation.inputs
    shard = plan.placement(values)
    if shard == Shard(0) and plan.placement(among) == shard:
        plan.emit(operation, plan.locals(operation), shard)
    elif isinstance(shard, Shard) and shard.axis == 1:
        plan.emit(operation, [plan.replicated(among), plan.local(values)], shard)
    else:
        plan.replicate(operation)
    if (dims := plan.dims(values)) is not None:
        plan.known_dims[operation.outputs[0].name] = dims


@rule("DenseBincount")
def counts(plan: Planner, operation: Any) -> None:
    """The elements of each row are counted; of a vector, those of all rows."""
    x, size, weights = operation.inputs
    placement, of_weights, rank = plan.placement(x), plan.placement(weights), plan.rank(x)
    is_none = weights.shape.num_elements() == 0
    is_counted = isinstance(placement, Shard) and (is_none or of_weights == placement)
    is_sum = rank == 1 and not operation.get_attr("binary_output")
    if not is_counted or not (is_sum or (rank == 2 and placement == Shard(0))):
        plan.replicate(operation)
        return
    own = plan.replicated(weights) if is_none else plan.local(weights)
    plan.emit(operation, [plan.local(x), plan.replicated(size), own], PARTIAL if is_sum else placement)
