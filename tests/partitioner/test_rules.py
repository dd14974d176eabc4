"""Each rule by brute force: an operation whole and in parts, for each way to place its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from partitioner.replicas import differences
from partitioner.wrong_rules import MUTATIONS, mutated

from tfrep_strategy.core.tf import operation_definition
from tfrep_strategy.partitioner import planner
from tfrep_strategy.partitioner.placements import PARTIAL, REPLICATE, Placement, Shard
from tfrep_strategy.partitioner.rules import control_flow, elementwise, lists

pytestmark = pytest.mark.lane("rows")

_SPLITS = [(3, 2), (4, 0, 1), (0, 0, 1)]
"""How many rows each replica has: unequal numbers, none, and one row in all."""

R, P = REPLICATE, PARTIAL
S = Shard


class Case(NamedTuple):
    """An operation, and ways to place its inputs.

    Attributes:
        function: Of tensors.
        shapes: Of its inputs. "n" is the number of rows.
        placements: Of its inputs, one way after the other.
        dtypes: Of its inputs; float64 by default.
        low, high: Between these are the values of integers.
    """

    function: Callable[..., Any]
    shapes: Sequence[Sequence[Any]]
    placements: Sequence[Sequence[Placement]]
    dtypes: Sequence[Any] = ()
    low: int = 0
    high: int = 3


def _contrasted(x: Any) -> Any:
    """A contrastive loss: the label of a row is its number."""
    labels = tf.range(tf.shape(x)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(x, x, transpose_b=True))


def _compared(x: Any) -> list[Any]:
    """Softmaxes over all rows, for each row."""
    each = tf.transpose(tf.matmul(x, x, transpose_b=True))
    backwards = tf.shape(x)[0] - 1 - tf.range(tf.shape(x)[0])
    sparse = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=each, labels=backwards)
    dense = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=each, labels=tf.nn.softmax(each))
    return [tf.nn.softmax(each), tf.nn.log_softmax(2.0 * each), *sparse, *dense]


raw = tf.raw_ops
row, rows = ("n", 3), [[S()], [P], [R]]

CASES = {
    "Sum": Case(lambda x: [tf.reduce_sum(x, 0), tf.reduce_sum(x, 1, keepdims=True), tf.reduce_sum(x)], [row], rows),
    "Mean": Case(lambda x: [tf.reduce_mean(x, 0), tf.reduce_mean(x, 1), tf.reduce_mean(x)], [row], rows),
    "Max": Case(lambda x: [tf.reduce_max(x, 0), tf.reduce_max(x, 1), tf.reduce_max(x, keepdims=True)], [row], rows),
    "Min": Case(lambda x: [tf.reduce_min(x, 0), tf.reduce_min(x, 1)], [row], rows),
    "Prod": Case(lambda x: [tf.reduce_prod(x, 0), tf.reduce_prod(x, 1)], [row], rows),
    "All": Case(lambda x: [tf.reduce_all(x > 0, 0), tf.reduce_all(x > 0, 1)], [row], rows),
    "Any": Case(lambda x: [tf.reduce_any(x > 0, 0), tf.reduce_any(x > 0, 1)], [row], rows),
    "EuclideanNorm": Case(lambda x: [tf.math.reduce_euclidean_norm(x, 0), tf.math.reduce_euclidean_norm(x, 1)], [row], rows),
    "L2Loss": Case(tf.nn.l2_loss, [row], rows),
    "ArgMax": Case(lambda x: [tf.argmax(x, 0), tf.argmax(x, 1)], [row], rows),
    "ArgMin": Case(lambda x: [tf.argmin(x, 0), tf.argmin(x, -1)], [row], rows),
    "Cumsum": Case(lambda x: [tf.cumsum(x, 0), tf.cumsum(x, 1), tf.cumsum(x, 0, True), tf.cumsum(x, -2, True, True)], [row], rows),
    "Cumprod": Case(lambda x: [tf.math.cumprod(x, 0), tf.math.cumprod(x, 1), tf.math.cumprod(x, 0, True, True)], [row], rows),
    "CumulativeLogsumexp": Case(lambda x: [tf.math.cumulative_logsumexp(x, 0), tf.math.cumulative_logsumexp(x, 1)], [row], rows),
    "Softmax": Case(lambda x: [tf.nn.softmax(x), tf.nn.softmax(x, 0)], [row], rows),
    "LogSoftmax": Case(lambda x: [tf.nn.log_softmax(x), tf.nn.log_softmax(x, 0)], [row], rows),
    "TopKV2": Case(lambda x: [*tf.math.top_k(x, 2), *tf.math.top_k(tf.transpose(x), 1)], [row], rows),
    "InTopKV2": Case(
        lambda x, y: tf.math.in_top_k(y, x, 2), [row, ("n",)], [[S(), S()], [S(), R], [R, S()]], [np.float32, np.int32]
    ),
    "SparseSoftmaxCrossEntropyWithLogits": Case(
        lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y),
        [row, ("n",)],
        [[S(), S()], [R, S()], [S(), R], [P, S()]],
        [np.float64, np.int64],
    ),
    "SoftmaxCrossEntropyWithLogits": Case(
        lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
        [row, row],
        [[S(), S()], [R, S()], [S(), R], [P, S()]],
    ),
    "Softmaxes of what the rows of a batch are to each other": Case(_compared, [row], [[S()]]),
    "BiasAddGrad": Case(lambda x: [raw.BiasAddGrad(out_backprop=x), raw.BiasAddGrad(out_backprop=tf.transpose(x))], [row], rows),
    "MatMul": Case(
        lambda x, y: [x @ y, tf.matmul(y, x, True, True)],
        [("n", 3), (3, 4)],
        [[S(), R], [P, R], [S(), P], [P, P], [R, P]],
    ),
    "MatMul of rows": Case(
        lambda x, y: [tf.matmul(x, y, transpose_a=True), tf.matmul(x, y, transpose_b=True)],
        [row, row],
        [[S(), S()], [S(), R], [R, S()], [P, S()]],
    ),
    "BatchMatMul": Case(lambda x, y: raw.BatchMatMul(x=x, y=y), [("n", 2, 3), ("n", 3, 4)], [[S(), S()], [R, S()], [P, R]]),
    "BatchMatMulV2": Case(
        lambda x, y: [x @ y, tf.matmul(x, x, transpose_a=True)], [("n", 2, 3), (1, 3, 4)], [[S(), R], [P, R], [S(), P]]
    ),
    "BatchMatMulV2 of columns": Case(lambda x, y: x @ y, [(2, "n", 3), (3, 4)], [[S(1), R], [P, R]]),
    "BatchMatMulV3": Case(
        lambda x, y: raw.BatchMatMulV3(x=x, y=y, Tout=tf.int32),
        [("n", 2, 3), ("n", 3, 4)],
        [[S(), S()]],
        [np.int32, np.int32],
    ),
    "Einsum": Case(
        lambda x, y: [
            tf.einsum("nab,nbc->nac", x, y),
            tf.einsum("nab,mbc->nm", x, y),
            tf.einsum("nab,nbc->ac", x, y),
            tf.einsum("nab,nbc->", x, y),
        ],
        [("n", 2, 3), ("n", 3, 2)],
        [[S(), S()], [R, S()], [S(), R], [P, R]],
    ),
    "Conv2D": Case(
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), [("n", 4, 4, 2), (3, 3, 2, 3)], [[S(), R], [P, R], [R, P], [S(), P]]
    ),
    "Conv2D of columns": Case(
        lambda x, w: tf.nn.conv2d(tf.transpose(x, [1, 0, 2, 3]), w, 1, "SAME"),
        [("n", 4, 4, 2), (3, 3, 2, 3)],
        [[S(), R]],
    ),
    "Conv3D": Case(lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), [("n", 3, 3, 3, 2), (2, 2, 2, 2, 3)], [[S(), R], [P, R]]),
    "DepthwiseConv2dNative": Case(
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [("n", 4, 4, 2), (3, 3, 2, 2)], [[S(), R], [P, R]]
    ),
    "Conv2DBackpropInput Conv2DBackpropFilter": Case(
        lambda x, w: _gradients(lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), x, w),
        [("n", 4, 4, 2), (3, 3, 2, 3)],
        [[S(), R], [R, S(3)]][:1],
    ),
    "Conv3DBackpropInputV2 Conv3DBackpropFilterV2": Case(
        lambda x, w: _gradients(lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), x, w),
        [("n", 3, 3, 3, 2), (2, 2, 2, 2, 3)],
        [[S(), R]],
    ),
    "DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter": Case(
        lambda x, w: _gradients(lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), x, w),
        [("n", 4, 4, 2), (3, 3, 2, 2)],
        [[S(), R]],
    ),
    "BiasAdd": Case(lambda x, b: tf.nn.bias_add(x, b), [row, (3,)], [[S(), R], [P, R], [P, P], [S(), P]]),
    "MaxPool MaxPoolGrad": Case(
        lambda x: _gradients(lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), x), [("n", 4, 4, 2)], [[S()], [P], [R]]
    ),
    "MaxPool3D MaxPool3DGrad": Case(
        lambda x: _gradients(lambda x: tf.nn.max_pool3d(x, 2, 2, "SAME"), x),
        [("n", 4, 4, 4, 2)],
        [[S()], [P]],
        [np.float32],
    ),
    "AvgPool AvgPoolGrad": Case(
        lambda x: _gradients(lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"), x), [("n", 4, 4, 2)], [[S()], [P]]
    ),
    "AvgPool3D AvgPool3DGrad": Case(
        lambda x: _gradients(lambda x: tf.nn.avg_pool3d(x, 2, 2, "SAME"), x),
        [("n", 4, 4, 4, 2)],
        [[S()], [P]],
        [np.float32],
    ),
    "LRN LRNGrad": Case(lambda x: _gradients(tf.nn.local_response_normalization, x), [("n", 4, 4, 2)], [[S()], [P]], [np.float32]),
    "ResizeBilinear ResizeBilinearGrad": Case(
        lambda x: _gradients(lambda x: raw.ResizeBilinear(images=x, size=[5, 5]), x),
        [("n", 4, 4, 2)],
        [[S()], [P]],
        [np.float32],
    ),
    "ResizeNearestNeighbor ResizeNearestNeighborGrad": Case(
        lambda x: _gradients(lambda x: raw.ResizeNearestNeighbor(images=x, size=[5, 5]), x),
        [("n", 4, 4, 2)],
        [[S()], [P]],
    ),
    "ResizeBicubic ResizeBicubicGrad": Case(
        lambda x: _gradients(lambda x: raw.ResizeBicubic(images=x, size=[5, 5]), x),
        [("n", 4, 4, 2)],
        [[S()], [P]],
        [np.float32],
    ),
    "ResizeArea": Case(lambda x: raw.ResizeArea(images=x, size=[5, 5]), [("n", 4, 4, 2)], [[S()], [P]], [np.float32]),
    "ScaleAndTranslate": Case(
        lambda x: raw.ScaleAndTranslate(images=x, size=[5, 5], scale=[1.0, 1.0], translation=[0.5, 0.0]),
        [("n", 4, 4, 2)],
        [[S()], [P]],
        [np.float32],
    ),
    "RGBToHSV": Case(lambda x: raw.RGBToHSV(images=x), [("n", 4, 4, 3)], [[S()], [P]]),
    "HSVToRGB": Case(lambda x: raw.HSVToRGB(images=x), [("n", 4, 4, 3)], [[S()], [P]]),
    "AdjustContrastv2": Case(
        lambda x: raw.AdjustContrastv2(images=x, contrast_factor=2.0), [("n", 4, 4, 3)], [[S()], [P]], [np.float32]
    ),
    "AdjustContrastv2 of one picture": Case(
        lambda x: raw.AdjustContrastv2(images=x, contrast_factor=2.0), [("n", 4, 3)], [[S()]], [np.float32]
    ),
    "AdjustSaturation": Case(lambda x: raw.AdjustSaturation(images=x, scale=2.0), [("n", 4, 4, 3)], [[S()], [P]], [np.float32]),
    "AdjustHue": Case(lambda x: raw.AdjustHue(images=x, delta=0.3), [("n", 4, 4, 3)], [[S()], [P]], [np.float32]),
    "DepthToSpace": Case(lambda x: tf.nn.depth_to_space(x, 2), [("n", 2, 2, 4)], [[S()], [P]]),
    "SpaceToDepth": Case(lambda x: tf.nn.space_to_depth(x, 2), [("n", 2, 2, 4)], [[S()], [P]]),
    "ExtractImagePatches": Case(
        lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1] * 4, [1] * 4, "SAME"), [("n", 4, 4, 2)], [[S()], [P]]
    ),
    "ExtractVolumePatches": Case(
        lambda x: tf.extract_volume_patches(x, [1, 2, 2, 2, 1], [1] * 5, "SAME"), [("n", 3, 3, 3, 2)], [[S()], [P]]
    ),
    "Dilation2D": Case(
        lambda x, w: raw.Dilation2D(input=x, filter=w, strides=[1] * 4, rates=[1] * 4, padding="SAME"),
        [("n", 4, 4, 2), (2, 2, 2)],
        [[S(), R], [P, R]],
    ),
    "ImageProjectiveTransformV3": Case(
        lambda x, t: raw.ImageProjectiveTransformV3(
            images=x, transforms=t, output_shape=[4, 4], fill_value=0.0, interpolation="BILINEAR", fill_mode="CONSTANT"
        ),
        [("n", 4, 4, 2), ("n", 8)],
        [[S(), S()], [S(), R]],
        [np.float32, np.float32],
    ),
    "MatrixInverse": Case(lambda x: tf.linalg.inv(x + 9 * tf.eye(3, dtype=x.dtype)), [("n", 3, 3)], [[S()], [P]]),
    "Cholesky": Case(
        lambda x: tf.linalg.cholesky(x @ tf.linalg.matrix_transpose(x) + tf.eye(3, dtype=x.dtype)),
        [("n", 3, 3)],
        [[S()]],
    ),
    "FFT IFFT RFFT IRFFT": Case(
        lambda x: [
            tf.abs(tf.signal.fft(tf.cast(x, tf.complex128))),
            tf.signal.irfft(tf.signal.rfft(x)),
            tf.math.real(tf.signal.ifft(tf.transpose(tf.cast(x, tf.complex128)))),
        ],
        [("n", 4)],
        [[S()], [P]],
    ),
    "FFT2D FFT3D IFFT2D IFFT3D RFFT2D IRFFT2D": Case(
        lambda x: [
            tf.abs(tf.signal.fft2d(tf.signal.ifft2d(tf.cast(x, tf.complex128)))),
            tf.abs(tf.signal.fft3d(tf.cast(x, tf.complex128))),
            tf.abs(tf.signal.ifft3d(tf.cast(x[:, None], tf.complex128))),
            tf.signal.irfft2d(tf.signal.rfft2d(x)),
        ],
        [("n", 4, 4)],
        [[S()], [P]],
    ),
    "LogMatrixDeterminant": Case(lambda x: tf.linalg.slogdet(x + 9 * tf.eye(3, dtype=x.dtype)), [("n", 3, 3)], [[S()]]),
    "MatrixSolve MatrixTriangularSolve Cross": Case(
        lambda x, y: [
            tf.linalg.solve(x + 9 * tf.eye(3, dtype=x.dtype), y),
            tf.linalg.triangular_solve(x + 9 * tf.eye(3, dtype=x.dtype), y),
            tf.linalg.cross(x, y),
        ],
        [("n", 3, 3), ("n", 3, 3)],
        [[S(), S()], [P, S()], [S(), P]],
    ),
    "MatrixTriangularSolve of one matrix": Case(
        lambda x, y: [
            raw.MatrixTriangularSolve(matrix=x + 9 * tf.eye(3, dtype=x.dtype), rhs=y),
            raw.MatrixTriangularSolve(matrix=y + 9 * tf.eye(3, dtype=x.dtype), rhs=x),
        ],
        [("n", 3, 3), (3, 3)],
        [[S(), R], [P, R], [S(), P]],
    ),
    "Qr Svd SelfAdjointEigV2 Eig": Case(
        lambda x: [
            tf.abs(tf.linalg.qr(x)[1]),
            tf.linalg.svd(x, compute_uv=False),
            tf.linalg.eigvalsh(x @ tf.linalg.matrix_transpose(x)),
            tf.sort(tf.abs(tf.linalg.eigvals(x)), axis=-1),
        ],
        [("n", 3, 3)],
        [[S()]],
    ),
    "DenseBincount": Case(
        lambda x, w: [
            tf.math.bincount(x, minlength=4, maxlength=4, axis=-1),
            tf.math.bincount(x, w, minlength=4, maxlength=4, axis=-1),
            tf.math.bincount(tf.reshape(x, [-1]), minlength=4, maxlength=4),
            tf.math.bincount(tf.reshape(x, [-1]), tf.reshape(w, [-1]), minlength=4, maxlength=4),
            tf.math.bincount(tf.reshape(x, [-1]), minlength=4, maxlength=4, binary_output=True),
        ],
        [("n", 3), ("n", 3)],
        [[S(), S()], [S(), R]],
        [np.int32, np.float32],
    ),
    "LowerBound UpperBound": Case(
        lambda x, y: [
            each
            for side in ("left", "right")
            for each in (
                tf.searchsorted(tf.sort(x), y, side),
                tf.searchsorted([[-1.0, 0.0, 1.0]], tf.cast(tf.reshape(y, [1, -1]), tf.float32), side),
                tf.searchsorted(tf.sort(tf.transpose(x)), tf.transpose(y), side),
            )
        ],
        [row, row],
        [[S(), S()], [S(), R], [R, S()]],
    ),
    "MatrixSetDiagV3": Case(
        lambda x, y: [tf.linalg.set_diag(x, y), tf.linalg.set_diag(x, y[:, :2], k=1)],
        [("n", 3, 3), ("n", 3)],
        [[S(), S()], [P, S()], [S(), P], [R, S()]],
    ),
    "MatrixDeterminant": Case(tf.linalg.det, [("n", 3, 3)], [[S()], [P]]),
    "MatrixDiagV3": Case(tf.linalg.diag, [row], [[S()], [P]]),
    "MatrixDiagV3 of rows": Case(tf.linalg.diag, [("n",)], [[S()], [P]]),
    "MatrixDiagPartV3": Case(tf.linalg.diag_part, [("n", 3, 3)], [[S()], [P]]),
    "MatrixBandPart": Case(lambda x: tf.linalg.band_part(x, 1, 0), [("n", 3, 3)], [[S()], [P]]),
    "MatrixBandPart of rows": Case(lambda x: tf.linalg.band_part(x, 1, 0), [("n", 3)], [[S()], [P]]),
    "Shape ShapeN Size Rank Const": Case(
        lambda x, y: [tf.shape(x), *tf.shape_n([x, y]), tf.size(y), tf.rank(x), tf.cast(tf.shape(x)[0], x.dtype) * x],
        [row, ("n", 2)],
        [[S(), S()], [S(), P]],
    ),
    "BroadcastGradientArgs BroadcastTo": Case(
        lambda x, y: _gradients(lambda x, y: x * y + y, x, y), [row, (1, 3)], [[S(), R], [P, R], [S(), P]]
    ),
    "BroadcastGradientArgs of bias": Case(lambda x, y: _gradients(lambda x, y: x - y, x, y), [row, (3,)], [[S(), R], [S(), P]]),
    "Transpose": Case(lambda x: tf.transpose(x, [2, 0, 1]), [("n", 3, 2)], [[S()], [P], [R]]),
    "ConjugateTranspose": Case(lambda x: tf.transpose(x, [1, 0], conjugate=True), [row], [[S()], [P]]),
    "ExpandDims": Case(lambda x: [x[:, None] * 2, tf.expand_dims(x, 0), tf.expand_dims(x, -1)], [row], rows),
    "Squeeze": Case(lambda x: [tf.squeeze(x, 1), tf.squeeze(x, -1)], [("n", 1, 3, 1)], [[S()], [P]]),
    "Reshape": Case(
        lambda x: [
            tf.reshape(x, [-1, 6]),
            tf.reshape(x, [-1]),
            tf.reshape(x, [-1, 2]),
            tf.reshape(x, [tf.shape(x)[0], 6]),
            tf.reshape(x, [1, -1, 3, 2]),
            tf.reshape(tf.reshape(x, [-1, 2]) * 2, tf.shape(x)),
            tf.reshape(tf.reshape(x, [-1]), [-1, 3]),
            tf.reshape(x, [3, -1]),
        ],
        [("n", 3, 2)],
        [[S()], [P], [R]],
    ),
    "Reshape of rows and rows": Case(
        lambda x, y: [
            tf.tensordot(x, y, [[1], [1]]),
            tf.reshape(tf.reshape(x[:, None] * y[None], [-1]), [tf.shape(x)[0], tf.shape(y)[0], 3]),
            tf.reshape(x[:, 0], [-1, tf.shape(x)[0]]),
        ],
        [("n", 3), ("n", 3)],
        [[S(), S()], [P, S()]],
    ),
    "Reshape of columns": Case(
        lambda x: [tf.reshape(x, [-1, 2]), tf.reshape(x, [3, -1]), tf.reshape(x, [3, -1, 2, 1])],
        [(3, "n", 2)],
        [[S(1)]],
    ),
    "Fill": Case(
        lambda x: [tf.fill([tf.shape(x)[0], 3], 2.0) * x, tf.zeros_like(x) + x, tf.ones([tf.shape(x)[0]], x.dtype)],
        [row],
        rows,
        [np.float32],
    ),
    "BroadcastTo": Case(lambda x, y: tf.broadcast_to(y, [tf.shape(x)[0], 2, 3]), [row, (1, 3)], [[S(), R], [S(), P]]),
    "BroadcastTo of rows": Case(
        lambda x: [tf.broadcast_to(x[:, None], [tf.shape(x)[0], 2, 3]), tf.broadcast_to(x, [2, tf.shape(x)[0], 3])],
        [row],
        rows,
    ),
    "Tile": Case(lambda x: [tf.tile(x, [1, 2]), tf.tile(x, [2, 1]), tf.tile(x[:1], [tf.shape(x)[0], 1])], [row], rows),
    "Pad": Case(lambda x: [tf.pad(x, [[0, 0], [1, 2]]), tf.pad(x, [[1, 0], [0, 0]])], [row], rows),
    "PadV2": Case(
        lambda x: [tf.pad(x, [[0, 0], [1, 2]], constant_values=7.0), tf.pad(x, [[1, 0], [0, 0]], constant_values=7.0)],
        [row],
        rows,
    ),
    "MirrorPad MirrorPadGrad": Case(lambda x: _gradients(lambda x: tf.pad(x, [[0, 0], [1, 2]], "REFLECT"), x), [row], rows),
    "ReverseV2": Case(lambda x: [tf.reverse(x, [1]), tf.reverse(x, [0])], [row], rows),
    "Roll": Case(lambda x: [tf.roll(x, 1, 1), tf.roll(x, 1, 0), tf.roll(x, [1, 1], [0, 1])], [row], rows),
    "Split": Case(lambda x: [*tf.split(x, 3, 1)], [row], rows),
    "SplitV": Case(lambda x: [*tf.split(x, [1, 2], 1), *tf.split(x, [tf.shape(x)[0] - 1, 1], 0)], [row], rows),
    "Unpack": Case(lambda x: tf.unstack(x, axis=1), [row], rows),
    "Pack": Case(
        lambda x, y: [tf.stack([x, y]), tf.stack([x, y], 1), tf.stack([x, y], -1)],
        [row, row],
        [[S(), S()], [S(), R], [P, R], [S(), P], [P, P]],
    ),
    "ConcatV2": Case(
        lambda x, y: [
            tf.concat([x, y], 1),
            tf.concat([x, y], 0),
            *_gradients(lambda x, y: tf.nn.relu(tf.concat([x, y, x], 0)), x, y),
            tf.reduce_mean(tf.concat([x, y[:1]], 0)),
        ],
        [row, row],
        [[S(), S()], [S(), R], [P, R], [S(), P]],
    ),
    "StridedSlice StridedSliceGrad": Case(
        lambda x: [
            *_gradients(lambda x: x[:, 1:], x),
            *_gradients(lambda x: x[:, 1], x),
            *_gradients(lambda x: x[..., ::2], x),
            *_gradients(lambda x: x[1:], x),
            *_gradients(lambda x: x[:, None, 0], x),
            *_gradients(lambda x: x[::-1], x),
            *_gradients(lambda x: x[: tf.shape(x)[0]], x),
            x[-1],
        ],
        [row],
        rows,
    ),
    "StridedSlice of views": Case(
        lambda x: [
            each
            for both in [tf.concat([x, 1.0 - x], 0), tf.reshape(tf.stack([x, 1.0 - x], 1), [-1, 3])]
            for n in [tf.shape(x)[0]]
            for each in [both[:n], both[n:], both[n : 2 * n] * x, both[:n] + both[n:], both[1:n], both[n : n + n : 2]]
        ],
        [row],
        rows,
    ),
    "StridedSlice StridedSliceGrad of views": Case(
        lambda x: _gradients(lambda x: tf.reshape(tf.stack([x, x * x], 1), [-1, 3])[: tf.shape(x)[0]], x), [row], rows
    ),
    "StridedSlice of one row": Case(lambda x: [x[0], x[-1, 1:], x[:, None][0], tf.reshape(x, [-1])[0], x[0][0]], [row], rows),
    "StridedSlice of columns": Case(lambda x: [x[1:], x[0], x[:, :1], x[..., None]], [(3, "n")], [[S(1)]]),
    "Slice": Case(
        lambda x: [tf.slice(x, [0, 1], [-1, 2]), tf.slice(x, [0, 0], [tf.shape(x)[0], 2]), tf.slice(x, [0, 0], [1, 2])],
        [row],
        rows,
    ),
    "Range": Case(lambda x: [tf.range(tf.shape(x)[0]), tf.range(1, 5, 2), *_gradients(_contrasted, x)], [row], rows),
    "GatherV2": Case(
        lambda t, i: [tf.gather(t, i), tf.gather(t, i, axis=1)],
        [(3, 3), ("n", 2)],
        [[R, S()], [P, R], [P, S()]],
        [np.float64, np.int32],
    ),
    "GatherV2 of rows": Case(
        lambda x, i: [tf.gather(x, i), tf.gather(x, i, axis=1), tf.gather(x, i[0], axis=1)],
        [row, (2, 2)],
        [[S(), R], [P, R]],
        [np.float64, np.int32],
        high=1,
    ),
    "GatherV2 of some rows": Case(
        lambda x, i: [
            tf.gather(x, i),
            tf.gather(tf.transpose(x), i, axis=1),
            tf.gather(x, i[0, 0]),
            tf.gather(x, tf.range(tf.shape(x)[0])) * 2,
            tf.gather(x, tf.range(tf.shape(x)[0])[::-1]),
            tf.gather(x, tf.range(tf.shape(x)[0])[:, None]),
            tf.gather(x, tf.range(tf.shape(x)[0] - 1)),
            tf.gather(tf.transpose(x), tf.range(tf.shape(x)[0]), axis=1),
            tf.gather(x, tf.range(3)[:1]),
            tf.gather(tf.as_string(x), [0]),
        ],
        [row, (2, 2)],
        [[S(), R], [P, R], [R, R]],
        [np.float64, np.int32],
        high=1,
    ),
    "GatherNd": Case(
        lambda t, i: [tf.gather_nd(t, i), tf.gather_nd(tf.transpose(t), [[1], [0]]), tf.gather_nd(t, i[:, None] * 0)],
        [(3, 3), ("n", 2)],
        [[R, S()], [P, R], [P, S()]],
        [np.float64, np.int32],
    ),
    "GatherNd of rows": Case(
        lambda x, i: [tf.gather_nd(tf.transpose(x), [[1], [0]]), tf.gather_nd(x[:, None], i), tf.gather_nd(x, i)],
        [row, ("n", 2)],
        [[S(), S()], [S(), R], [P, R]],
        [np.float64, np.int32],
        high=1,
    ),
    "Where": Case(
        lambda x, i: [tf.where(x > 0.0), tf.boolean_mask(x, i > 1), tf.boolean_mask(x, x > 0.0), tf.where(i > 1)],
        [row, ("n",)],
        [[S(), S()], [S(), R]],
        [np.float64, np.int32],
    ),
    "DynamicPartition": Case(
        lambda x, i: tf.dynamic_partition(x, i, 3),
        [row, ("n",)],
        [[S(), S()], [S(), R], [R, S()]],
        [np.float64, np.int32],
    ),
    "GatherV2 by rows": Case(
        lambda x, i: tf.gather(x, i, batch_dims=1),
        [row, ("n", 2)],
        [[S(), S()], [S(), R], [P, S()]],
        [np.float64, np.int32],
    ),
    "OneHot": Case(
        lambda i: [tf.one_hot(i, 3), tf.one_hot(i, 3, axis=0), tf.one_hot(i, 3, axis=1)],
        [("n", 2)],
        [[S()], [R]],
        [np.int32],
    ),
    "UnsortedSegmentSum": Case(
        lambda x, i: tf.math.unsorted_segment_sum(x, i, 3),
        [row, ("n",)],
        [[S(), S()], [P, R], [S(), R]],
        [np.float64, np.int32],
    ),
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd": Case(
        lambda x, i: [
            tf.math.unsorted_segment_max(x, i, 3),
            tf.math.unsorted_segment_min(x, i, 3),
            tf.math.unsorted_segment_prod(x, i, tf.shape(x)[0]),
        ],
        [row, ("n",)],
        [[S(), S()], [P, R], [S(), R], [P, S()]],
        [np.float64, np.int32],
        high=1,
    ),
    "ScatterNd": Case(
        lambda i, x: tf.scatter_nd(i, x, [3, 3]),
        [("n", 1), row],
        [[S(), S()], [R, P], [R, S()]],
        [np.int32, np.float64],
    ),
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate": Case(
        lambda x, y, w: [
            *_scattered_into(tf.transpose(x), [[2], [0]], tf.transpose(y)[:2]),
            *_scattered_into(tf.transpose(x)[:, None], [[2, 0], [0, 0]], tf.transpose(y)[:2]),
            *_scattered_into(tf.zeros([3, tf.shape(x)[0]], x.dtype), [[1]], tf.transpose(y)[:1]),
            *_scattered_into(x, [[0]], y[:1]),
            *_scattered_into(x, [[0, 1]], w[0, :1]),
            *_scattered_into(w, tf.cast(x[:, :1] > 0, tf.int32), y)[:2],
        ],
        [row, row, (3, 3)],
        [[S(), S(), R], [P, S(), R], [S(), P, R], [S(), R, P], [R, S(), P]],
    ),
    "Empty": Case(lambda x: [raw.Empty(shape=[tf.shape(x)[0], 3], dtype=x.dtype, init=True) + x, x[:, 0] * 2], [row], rows),
    "Identity StopGradient IdentityN PreventGradient Snapshot Neg Conj Real Imag": Case(
        lambda x: [
            tf.identity(x),
            tf.stop_gradient(x),
            *tf.identity_n([x, -x]),
            raw.PreventGradient(input=x),
            raw.Snapshot(input=x),
            tf.math.conj(x),
            tf.math.real(tf.complex(x, x)),
            tf.math.imag(tf.complex(x, x)),
            tf.math.conj(tf.complex(x, x)),
        ],
        [row],
        rows,
    ),
    "EnsureShape": Case(lambda x: tf.ensure_shape(x, [None, 3]) * 2, [row], rows),
    "Cast": Case(lambda x: [tf.cast(x, tf.float64), tf.cast(x, tf.int32), tf.cast(x, tf.float16)], [row], rows, [np.float32]),
    "PartitionedCall StatefulPartitionedCall": Case(
        lambda x, y: tf.function(lambda x, y: [x * y, tf.reduce_sum(x, 0), tf.reduce_max(y)])(x, y),
        [row, row],
        [[S(), S()], [P, R]],
    ),
    "sums": Case(
        lambda x, y: [
            x + y,
            x - y,
            tf.add_n([x, y]),
            x * 2.0 + y / 3.0,
            raw.Add(x=x, y=y),
            tf.where(x > 0, x, y),
            x + 1.0,
        ],
        [row, row],
        [[S(), S()], [P, P], [P, R], [R, P], [S(), P], [P, S()]],
    ),
    "FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient": Case(
        lambda x, low, high: [
            *_gradients(_quantized, x, -tf.abs(low), tf.abs(high)),
            *_gradients(_quantized, tf.transpose(x), -tf.abs(low), tf.abs(high)),
        ],
        [row, (), ()],
        [[S(), R, R], [P, R, R], [S(), P, R], [R, P, R]],
        [np.float32] * 3,
    ),
    "FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient": Case(
        lambda x, low, high: [
            *_gradients(_quantized_by_channel, x, -tf.abs(low), tf.abs(high)),
            *_gradients(_quantized_by_channel, x[:, None], -tf.abs(low), tf.abs(high)),
        ],
        [row, (3,), (3,)],
        [[S(), R, R], [P, R, R], [S(), R, P], [R, R, P]],
        [np.float32] * 3,
    ),
    "FakeQuantWithMinMaxVarsPerChannel of columns": Case(
        lambda x, low, high: _quantized_by_channel(tf.transpose(x), x[:, 0] - tf.abs(low[0]), x[:, 0] + tf.abs(high[0])),
        [row, (3,), (3,)],
        [[S(), R, R]],
        [np.float32] * 3,
    ),
    "Select": Case(
        lambda x, y: [
            raw.Select(condition=x > 0, x=x, y=y),
            raw.Select(condition=x[:, 0] > 0, x=x, y=y),
            raw.Select(condition=tf.reduce_sum(x) > 0, x=x, y=y),
            raw.Select(condition=y[0] > 0, x=tf.transpose(x), y=tf.transpose(y)),
        ],
        [row, row],
        [[S(), S()], [P, S()], [S(), R], [R, S()]],
    ),
    "one row for all": Case(lambda x, y: [x * y, x + y[:, :1]], [row, (1, 3)], [[S(), R], [S(), P], [P, R]]),
    "columns": Case(lambda x, y: [x * y, x + y[:1]], [("n", "n"), ("n", "n")], [[S(), S(1)], [S(1), S(1)], [S(), R]]),
    "Sub Mul SelectV2 of rows and rows": Case(
        lambda x, y: [
            *_gradients(lambda x, y: x[:, None] - y[None], x, y),
            x[:, None] * y[None, :, :1],
            tf.where(x[None, :, 0] > y[:, :1], x[:, :1], y[None, :, 0]),
        ],
        [row, row],
        [[S(), S()], [P, S()], [S(), R]],
    ),
}

_UNKNOWN = {
    "FFT": Case(lambda x: tf.signal.fft(tf.cast(tf.transpose(x), tf.complex128)), [row], [[S()]]),
    "a convolution over a transposed batch": Case(
        lambda x: tf.nn.conv1d(tf.transpose(x)[..., None], tf.ones([3, 1, 1], x.dtype), 1, "SAME"), [row], [[S()]]
    ),
    "a dilated depthwise convolution": Case(
        lambda x, w: _gradients(lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME", dilations=[2, 2]), x, w),
        [("n", 6, 6, 2), (3, 3, 2, 2)],
        [[S(), R], [P, R]],
    ),
    "Softmax over the batch": Case(lambda x: tf.nn.softmax(tf.transpose(x)), [row], [[S()]]),
    "Sort": Case(lambda x: tf.sort(x, 0), [row], [[S()]]),
    "Unique": Case(lambda x: tf.unique(x)[0], [("n",)], [[S()]], [np.int32]),
    "Where": Case(lambda x: tf.where(x > 0), [row], [[S()]]),
    "a loop": Case(
        lambda x: tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 0.5 + tf.reduce_mean(v, 0)), [tf.constant(0), x])[1],
        [row],
        [[S()], [P]],
    ),
    "a branch": Case(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - tf.reduce_mean(x)), [row], [[S()], [P]]),
}
"""What mixes rows, or is not known."""


def _scattered_into(tensor: Any, indices: Any, updates: Any) -> list[Any]:
    given = {"tensor": tensor, "indices": indices, "updates": updates}
    kinds = raw.TensorScatterAdd, raw.TensorScatterSub, raw.TensorScatterMax, raw.TensorScatterMin, raw.TensorScatterUpdate
    return [scatter(**given) for scatter in kinds]


_quantized = tf.quantization.fake_quant_with_min_max_vars
_quantized_by_channel = tf.quantization.fake_quant_with_min_max_vars_per_channel


def _gradients(function: Callable[..., Any], *inputs: tf.Tensor) -> list[Any]:
    """Returns the value of a function, and the gradients of a sum that weighs each element by another number."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = function(*inputs)
        weighed = tf.reduce_sum(value * tf.sin(value * 3.0))
    return [value, *tape.gradient(weighed, inputs)]


