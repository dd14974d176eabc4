"""What must not go wrong silently: models that differ between ranks, and gradients that are no numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scenarios import dense, regression

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError, DesyncError

BOTH = pytest.mark.parametrize("communicator", ["tf", "horovod"])


def _unequal(strategy: Any, how: str) -> tuple[str, float, float]:
    began = time.monotonic()
    widths = {"shape": [4, 5, 1], "number": [4, 8, 8, 1]}.get(how, [4, 8, 1]) if strategy.rank == 1 else [4, 8, 1]
    dtype = "float16" if strategy.rank == 1 and how == "dtype" else "float32"
    text = "none"
    try:
        with strategy.scope():
            for inputs, units in itertools.pairwise(widths):
                keras.layers.Dense(units, dtype=dtype).build((None, inputs))
    except DesyncError as error:
        text = str(error)
    seconds = time.monotonic() - began
    with strategy.scope():  # What comes afterwards is not confused by it.
        model = dense()
        model.compile("sgd", "mse")
    history = model.fit(*regression(), batch_size=16, epochs=1, verbose=0)
    return text, seconds, history.history["loss"][0]


@BOTH
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["of shape (4, 8), float32", "of shape (4, 5), float32"]),
        ("dtype", ["of shape (4, 8), float32", "of shape (4, 8), float16"]),
        ("number", ["of shape (8, 1), float32", "of shape (8, 8), float32"]),
    ],
)
def test_models_that_differ_are_refused(worker_pool: Any, communicator: str, how: str, words: list[str]) -> None:
    results = worker_pool(communicator, 2).run(_unequal, how)
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    for text, seconds, _ in results:
        assert text.startswith("Ranks 0 and 1 made different variables.")
        assert "/kernel" in text
        assert all(word in text for word in words)
        assert seconds < 30


def _made_outside(strategy: Any) -> list[str]:
    """Gives what was made outside the scope to all that trains or compiles."""
    x, y = regression()
    outside, optimizer, metric = dense(), keras.optimizers.SGD(0.1), keras.metrics.MeanAbsoluteError()
    outside.compile("sgd", "mse")
    with strategy.scope():
        inside = dense()
    attempts = [lambda method=method: method(x, y) for method in (outside.fit, outside.evaluate, outside.train_on_batch)]
    attempts += [lambda: inside.compile(optimizer, "mse"), lambda: inside.compile("sgd", "mse", metrics=[[metric]])]
    errors = []
    for attempt in attempts:
        with strategy.scope(), pytest.raises(ConfigurationError) as error:
            attempt()
        errors.append(str(error.value).partition(" Received")[0])
    return errors


def test_what_was_made_outside_the_scope_is_refused(worker_pool: Any) -> None:
    wanted = [("fit", "a model"), ("evaluate", "a model"), ("train_on_batch", "a model")]
    wanted += [("compile", "an optimizer"), ("compile", "a metric")]
    expected = [f"`{method}` got {what} made outside the strategy's scope." for method, what in wanted]
    assert _made_outside(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])) == expected
    assert worker_pool("tf", 2).run(_made_outside) == [expected] * 2


def _trained_by_what_was_made_outside(strategy: Any) -> list[str]:
    """Wraps an optimizer that was made outside the scope."""
    makers: list[Callable[[Any], Any]] = [keras.optimizers.LossScaleOptimizer]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        makers.append(lambda optimizer: keras.optimizers.MultiOptimizer(lambda variable: optimizer))
    errors = []
    for make in makers:
        outside = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
        with strategy.scope():
            model = dense()
            model.compile(make(outside), "mse")
        with pytest.raises(ConfigurationError) as error:
            model.fit(*regression(), verbose=0)
        errors.append(str(error.value).partition(" Received")[0])
    return errors


def test_an_optimizer_inside_another_one_is_made_in_the_scope(worker_pool: Any) -> None:
    for errors in (
        _trained_by_what_was_made_outside(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])),
        *worker_pool("tf", 2).run(_trained_by_what_was_made_outside),
    ):
        assert set(errors) == {"A step got an optimizer made outside the strategy's scope."}


def _built_outside(strategy: Any) -> list[str]:
    """Builds an optimizer after the scope."""
    errors = []
    for make in (keras.optimizers.Adam, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))):
        with strategy.scope():
            model = dense()
            model.compile(make(), "mse")
        with pytest.raises(ConfigurationError) as error:
            model.optimizer.build(model.trainable_variables)
        errors.append(str(error.value).partition(" Received")[0])
    return errors


def test_an_optimizer_is_built_in_the_scope(worker_pool: Any) -> None:
    found = [_built_outside(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])), *worker_pool("tf", 2).run(_built_outside)]
    assert {error for errors in found for error in errors} == {"An optimizer is built outside the strategy's scope."}


def _compiled_outside(strategy: Any) -> dict[str, Any]:
    """Only the model is made inside; what is given by name belongs to it."""
    with strategy.scope():
        model = dense()
    model.compile("adam", "mse", metrics=["mae"])
    return model.fit(*regression(), batch_size=16, shuffle=False, verbose=0).history


def test_models_are_compiled_in_their_scope(worker_pool: Any) -> None:
    expected = _compiled_outside(tf.distribute.get_strategy())
    found = [_compiled_outside(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])), *worker_pool("tf", 2).run(_compiled_outside)]
    for history in found:
        assert history == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}


def _loop_over_what_was_made_outside(strategy: Any) -> str:
    model = dense()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tf.ones((2, 4)))))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.raises(ConfigurationError) as error:
        strategy.run(step)
    return str(error.value)


def test_loops_over_what_was_made_outside_the_scope_are_refused(worker_pool: Any) -> None:
    errors = [_loop_over_what_was_made_outside(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))]
    errors += worker_pool("tf", 2).run(_loop_over_what_was_made_outside)
    for error in errors:
        assert error.startswith("An optimizer got a variable made outside the strategy's scope.")
        assert "/kernel" in error


class Batches(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


def _not_a_number(strategy: Any) -> dict[str, Any]:
    """Only the last row, which the last replica reads, is spoiled."""
    with strategy.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = regression(16)
    y[-1] = np.nan
    batches = Batches()
    model.fit(x, y, batch_size=16, epochs=5, shuffle=False, verbose=0,
              callbacks=[keras.callbacks.TerminateOnNaN(), batches])  # fmt: skip
    strategy.assert_in_sync(model)
    finite = [bool(np.isfinite(value).all()) for value in model.get_weights()]
    return {"finite": finite, "batches": batches.count}


def test_mirrored_replicas_all_see_a_gradient_that_is_no_number() -> None:
    assert _not_a_number(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])) == {"finite": [False] * 4, "batches": 1}


@BOTH
def test_ranks_all_see_a_gradient_that_is_no_number(worker_pool: Any, communicator: str) -> None:
    assert worker_pool(communicator, 2).run(_not_a_number) == [{"finite": [False] * 4, "batches": 1}] * 2


def test_mirrored_replicas_of_one_process_among_several_are_told_that_they_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"one of 2.*\nHint: MultiWorkerStrategy"):
        tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
