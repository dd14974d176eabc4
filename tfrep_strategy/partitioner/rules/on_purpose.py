"""Operations that every replica computes for all rows on purpose, and the reasons. Some have a rule for other axes."""

from __future__ import annotations

from tfrep_strategy.partitioner.planner import ON_PURPOSE

_SPARSE = "the result is sparse or ragged, and its indices are numbers among all rows"
_DENSE = "the rows are sparse or ragged"
_COUNT = "how many rows the result has depends on the values of all rows"
_ORDER = "each row of the result may be any row of the batch"
_PYTHON = "a function of Python gets what it gets on one device"
_VARIABLE = "the copies of a variable get the rows of all replicas"

ON_PURPOSE.update(
    dict.fromkeys(("CTCGreedyDecoder", "CTCBeamSearchDecoder", "SparseCross", "StringSplit", "StringSplitV2"), _SPARSE)
    | dict.fromkeys(("RaggedTensorToTensor", "SparseTensorDenseMatMul", "SparseToDense"), _DENSE)
    | dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts"), _COUNT)
    | dict.fromkeys(("DynamicStitch", "RandomShuffle", "ReverseV2", "Roll", "TopKV2"), _ORDER)
    | dict.fromkeys(("EagerPyFunc", "PyFunc", "PyFuncStateless"), _PYTHON)
    | dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"), _VARIABLE)
)
