"""Every operation of `keras.ops` on a row and on no rows: the parts of two replicas that share a batch of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("rows")

HERE = {name for name in dir(ops) if inspect.isroutine(getattr(ops, name))}
"""The operations of the installed Keras; an older one has some fewer than stand below."""


def _names(text: str) -> list[str]:
    return [name for name in text.split() if name in HERE]


_rng = np.random.RandomState(0)
_F = tf.constant(_rng.uniform(0.1, 0.9, (1, 4, 4)), tf.float32)
_I = tf.constant(_rng.randint(1, 4, (1, 4, 4)), tf.int32)
_B = tf.constant(_rng.uniform(size=(1, 4, 4)) > 0.5)
_IMAGE = tf.constant(_rng.uniform(size=(1, 8, 8, 3)), tf.float32)
_SIGNAL = tf.constant(_rng.uniform(size=(1, 64)), tf.float32)
_MATRIX = tf.linalg.matmul(_F, _F, transpose_b=True) + 4 * tf.eye(4)
_COMPLEX = (_SIGNAL, _SIGNAL)

_OF_ONE = _names(
    """
    abs absolute angle arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil celu conj conjugate copy cos cosh deg2rad elu erf
    erfc erfinv exp exp2 expm1 fabs fliplr flipud floor gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh i0 imag
    isfinite isinf isnan isneginf isposinf isreal leaky_relu log log10 log1p log2 log_sigmoid log_softmax logical_not nan_to_num
    negative normalize ones_like rad2deg ravel real reciprocal relu relu6 round rsqrt selu sigmoid sign signbit silu sin sinc
    sinh soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid sparsemax sqrt square squareplus stop_gradient swish
    tan tanh tanh_shrink tril triu trunc zeros_like array convert_to_tensor
    """
)
_ALONG_AN_AXIS = _names(
    """
    all any amax amin argmax argmin argsort average count_nonzero cumprod cumsum diff flip logsumexp max mean median min
    nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar norm prod ptp sort std
    sum trapezoid var layer_normalization rms_normalization unstack expand_dims
    """
)
_OF_TWO = _names(
    """
    add allclose arctan2 divide divide_no_nan dot equal floor_divide fmax fmin fmod greater greater_equal heaviside hypot inner
    isclose less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor matmul maximum minimum mod multiply
    nextafter not_equal outer polar power subtract true_divide vdot binary_crossentropy categorical_crossentropy cdist isin
    """
)
_OF_TWO_WHOLE = _names(
    """
    bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm left_shift right_shift
    """
)

Call = tuple[Callable[..., Any], tuple[tf.Tensor, ...]]
_CALLS: dict[str, Call] = {
    **{name: (getattr(ops, name), (_F,)) for name in _OF_ONE},
    **{name: (lambda x, name=name: getattr(ops, name)(x, axis=-1), (_F,)) for name in _ALONG_AN_AXIS},
    **{name: (getattr(ops, name), (_F, _F)) for name in _OF_TWO},
    **{name: (getattr(ops, name), (_I, _I)) for name in _OF_TWO_WHOLE},
    "append": (lambda x, y: ops.append(x, y, -1), (_F, _F)),
    "array_split": (lambda x: ops.array_split(x, 3, axis=1), (_F,)),
    "associative_scan": (lambda x: ops.associative_scan(ops.add, x, axis=1), (_F,)),
    "adaptive_average_pool": (lambda x: ops.adaptive_average_pool(x, 4, data_format="channels_last"), (_IMAGE,)),
    "adaptive_max_pool": (lambda x: ops.adaptive_max_pool(x, 4, data_format="channels_last"), (_IMAGE,)),
    "average_pool": (lambda x: ops.average_pool(x, 2), (_IMAGE,)),
    "batch_normalization": (lambda x: ops.batch_normalization(x, tf.zeros(4), tf.ones(4), -1), (_F,)),
    "bincount": (lambda x: ops.bincount(x[:, 0], minlength=5), (_I,)),
    "bitwise_invert": (ops.bitwise_invert, (_I,)),
    "bitwise_not": (ops.bitwise_not, (_I,)),
    "cast": (lambda x: ops.cast(x, "int32"), (_F,)),
    "cholesky": (ops.cholesky, (_MATRIX,)),
    "cholesky_inverse": (lambda x: ops.cholesky_inverse(ops.cholesky(x)), (_MATRIX,)),
    "clip": (lambda x: ops.clip(x, 0.2, 0.4), (_F,)),
    "concatenate": (lambda x, y: ops.concatenate([x, y], -1), (_F, _F)),
    "conv": (lambda x: ops.conv(x, tf.ones([3, 3, 3, 2]), padding="same"), (_IMAGE,)),
    "conv_transpose": (lambda x: ops.conv_transpose(x, tf.ones([3, 3, 2, 3]), 2), (_IMAGE,)),
    "cross": (lambda x, y: ops.cross(x[..., :3], y[..., :3]), (_F, _F)),
    "ctc_decode": (lambda x, n: ops.ctc_decode(x, n[:, 0, 0]), (_F, _I)),
    "ctc_loss": (lambda y, x: ops.ctc_loss(y[:, 0, :2], x, y[:, 1, 0] * 0 + 1, y[:, 1, 0] * 0 + 4), (_I, _F)),
    "depth_to_space": (lambda x: ops.depth_to_space(ops.concatenate([x] * 4, -1), 2), (_IMAGE,)),
    "depthwise_conv": (lambda x: ops.depthwise_conv(x, tf.ones([3, 3, 3, 1])), (_IMAGE,)),
    "det": (ops.det, (_MATRIX,)),
    "diagonal": (lambda x: ops.diagonal(x, axis1=1, axis2=2), (_F,)),
    "digitize": (lambda x: ops.digitize(x, [0.3, 0.6]), (_F,)),
    "dot_product_attention": (lambda x: ops.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None]), (_F,)),
    "dsplit": (lambda x: ops.dsplit(x, 2), (_F,)),
    "dstack": (lambda x, y: ops.dstack([x, y]), (_F, _F)),
    "eigh": (lambda x: ops.eigh(x)[0], (_MATRIX,)),
    "einsum": (lambda x, y: ops.einsum("bij,bjk->bik", x, y), (_F, _F)),
    "extract_sequences": (lambda x: ops.extract_sequences(x, 8, 4), (_SIGNAL,)),
    "fft": (lambda *x: ops.fft(x), _COMPLEX),
    "fft2": (lambda x, y: ops.fft2((x, y)), (_F, _F)),
    "fold": (lambda x: ops.fold(x, (4, 4), 2, stride=2), (_F,)),
    "full_like": (lambda x: ops.full_like(x, 2.0), (_F,)),
    "get_item": (lambda x: ops.get_item(x, (slice(None), 1)), (_F,)),
    "hsplit": (lambda x: ops.hsplit(x, 2), (_F,)),
    "hstack": (lambda x, y: ops.hstack([x, y]), (_F, _F)),
    "ifft2": (lambda x, y: ops.ifft2((x, y)), (_F, _F)),
    "in_top_k": (lambda y, x: ops.in_top_k(y[:, 0, 0], x[:, 0], 2), (_I, _F)),
    "inv": (ops.inv, (_MATRIX,)),
    "irfft": (lambda *x: ops.irfft(x), _COMPLEX),
    "istft": (lambda x: ops.istft(ops.stft(x, 16, 8, 16), 16, 8, 16), (_SIGNAL,)),
    "ldexp": (lambda x, i: ops.ldexp(x, i), (_F, _I)),
    "logdet": (ops.logdet, (_MATRIX,)),
    "map": (lambda x: ops.map(lambda row: row * 2, x), (_F,)),
    "max_pool": (lambda x: ops.max_pool(x, 2), (_IMAGE,)),
    "moments": (lambda x: ops.moments(x, [-1]), (_F,)),
    "moveaxis": (lambda x: ops.moveaxis(x, 1, 2), (_F,)),
    "multi_hot": (lambda x: ops.multi_hot(x[:, 0], 5), (_I,)),
    "nanpercentile": (lambda x: ops.nanpercentile(x, 30, axis=-1), (_F,)),
    "nanquantile": (lambda x: ops.nanquantile(x, 0.3, axis=-1), (_F,)),
    "one_hot": (lambda x: ops.one_hot(x, 5), (_I,)),
    "pad": (lambda x: ops.pad(x, [[0, 0], [1, 1], [0, 0]]), (_F,)),
    "pinv": (lambda x: ops.pinv(x), (_MATRIX,)),
    "percentile": (lambda x: ops.percentile(x, 30, axis=-1), (_F,)),
    "psnr": (lambda x, y: ops.psnr(x, y, 1.0), (_F, _F)),
    "qr": (lambda x: ops.abs(ops.qr(x)[1]), (_MATRIX,)),
    "quantile": (lambda x: ops.quantile(x, 0.3, axis=-1), (_F,)),
    "rearrange": (lambda x: ops.rearrange(x, "b i j -> b (i j)"), (_F,)),
    "repeat": (lambda x: ops.repeat(x, 2, axis=1), (_F,)),
    "reshape": (lambda x: ops.reshape(x, (-1, 16)), (_F,)),
    "rfft": (ops.rfft, (_SIGNAL,)),
    "roll": (lambda x: ops.roll(x, 1, axis=1), (_F,)),
    "rot90": (lambda x: ops.rot90(x, axes=(1, 2)), (_F,)),
    "saturate_cast": (lambda x: ops.saturate_cast(x, "uint8"), (_F,)),
    "scan": (lambda x: ops.scan(lambda c, row: (c + row, c), x[:, 0], ops.transpose(x, (1, 0, 2))), (_F,)),
    "searchsorted": (lambda x: ops.searchsorted(tf.constant([0.2, 0.5]), x[:, 0, 0]), (_F,)),
    "segment_max": (lambda x: ops.segment_max(x[:, 0, 0], ops.cast(x[:, 0, 0], "int32"), 2), (_F,)),
    "segment_min": (lambda x: ops.segment_min(x[:, 0, 0], ops.cast(x[:, 0, 0], "int32"), 2), (_F,)),
    "segment_prod": (lambda x: ops.segment_prod(x[:, 0, 0], ops.cast(x[:, 0, 0], "int32"), 2), (_F,)),
    "segment_sum": (lambda x: ops.segment_sum(x[:, 0, 0], ops.cast(x[:, 0, 0], "int32"), 2), (_F,)),
    "select": (lambda c, x: ops.select([c], [x], 0.0), (_B, _F)),
    "separable_conv": (lambda x: ops.separable_conv(x, tf.ones([3, 3, 3, 1]), tf.ones([1, 1, 3, 2])), (_IMAGE,)),
    "slice": (lambda x: ops.slice(x, (0, 1, 1), (ops.shape(x)[0], 2, 2)), (_F,)),
    "slogdet": (ops.slogdet, (_MATRIX,)),
    "solve": (ops.solve, (_MATRIX, _F)),
    "solve_triangular": (lambda a, b: ops.solve_triangular(a, b, lower=True), (_MATRIX, _F)),
    "space_to_depth": (lambda x: ops.space_to_depth(x, 2), (_IMAGE,)),
    "sparse_categorical_crossentropy": (lambda y, x: ops.sparse_categorical_crossentropy(y[..., 0], x), (_I, _F)),
    "split": (lambda x: ops.split(x, 2, axis=1), (_F,)),
    "squeeze": (lambda x: ops.squeeze(x[:, :1], 1), (_F,)),
    "stack": (lambda x, y: ops.stack([x, y], 1), (_F, _F)),
    "stft": (lambda x: ops.stft(x, 16, 8, 16), (_SIGNAL,)),
    "svd": (lambda x: ops.svd(x, compute_uv=False), (_MATRIX,)),
    "swapaxes": (lambda x: ops.swapaxes(x, 1, 2), (_F,)),
    "take": (lambda x: ops.take(x, [0, 2], axis=1), (_F,)),
    "take_along_axis": (lambda x, i: ops.take_along_axis(x, i, axis=-1), (_F, _I)),
    "tensordot": (lambda x: ops.tensordot(x, tf.ones([4, 2]), [[2], [0]]), (_F,)),
    "threshold": (lambda x: ops.threshold(x, 0.5, 0.0), (_F,)),
    "tile": (lambda x: ops.tile(x, (1, 2, 1)), (_F,)),
    "top_k": (lambda x: ops.top_k(x, 2), (_F,)),
    "trace": (lambda x: ops.trace(x, axis1=1, axis2=2), (_F,)),
    "transpose": (lambda x: ops.transpose(x, (0, 2, 1)), (_F,)),
    "unfold": (lambda x: ops.unfold(ops.transpose(x, (0, 3, 1, 2)), 2, stride=2), (_IMAGE,)),
    "unravel_index": (lambda x: ops.unravel_index(x, (4, 4)), (_I,)),
    "vectorized_map": (lambda x: ops.vectorized_map(lambda row: row * 2, x), (_F,)),
    "view": (lambda x: ops.view(x, "int32"), (_F,)),
    "view_as_complex": (lambda x: ops.real(ops.view_as_complex(x[..., :2])), (_F,)),
    "view_as_real": (lambda x: ops.view_as_real(ops.view_as_complex(x[..., :2])), (_F,)),
    "vstack": (lambda x, y: ops.vstack([x, y]), (_F, _F)),
    "where": (ops.where, (_B, _F, _F)),
}
CALLS = {name: call for name, call in _CALLS.items() if name in HERE}

WITHOUT_A_BATCH = {
    "makes a tensor of a shape or a range": """arange bartlett blackman empty empty_like eye full geomspace hamming hanning identity
        kaiser linspace logspace ones tri zeros""",
    "runs what it is given, or tells of a tensor": """cond convert_to_numpy custom_gradient dtype fori_loop is_tensor jvp ndim shape
        size switch vectorize while_loop""",
    "takes a vector, a matrix or an address, and the first dimension is no batch": """argpartition broadcast_to corrcoef correlate
        diag diagflat eig histogram kron lstsq lu_factor matrix_rank meshgrid nonzero scatter scatter_update slice_update
        unique vander vsplit""",
}
ONLY_EAGERLY = ("gcd", "isin", "lcm", "nanmedian", "nanpercentile", "nanquantile", "unfold", "unravel_index")
"""In a function Keras needs to know how many rows there are, on one device as well."""


def test_every_operation_is_known() -> None:
    """A new operation of Keras belongs into `CALLS`, or is left out for a reason."""
    known = [*CALLS, *(name for names in WITHOUT_A_BATCH.values() for name in _names(names))]
    assert len(known) == len(set(known))
    assert set(known) == HERE


def test_what_is_left_out_in_functions() -> None:
    for name in HERE.intersection(ONLY_EAGERLY):
        call, inputs = CALLS[name]
        signature = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in inputs]
        with pytest.raises((ValueError, TypeError)):  # Else it can be taken from the list.
            tf.function(call, signature, autograph=False).get_concrete_function()


def tensors_of(result: Any) -> list[tf.Tensor]:
    return [tensor for tensor in tf.nest.flatten(result) if tf.is_tensor(tensor)]


@pytest.mark.parametrize("traced", [False, True])
def test_a_row_and_no_rows(traced: bool) -> None:
    """The replica with the row has the result of one device, and the one without rows goes on; see docs/exactness.md."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    failed = {}
    for name, (call, inputs) in CALLS.items():
        if traced and name in ONLY_EAGERLY:
            continue

        def step(shards: Any, call: Callable[..., Any] = call) -> Any:
            return strategy.run(lambda parts: tensors_of(call(*parts)), (shards,))

        run = tf.function(step, autograph=False) if traced else step
        try:
            expected = tensors_of(call(*inputs))
            found = [strategy.experimental_local_results(result)[0] for result in run(strategy.extended.shard(list(inputs)))]
            for ours, one_device in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, one_device, rtol=1e-5, atol=1e-5)
        except Exception as error:
            failed[name] = f"{name}: {type(error).__name__} {' '.join(str(error).split())[-300:]}"
    refused_by_keras = {"amax", "amin", "max", "min"}  # Eagerly, without rows.
    assert failed.keys() == (set() if traced else refused_by_keras), "\n".join(failed.values())
