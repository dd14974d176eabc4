"""Keras is changed when a name of this package is first used: by then a program may have built and trained models."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from raising import refuses

pytestmark = pytest.mark.lane("faults")

_REPOSITORY = Path(__file__).resolve().parents[2]
_LIMIT = 120


def train_before_and_after(first_use: str) -> None:
    """Is the program: trains on one device, uses the package for the first time meanwhile, then trains on two replicas.

    Args:
        first_use: "callback": the package was imported first of all, and a callback of `fit` uses it in a function that is
            being traced. "pickle": it was not imported, and a class of it is unpickled after `fit`.
    """
    if first_use == "callback":
        import tfrep_strategy as tfrep

        assert not {"keras", "tensorflow"} & set(sys.modules)
    import keras
    import numpy as np
    import tensorflow as tf

    exec("from keras.saving import save_model; from keras.utils import clear_session, get_file", globals())
    tf.config.threading.set_inter_op_parallelism_threads(16)  # A thread for each replica.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

    class FirstUse(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if first_use == "callback":
                assert float(tf.function(lambda: tfrep.all_sum(tf.constant(2.0)))()) == 2.0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            batches.append(batch)

    def fit(model: keras.Model) -> list[float]:
        return model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[FirstUse()]).history["loss"]

    batches: list[int] = []
    early, optimizer = make(), keras.optimizers.SGD(0.1)
    metric = keras.metrics.MeanAbsoluteError()
    early.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = keras.callbacks.CallbackList([FirstUse()], model=early)
    before = keras.saving.save_model, keras.utils.clear_session, keras.utils.get_file
    on_one_device = fit(early)
    assert ("tfrep_strategy.keras_integration" in sys.modules) == (first_use == "callback")
    strategy_class = pickle.loads(b"ctfrep_strategy.strategies.mirrored\nMirroredStrategy\n.")

    # What was made before still works, and what was imported by name is what Keras has now.
    callbacks.on_train_batch_end(3)
    assert batches == [0, 1, 2, 0, 1, 2, 3]
    now = keras.saving.save_model, keras.utils.clear_session, keras.utils.get_file
    assert now == tuple(globals()[function.__name__] for function in before)
    assert not set(now) & set(before)
    early.fit(x, y, verbose=0)

    strategy = strategy_class(["CPU:0", "CPU:1"])
    with strategy.scope():
        late = make()
        late.compile(keras.optimizers.SGD(0.1), "mse")
        np.testing.assert_allclose(fit(late), on_one_device, rtol=1e-5)
        for refused in (
            lambda: early.fit(x, y, verbose=0),
            lambda: late.compile(optimizer, "mse"),
            lambda: late.compile("sgd", "mse", metrics=[metric]),
            lambda: keras.optimizers.SGD().build(early.trainable_variables),
        ):
            with refuses(code="TFREP-E016", hint="with strategy.scope():"):
                refused()


@pytest.mark.parametrize("first_use", ["callback", "pickle"])
def test_models_may_be_there_before_the_package_is_used(first_use):
    folders = [str(_REPOSITORY), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"import test_first_use; test_first_use.train_before_and_after({first_use!r})"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