def _values(case: Case, total: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(3)
    values = []
    for i, shape in enumerate(case.shapes):
        dtype = np.dtype(case.dtypes[i] if i < len(case.dtypes) else np.float64)
        size = [total if d == "n" else d for d in shape]
        if dtype.kind == "f":
            values.append(drawn.normal(size=size).astype(dtype))
        else:
            values.append(drawn.integers(case.low, case.high, size).astype(dtype))
    return values


def tries(case: Case, splits: Sequence[tuple[int, ...]] = _SPLITS) -> Iterator[tuple[Any, ...]]:
    """Yields the function of a case, values, their placements, how many rows each replica has, and whether that number is open."""
    ways = [(counts, True) for counts in splits] + [(splits[0], False)]
    for (counts, is_open), placements in itertools.product(ways, case.placements):
        yield case.function, _values(case, sum(counts)), placements, counts, is_open


def _tolerance(case: Case) -> float:
    return 1e-5 if any(np.dtype(d) == np.float32 for d in case.dtypes) else 1e-12


@pytest.mark.parametrize("name", [*CASES, *_UNKNOWN])
def test_an_operation_in_parts_is_the_operation(name: str) -> None:
    case = {**CASES, **_UNKNOWN}[name]
    for each in tries(case):
        worst, _, _ = differences(*each)
        assert worst <= _tolerance(case), each[2:]


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Angle": {"Tout": tf.float64},
    "Bitcast": {"type": tf.int64},
    "Bucketize": {"boundaries": [0.0]},
    "CheckNumerics": {"message": ""},
    "Complex": {"Tout": tf.complex128},
    "ComplexAbs": {"Tout": tf.float64},
    "RegexFullMatch": {"pattern": "a"},
    "RegexReplace": {"pattern": "a", "rewrite": "b"},
    "StaticRegexFullMatch": {"pattern": "a"},
    "StaticRegexReplace": {"pattern": "a", "rewrite": "b"},
    "StringToHashBucketFast": {"num_buckets": 5},
}
"""What an operation on elements needs beside its operands."""


