"""One device's answer for programs that nobody thought of: Hypothesis draws them.

The draws are the same in every run, so that a change is tested against what it was tested against before. With
TFREP_RANDOM_DRAWS=1 they are new ones; a failure prints the seed blob that reproduces it.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers
from test_one_device_answer import assert_same, mirrored

pytestmark = pytest.mark.lane("drawn")

O = keras.optimizers  # noqa: E741

OPTIMIZERS = {
    "sgd": lambda **options: O.SGD(0.05, **options),
    "momentum": lambda **options: O.SGD(0.02, momentum=0.9, nesterov=True, **options),
    # Its epsilon is large enough that rounding of a gradient near zero is not blown up to a full step.
    "adam": lambda **options: O.Adam(0.02, epsilon=1e-2, **options),
    "adamw": lambda **options: O.AdamW(0.02, epsilon=1e-2, weight_decay=0.05, **options),
    "rmsprop": lambda **options: O.RMSprop(0.01, epsilon=1e-2, **options),
}


@st.composite
def programs(draw: Any) -> dict[str, Any]:
    options: dict[str, Any] = draw(
        st.sampled_from([{}, {}, {"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.05}, {"use_ema": True}])
    )
    if draw(st.booleans()):
        options = options | {"gradient_accumulation_steps": draw(st.integers(2, 3))}
    return {
        "model": draw(st.sampled_from(["dense", "convolution", "embedding"])),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "options": options,
        "reduction": draw(st.sampled_from(["sum_over_batch_size", "sum", "mean_with_sample_weight"])),
        "weighted": draw(st.booleans()),
        "batch_size": draw(st.integers(1, 12)),
        "size": draw(st.integers(1, 30)),
        "steps_per_execution": draw(st.sampled_from([1, 1, 2, 3])),
        "seed": draw(st.integers(0, 1000)),
    }


def build(kind: str) -> tuple[Any, Any]:
    """Returns a model and a function that makes `n` rows of its input."""
    init = [keras.initializers.RandomUniform(-0.5, 0.5, seed=i) for i in range(3)]
    if kind == "dense":
        body = [keras.Input((3,)), layers.Dense(5, "tanh", kernel_initializer=init[0])]
        inputs = lambda rng, n: rng.randn(n, 3).astype("float32")  # noqa: E731
    elif kind == "convolution":
        body = [
            keras.Input((5, 2)),
            layers.Conv1D(3, 2, kernel_initializer=init[0]),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.GlobalAveragePooling1D(),
        ]
        inputs = lambda rng, n: rng.randn(n, 5, 2).astype("float32")  # noqa: E731
    else:
        body = [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(7, 3, embeddings_initializer=init[0]),
            layers.GlobalAveragePooling1D(),
        ]
        inputs = lambda rng, n: rng.randint(0, 7, (n, 4))  # noqa: E731
    return keras.Sequential([*body, layers.Dense(1, kernel_initializer=init[1])]), inputs


def outcome(program: dict[str, Any]) -> dict[str, Any]:
    model, inputs = build(program["model"])
    reduction = program["reduction"]
    optimizer = OPTIMIZERS[program["optimizer"]](**program["options"])
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(optimizer, loss, metrics=["mae"], steps_per_execution=program["steps_per_execution"])
    rng = np.random.RandomState(program["seed"])
    x, y = inputs(rng, program["size"]), 0.1 * rng.randn(program["size"], 1).astype("float32")
    weight = rng.uniform(0.5, 2.0, program["size"]).astype("float32") if program["weighted"] else None
    fixed = {"batch_size": program["batch_size"], "verbose": 0}
    history = model.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, **fixed)
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "evaluate": model.evaluate(x, y, sample_weight=weight, return_dict=True, **fixed),
        "predict": model.predict(x, **fixed),
    }


RANDOM = bool(os.environ.get("TFREP_RANDOM_DRAWS"))


def _examples(count: int) -> settings:
    """Draws some programs, the same ones in every run unless told otherwise."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=not RANDOM,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@_examples(25)
@given(program=programs(), num_replicas=st.integers(1, 4))
def test_replicas_give_the_answer_of_one_device(program: dict[str, Any], num_replicas: int) -> None:
    expected = outcome(program)
    with mirrored(num_replicas).scope():
        found = outcome(program)
    assert_same(found, expected, "program", 2e-5)


def outcome_in_scope(strategy: Any, program: dict[str, Any]) -> dict[str, Any]:
    with strategy.scope():
        return outcome(program)


@_examples(8)
@given(program=programs(), communicator=st.sampled_from(["horovod", "tf"]))
def test_processes_give_the_answer_of_one_device(worker_pool: Any, program: dict[str, Any], communicator: str) -> None:
    expected = outcome(program)
    for rank, found in enumerate(worker_pool(communicator, 2).run(outcome_in_scope, program)):
        assert_same(found, expected, f"rank {rank}", 2e-5)
