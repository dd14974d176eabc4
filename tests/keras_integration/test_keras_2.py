"""Models and optimizers of `tf_keras` are refused where a strategy of this package takes part, and work as ever elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tf_keras"), reason="needs the extra bench (tf_keras)")

X = np.linspace(-1.0, 1.0, 40, dtype="float32").reshape(10, 4)
Y = X.sum(1, keepdims=True)
REFUSED = " (Keras 2) does not work under the strategies of tfrep_strategy."


def model_of(package: Any) -> Any:
    model = package.Sequential([package.layers.Dense(1, kernel_initializer="zeros")])
    model.build((None, 4))
    return model


def trained(package: Any) -> list[float]:
    model = model_of(package)
    model.compile(package.optimizers.SGD(0.1), "mse")
    model.evaluate(X, Y, verbose=0)
    return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


def applied(model: Any, optimizer: Any) -> float:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X) - Y))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
    return float(loss)


def attempts(strategy: Any, package: Any) -> dict[str, Callable[[], Any]]:
    """What must not happen: in the scope, and outside of it with what was made inside."""
    optimizers = package.optimizers
    outside, of_outside = model_of(package), optimizers.SGD(0.1)
    with strategy.scope():
        model, optimizer, legacy = model_of(package), optimizers.Adam(0.1), optimizers.legacy.SGD(0.1)
    step = tf.function(applied)

    def in_scope(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        def run() -> Any:
            with strategy.scope():
                return call(*args)

        return run

    return {
        "compile": in_scope(model.compile, "sgd", "mse"),
        "compile later": lambda: model.compile("sgd", "mse"),
        "compile what was made outside": in_scope(outside.compile, "sgd", "mse"),
        "fit": in_scope(model.fit, X, Y),
        "fit later": lambda: model.fit(X, Y),
        "evaluate": lambda: model.evaluate(X, Y),
        "predict": lambda: model.predict(X),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
        "apply_gradients": in_scope(applied, model, optimizer),
        "apply_gradients later": lambda: applied(model, optimizer),
        "apply_gradients of an older class": in_scope(applied, model, legacy),
        "apply_gradients in replicas": lambda: strategy.run(applied, (model, of_outside)),
        "apply_gradients in a function": lambda: strategy.run(step, (model, optimizer)),
    }


def refused(strategy: Any) -> dict[str, str]:
    import tf_keras

    texts = {}
    for name, attempt in attempts(strategy, tf_keras).items():
        with pytest.raises(ConfigurationError) as error:
            attempt()
        texts[name] = str(error.value)
    return texts


def check(texts: dict[str, str], strategy: str) -> None:
    assert len(texts) == 13
    for name, text in texts.items():
        method = name.partition(" ")[0]
        kind = "optimizer" if method == "apply_gradients" else "model"
        for part in (f"`{method}` of a tf_keras {kind}{REFUSED} Received: {kind}=", f"strategy='{strategy}'", "Hint: make it with"):
            assert part in text, (name, text)  # AutoGraph puts lines of the program around it.


def test_two_processes(worker_pool: Any) -> None:
    for texts in worker_pool("tf", 2).run(refused):
        check(texts, "MultiWorkerStrategy")


def on_devices() -> None:
    """Imports `tf_keras` within a scope, and uses it inside and outside, beside Keras 3."""
    tfrep.use_logical_cpus(2)
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        losses = [trained(keras)]
        assert "tf_keras" not in sys.modules, "nothing of this package imports it"
        import tf_keras

        inside = model_of(tf_keras)
        with refuses(code="TFREP-E002", told=["`compile`", "tf_keras"]):
            inside.compile("sgd", "mse")
        assert inside(X).shape == (10, 1)
    texts = refused(strategy)
    with tfrep.MultiWorkerStrategy().scope(), refuses(code="TFREP-E002", told=["`compile`", "tf_keras"]):
        trained(tf_keras)  # Also with one replica, or a program would fail only where it has several.
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        losses.append(trained(tf_keras))
    losses.append(trained(tf_keras))
    loss = applied(model_of(tf_keras), tf_keras.optimizers.legacy.SGD(0.1))
    with strategy.scope():
        losses.append(trained(keras))
    print(json.dumps({"texts": texts, "losses": losses, "loss": loss}))


def _ended(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_devices_of_one_process() -> None:
    done = _ended(command(on_devices))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    check(found["texts"], "MirroredStrategy")
    assert found["losses"] == [pytest.approx(trained(keras), rel=1e-5)] * 4
    assert found["loss"] == pytest.approx(float(np.mean(np.square(Y))), rel=1e-5)


def in_run() -> None:
    """Trains as a script that knows nothing of strategies: with Keras 3, then with `tf.keras`, which may be Keras 2."""
    print(json.dumps(trained(keras)), flush=True)
    trained(tf.keras)


@pytest.mark.lane("launchers")
def test_a_run() -> None:
    """Ray sets the variable in its workers, which must not matter to Keras 3."""
    run = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", "tf", *command(in_run)[1:]]
    done = _ended(run, TF_USE_LEGACY_KERAS="1")
    assert done.returncode == 1, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(trained(keras), rel=1e-5)
    assert f"`compile` of a tf_keras model{REFUSED}" in done.stderr
