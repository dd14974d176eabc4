"""Which operations give all ranks the same bits, given the same inputs, whatever the number of their threads.

A kernel that adds up many numbers divides them among its threads, so that ranks with other numbers of threads round otherwise.
What each rank computes of it by itself, such as its copy of a variable, would drift apart. It is made equal where it is used
(`Values.agreed`).
"""

from __future__ import annotations

SAME_BITS = {
    "BiasAdd", "BroadcastTo", "ConcatV2", "ConjugateTranspose", "Const", "Empty", "EmptyTensorList", "EnsureShape", "ExpandDims",
    "Fill", "GatherNd", "GatherV2", "IdentityN", "MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3", "MatrixSetDiagV3",
    "Max", "Min", "MirrorPad", "OneHot", "Pack", "Pad", "PadV2", "Placeholder", "PlaceholderWithDefault", "Range",
    "ReadVariableOp", "Reshape", "ResourceGather", "ReverseV2", "Roll", "Select", "Slice", "Split", "SplitV", "Squeeze",
    "StridedSlice", "StridedSliceGrad", "TensorListConcatV2", "TensorListFromTensor", "TensorListGather",
    "TensorListGetItem", "TensorListPopBack", "TensorListPushBack", "TensorListReserve", "TensorListResize",
    "TensorListSetItem", "TensorListStack", "TensorScatterUpdate", "Tile", "TopKV2", "Transpose", "Unpack",
}  # fmt: skip
"""Operations that move elements, and those that rules add: what works on each element by itself, and what draws numbers."""

CALLS_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
"""Nobody knows what these give."""

ASKS_FOR_SIZES = frozenset({
    "OnesLike", "Rank", "Shape", "ShapeN", "Size", "TensorListElementShape", "TensorListLength", "ZerosLike",
})  # fmt: skip
"""Operations that do not look at the elements that they get."""

ADDS_UP_ROWS = frozenset({"Mean", "Prod", "Sum"})
"""Of several results, each is added up by one thread; so is a single one of few elements."""

AT_ONCE = 1 << 15
"""So many elements are added up by one thread, whatever their number is (Eigen, which counts cycles)."""
