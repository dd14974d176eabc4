"""Every layer of Keras on a row and on no rows: the parts of two replicas that share a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("rows")

_rng = np.random.RandomState(0)


def _floats(*shape: int) -> tf.Tensor:
    return tf.constant(_rng.uniform(0.1, 0.9, (1, *shape)), tf.float32)


_ROW, _SEQUENCE, _IMAGE, _VOLUME, _SIGNAL = _floats(8), _floats(8, 4), _floats(8, 8, 3), _floats(4, 4, 4, 2), _floats(64)
_FRAMES, _VOLUMES = _floats(2, 8, 8, 3), _floats(2, 4, 4, 4, 2)
_WHOLE = tf.constant([[1, 2, 3, 1]], tf.int32)
_TEXT = tf.constant([["a b c"]])
_PHOTO = tf.constant(_rng.randint(0, 255, (1, 8, 8, 3)), tf.float32)
_BOXES = {
    "images": _PHOTO,
    "bounding_boxes": {"boxes": tf.constant([[[1.0, 1.0, 4.0, 4.0]]]), "labels": tf.constant([[1]])},
}
_LABELLED = {"images": _PHOTO, "labels": tf.constant([[0.0, 1.0]])}

Made = dict[str, tuple[Callable[[], Any], Any]]


def _of(inputs: Any, *makers: Callable[[], Any]) -> Made:
    return {type(make()).__name__: (make, inputs) for make in makers}


def deterministic() -> Made:
    """Gives layers, and inputs for which they have one answer."""
    made: Made = {}
    for n, x in {1: _SEQUENCE, 2: _IMAGE, 3: _VOLUME}.items():
        made |= {
            f"{kind}{n}D": (lambda kind=kind, n=n, of=of: getattr(L, f"{kind}{n}D")(*of), x)
            for kind, of in {
                "AdaptiveAveragePooling": (2,), "AdaptiveMaxPooling": (2,), "AveragePooling": (2,), "Conv": (2, 2),
                "Cropping": (1,), "GlobalAveragePooling": (), "GlobalMaxPooling": (), "MaxPooling": (2,), "UpSampling": (2,),
                "ZeroPadding": (1,),
            }.items()
        }  # fmt: skip
        made[f"Conv{n}DTranspose"] = (lambda n=n: getattr(L, f"Conv{n}DTranspose")(2, 2), x)
    for n, x in {1: _IMAGE, 2: _FRAMES, 3: _VOLUMES}.items():
        made[f"ConvLSTM{n}D"] = (lambda n=n: getattr(L, f"ConvLSTM{n}D")(2, 2), x)
    for n, x in {1: _SEQUENCE, 2: _IMAGE}.items():
        made[f"DepthwiseConv{n}D"] = (lambda n=n: getattr(L, f"DepthwiseConv{n}D")(2), x)
        made[f"SeparableConv{n}D"] = (lambda n=n: getattr(L, f"SeparableConv{n}D")(2, 2), x)
    return {
        **made,
        **_of(_ROW, lambda: L.Activation("relu"), lambda: L.ActivityRegularization(0.1), lambda: L.Dense(3), L.ELU, L.Identity,
              L.LeakyReLU, L.PReLU, L.ReLU, L.Softmax, L.RMSNormalization, L.UnitNormalization, L.BatchNormalization,
              lambda: L.Normalization(mean=0.5, variance=2.0), lambda: L.Discretization([0.2, 0.5]), lambda: L.Rescaling(2.0),
              lambda: L.Reshape((4, 2)), lambda: L.RepeatVector(3), lambda: L.Lambda(lambda x: 2 * x),
              lambda: L.SpectralNormalization(L.Dense(3)), lambda: L.GroupNormalization(2),
              lambda: L.Pipeline([L.Rescaling(2.0)])),
        **_of(_SEQUENCE, L.Flatten, L.LayerNormalization, L.Masking, lambda: L.Permute((2, 1)), lambda: L.SimpleRNN(2),
              lambda: L.LSTM(2), lambda: L.GRU(2), lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(2), L.GRUCell(2)])),
              lambda: L.Bidirectional(L.GRU(2)), lambda: L.TimeDistributed(L.Dense(2)),
              lambda: L.EinsumDense("abc,cd->abd", (None, 2))),
        **_of([_ROW, _ROW], L.Add, L.Average, L.Concatenate, L.Maximum, L.Minimum, L.Multiply, L.Subtract),
        **_of([_SEQUENCE, _SEQUENCE], L.Attention, L.AdditiveAttention, lambda: L.Dot(2)),
        "MultiHeadAttention": (lambda: Itself(L.MultiHeadAttention(2, 2)), _SEQUENCE),
        "GroupedQueryAttention": (lambda: Itself(L.GroupQueryAttention(2, 2, 1)), _SEQUENCE),
        **_of(_WHOLE, lambda: L.Embedding(5, 2), lambda: L.ReversibleEmbedding(5, 2), lambda: L.CategoryEncoding(5),
              lambda: L.Hashing(3), lambda: L.IntegerLookup(vocabulary=[1, 2, 3])),
        **_of([_WHOLE[:, :1], _WHOLE[:, :1]], lambda: L.HashedCrossing(5)),
        **_of(_TEXT, lambda: L.StringLookup(vocabulary=["a b c"]), lambda: L.TextVectorization(vocabulary=["a", "b"])),
        **_of(_PHOTO, lambda: L.CenterCrop(4, 4), lambda: L.Resizing(4, 4), L.Equalization, L.AutoContrast, L.Solarization,
              lambda: L.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))),
        **_of(_SIGNAL[..., tf.newaxis], lambda: L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16)),
        **_of(_SIGNAL, lambda: L.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4, sampling_rate=64, min_freq=1.0)),
        **_of(_BOXES, lambda: L.MaxNumBoundingBoxes(2, bounding_box_format="xyxy")),
    }  # fmt: skip


def random() -> Made:
    """Gives layers that draw numbers. A replica has numbers of its own, so that only shapes can be compared."""
    return {
        **_of(_ROW, lambda: L.Dropout(0.5), lambda: L.AlphaDropout(0.5), lambda: L.GaussianDropout(0.5),
              lambda: L.GaussianNoise(1.0)),
        **_of(_SEQUENCE, lambda: L.SpatialDropout1D(0.5)),
        **_of(_IMAGE, lambda: L.SpatialDropout2D(0.5)),
        **_of(_VOLUME, lambda: L.SpatialDropout3D(0.5)),
        **_of(_PHOTO, L.AugMix, L.RandAugment, lambda: L.RandomBrightness(0.5), lambda: L.RandomColorDegeneration(0.5),
              lambda: L.RandomColorJitter(brightness_factor=0.5), lambda: L.RandomContrast(0.5), lambda: L.RandomCrop(4, 4),
              L.RandomElasticTransform, L.RandomErasing, L.RandomFlip, L.RandomGaussianBlur, L.RandomGrayscale,
              lambda: L.RandomHue(0.5), L.RandomInvert, L.RandomPerspective, lambda: L.RandomPosterization(4),
              lambda: L.RandomRotation(0.2), lambda: L.RandomSaturation(0.5), lambda: L.RandomSharpness(0.5),
              lambda: L.RandomShear(0.2, 0.2), lambda: L.RandomTranslation(0.2, 0.2), lambda: L.RandomZoom(0.2)),
        **_of(_LABELLED, L.CutMix, L.MixUp),
    }  # fmt: skip


LEFT_OUT = {
    "is no layer with inputs of its own": """InputLayer InputSpec Layer Wrapper GRUCell LSTMCell SimpleRNNCell StackedRNNCells""",
    "holds a program of another framework": "FlaxLayer JaxLayer TFSMLayer TorchModuleWrapper",
}


class Itself(L.Layer):
    """Calls a layer of attention with one sequence as query and value."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


