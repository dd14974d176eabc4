"""Operations that every replica computes for all rows on purpose. Some of their results are sharded again.

Examples are ragged and sparse rows that become dense, and operations that mix rows and return one for each.
"""

from __future__ import annotations

from typing import Any

from tfrep_strategy.partitioner.placements import Offset, Rows, Size
from tfrep_strategy.partitioner.planner import ON_PURPOSE, Planner, leading

_SPARSE = "the result is sparse or ragged, and its indices are numbers among all rows"
_DENSE = "the rows are sparse or ragged"
_COUNT = "how many rows the result has depends on the values of all rows"
_ORDER = "each row of the result may be any row of the batch"
_PYTHON = "a function of Python gets what it gets on one device"
_BLOCKS = "the rows lie in blocks of all rows"
_VARIABLE = "the copies of a variable get the rows of all replicas"

ON_PURPOSE.update(
    dict.fromkeys(("CTCGreedyDecoder", "CTCBeamSearchDecoder", "SparseCross", "StringSplit", "StringSplitV2"), _SPARSE)
    | dict.fromkeys(("RaggedTensorToTensor", "SparseTensorDenseMatMul", "SparseToDense"), _DENSE)
    | dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts"), _COUNT)
    | dict.fromkeys(("DynamicStitch", "RandomShuffle", "ReverseV2", "Roll", "TopKV2"), _ORDER)
    | dict.fromkeys(("BatchToSpaceND", "SpaceToBatchND"), _BLOCKS)
    | dict.fromkeys(("EagerPyFunc", "PyFunc", "PyFuncStateless"), _PYTHON)
    | dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"), _VARIABLE)
)


@leading(
    "Cumprod", "Cumsum", "CumulativeLogsumexp", "FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D", "LogSoftmax", "RandomShuffle",
    "ReverseV2", "Roll", "Softmax",
)  # fmt: skip
def as_many_as_before(plan: Planner, operation: Any) -> Size:
    """Returns the leading size of the first input, which has the shape of the result."""
    dims = plan.dims(operation.inputs[0])
    return dims[0] if dims else None


@leading("RaggedTensorToTensor")
def rows_of_ragged(plan: Planner, operation: Any) -> Size:
    """Returns the number of rows in the first row partition."""
    first = operation.inputs[3]
    kind = operation.get_attr("row_partition_types")[0]
    if kind == b"ROW_SPLITS":
        dims = plan.dims(first)
        return Rows() if dims == [Offset(1, 1)] else None
    return _only(plan, first) if kind == b"FIRST_DIM_SIZE" else None


@leading("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum")
def rows_of_segments(plan: Planner, operation: Any) -> Size:
    """Returns the number of segments."""
    return _only(plan, operation.inputs[2])


@leading("SparseToDense", "SparseTensorDenseMatMul")
def rows_of_sparse(plan: Planner, operation: Any) -> Size:
    """Returns the leading size of the sparse tensor's shape."""
    is_product = operation.type == "SparseTensorDenseMatMul"
    if is_product and operation.get_attr("adjoint_a"):
        return None
    shape = plan.sizes_of(operation.inputs[2 if is_product else 1])
    return None if shape is None or not shape.size else shape[0]


def _only(plan: Planner, tensor: Any) -> Size:
    sizes = plan.sizes_of(tensor)
    return sizes.ravel()[0] if sizes is not None and sizes.size == 1 else None