def _operands(kind: str) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """Returns an operation on elements as a function, and operands of the first dtypes that it takes."""
    definition = operation_definition(kind)
    given = dict(_ATTRIBUTES.get(kind, {}))
    chosen: dict[str, Any] = {}
    for attr in definition.attr:
        if attr.type == "type" and attr.name not in given:
            allowed = [tf.as_dtype(d) for d in attr.allowed_values.list.type] or [tf.float64]
            chosen[attr.name] = next(
                (d for d in (tf.float64, tf.float32, tf.int32, tf.complex128, tf.bool, tf.string) if d in allowed),
                allowed[0],
            )
    names, values = [], []
    drawn = np.random.default_rng(4)
    for arg in definition.input_arg:
        if arg.name in given:
            continue
        dtype = tf.as_dtype(arg.type) if arg.type else chosen[arg.type_attr]
        numbers = drawn.uniform(1, 2, [5, 3])
        if dtype == tf.string:
            value = np.array(
                [[b"1", b"22", b"ab", b"a"][int(n) % 2 : 1 + int(n) % 2][0] for n in (numbers * 9).ravel()], object
            ).reshape(5, 3)
        elif dtype.is_bool:
            value = numbers > 1.5
        else:
            value = (numbers * (3 if dtype.is_integer else 1)).astype(dtype.as_numpy_dtype)
        names.append(arg.name)
        values.append(value)

    def function(*operands: Any) -> Any:
        if kind == "AddN":
            return tf.raw_ops.AddN(inputs=[*operands, *operands])
        return getattr(tf.raw_ops, kind)(**dict(zip(names, operands, strict=True)), **given)

    return function, values