def test_every_layer_is_known() -> None:
    """A new layer of Keras belongs into one of the tables, or is left out for a reason."""
    classes = {kind for kind in vars(L).values() if isinstance(kind, type)}
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    assert {kind.__name__ for kind in classes} == {*deterministic(), *random(), *left_out}


REFUSED_BY_KERAS = {"GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D", "HashedCrossing", "MelSpectrogram"}
"""Layers that Keras does not call eagerly without rows."""


@pytest.mark.parametrize("traced", [False, True])
def test_a_row_and_no_rows(traced: bool) -> None:
    """The replica with the row has the result of one device, and the one without rows goes on; see docs/exactness.md."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    failed = {}
    for made, compare in ((deterministic(), np.testing.assert_allclose), (random(), _same_shape)):
        for name, (make, inputs) in made.items():
            try:
                with strategy.scope():
                    layer = make()
                    layer(tf.nest.map_structure(lambda x: keras.Input(x.shape[1:], dtype=x.dtype), inputs))

                def step(shards: Any, layer: Any = layer) -> Any:
                    return strategy.run(lambda part: tf.nest.flatten(layer(part, **training_of(layer))), (shards,))

                run = tf.function(step, autograph=False) if traced else step
                found = [strategy.experimental_local_results(each)[0] for each in run(strategy.extended.shard(inputs))]
                for ours, one_device in zip(found, tf.nest.flatten(layer(inputs, **training_of(layer))), strict=True):
                    if ours.dtype != tf.string:
                        compare(ours, one_device, rtol=1e-4, atol=1e-5)
            except Exception as error:
                failed[name] = f"{name}: {type(error).__name__} {' '.join(str(error).split())[-300:]}"
    assert failed.keys() == (set() if traced else REFUSED_BY_KERAS), "\n".join(failed.values())


def training_of(layer: Any) -> dict[str, bool]:
    # Statistics of a batch would change with each call.
    changes = isinstance(layer, (L.BatchNormalization, L.SpectralNormalization))
    return {"training": not changes} if layer._call_has_training_arg else {}


def _same_shape(found: Any, expected: Any, **tolerances: float) -> None:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
