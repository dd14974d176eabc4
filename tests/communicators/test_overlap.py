"""Gradients travel while the backward pass computes those of earlier layers: read from traces of TensorFlow's profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy._tensorflow import XSpace
from tfrep_strategy.profiles import times

_WIDTH, _LAYERS, _BATCH, _STEPS = 768, 8, 256, 4
_BACKWARD = re.compile(r"gradient_tape/.*:_?(Fused)?MatMul")
_EVER = 0, 2**62


def spans_in(file: Path) -> tuple[list[Any], list[Any]]:
    """Returns from when to when products of the backward pass were computed, and collectives were under way."""
    backward, collectives = [], []
    for plane in XSpace.FromString(file.read_bytes()).planes:
        names = {key: data.name for key, data in plane.event_metadata.items()}
        backward += [span for _, event, span in times._events(plane) if _BACKWARD.match(names[event.metadata_id])]
        collectives += [span for kind, span in times._operations(plane) if kind == times._COLLECTIVE]
    return backward, collectives


def trained_and_traced(strategy: Any, folder: str) -> tuple[int, float, float, float]:
    """Returns how many products there were; the seconds of these, of collectives, and of both at once."""
    before, strategy.bucket_bytes = strategy.bucket_bytes, 4 * _WIDTH * _WIDTH
    own = Path(folder, str(strategy.rank))
    try:
        with strategy.scope():
            layers = [keras.layers.Dense(_WIDTH, use_bias=False) for _ in range(_LAYERS)]
            model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
            model.compile("sgd", "mse", jit_compile=False)
        x = np.ones((_BATCH * _STEPS, _WIDTH), "float32")
        model.fit(x, x, batch_size=_BATCH, verbose=0)
        tf.profiler.experimental.start(str(own))
        model.fit(x, x, batch_size=_BATCH, verbose=0)
        tf.profiler.experimental.stop()
    finally:
        strategy.bucket_bytes = before
    [file] = own.rglob("*.xplane.pb")
    backward, collectives = spans_in(file)
    each, other, either = (times._length(spans, *_EVER) for spans in (backward, collectives, backward + collectives))
    return len(backward), each, other, each + other - either


@pytest.mark.parametrize("communicator", ["tf", "horovod"])
def test_gradients_travel_during_the_backward_pass(communicator: str, worker_pool: Any, tmp_path: Path) -> None:
    for products, backward, collectives, both in worker_pool(communicator, 2).run(trained_and_traced, str(tmp_path)):
        print(f"\n{communicator}: backward {backward:.3f} s, collectives {collectives:.3f} s, both at once {both:.3f} s")
        assert products == (2 * _LAYERS - 1) * _STEPS
        assert both > 0.2 * min(backward, collectives)