_ELEMENTWISE = sorted(kind for kind, found in planner.RULES.items() if found is elementwise.elementwise)


@pytest.mark.parametrize("kind", [k for k in _ELEMENTWISE if hasattr(tf.raw_ops, k)])
def test_an_operation_on_elements(kind: str) -> None:
    function, values = _operands(kind)
    every = [
        [S()] * len(values),
        *([R if i != j else S() for j in range(len(values))] for i in range(len(values)) if len(values) > 1),
    ]
    if all(v.dtype.kind == "f" for v in values) and kind != "Bitcast":
        every += [[P if i == j else R for j in range(len(values))] for i in range(len(values))]
    for placements in every:
        worst, step, _ = differences(function, values, placements, (3, 2), is_open=False)
        assert worst <= (2e-6 if any(v.dtype == np.float32 for v in values) else 1e-9), placements
        if any(isinstance(p, Shard) for p in placements):
            assert not step.without_rule, "rows stay rows"


@pytest.mark.lane("quick")
def test_every_rule_has_a_case() -> None:
    named = {kind for name in CASES for kind in name.split()} | set(_ELEMENTWISE)
    assigned = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
    elsewhere = {"VariableShape", "ReadVariableOp", "ResourceGather", "LookupTableFindV2"} | assigned
    drawn = {kind for kind in planner.RULES if "Random" in kind or "TruncatedNormal" in kind or kind.startswith("Stateful")}
    rooms = {module.__name__ for module in (control_flow, lists)}  # See test_control_flow.py.
    of_control_flow = {kind for kind, found in planner.RULES.items() if found.__module__ in rooms}
    of_marks = {planner.MARKED, planner.OF_OWN, planner.OF_PARTS}  # See test_marks.py and test_parts.py.
    of_data = {"MakeIterator"}  # See tests/strategies/test_partitioned_functions.py: its loops over data sets.
    of_layouts = {"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"}  # See test_distribution.py.
    missing = planner.RULES.keys() - named - elsewhere - drawn - of_control_flow - of_marks - of_data - of_layouts
    assert not missing, f"add a case to CASES, whose name has the type: {sorted(missing)}"


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_rule_is_found(name: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are seen by a reader that asks for them whole, so that a wrong placement gives a wrong result or an error."""
    changed, was_changed = mutated(monkeypatch, MUTATIONS[mutation], None if name == "sums" else name.split()), False
    for each in tries(CASES[name]):
        changed.clear()
        try:
            worst, _, _ = differences(*each)
        except Exception:
            return
        was_changed = was_changed or bool(changed) and sum(each[3]) != 1
        if worst > max(1e-9, _tolerance(CASES[name])):
            return
    assert not was_changed
