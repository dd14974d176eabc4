"""Spellings of older years: an error shows the line to write today, and that line works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from calling import command
from needs import needs_horovod
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.core import old_spellings
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.lane("quick")

_V1 = tf.compat.v1.train
_PAGE = (Path(__file__).parents[2] / "docs" / "migration" / "old_spellings.md").read_text("utf-8")


@pytest.fixture(scope="module")
def strategy() -> tfrep.MirroredStrategy:
    return tfrep.MirroredStrategy(["CPU:0", "CPU:1"])


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])


def _hint(call: Callable[[], Any], kind: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return re.sub(r" \[TFREP-E\d+\]$", "", str(caught.value).partition("\nHint: ")[2])


# Names.


@pytest.mark.parametrize("name", old_spellings.OF_PACKAGE)
def test_names_of_the_package(name: str) -> None:
    assert not hasattr(tfrep, name)
    assert _hint(lambda: getattr(tfrep, name), AttributeError) == old_spellings.OF_PACKAGE[name]
    assert name not in dir(tfrep)


@pytest.mark.parametrize("name", old_spellings.OF_STRATEGIES)
def test_names_of_strategies(name: str, strategy: tfrep.MirroredStrategy) -> None:
    for each in (strategy, tfrep.MultiWorkerStrategy()):
        assert _hint(lambda each=each: getattr(each, name), AttributeError) == old_spellings.OF_STRATEGIES[name]
    assert tfrep.ParameterServerStrategy._old_names is old_spellings.OF_STRATEGIES


@pytest.mark.parametrize("name", old_spellings.OF_REPLICATORS)
def test_names_of_replicators(name: str, strategy: tfrep.MirroredStrategy) -> None:
    repl = tfrep.Replicator(strategy)
    assert _hint(lambda: getattr(repl, name), AttributeError) == old_spellings.OF_REPLICATORS[name]


def test_names_that_were_never_there(strategy: tfrep.MirroredStrategy) -> None:
    for owner in (tfrep, strategy, tfrep.Replicator(strategy)):
        with pytest.raises(AttributeError, match=r"no attribute 'never'$"):
            owner.never  # noqa: B018


def test_an_error_inside_a_property_is_not_hidden() -> None:
    class Strategy(old_spellings.ShowsNewNames):
        @property
        def devices(self) -> list[str]:
            return self.missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'missing'"):
        Strategy().devices  # noqa: B018


@pytest.mark.parametrize("table", ["OF_PACKAGE", "OF_STRATEGIES", "OF_REPLICATORS"])
def test_hints_name_what_exists(table: str, strategy: tfrep.MirroredStrategy) -> None:
    roots = {"tfrep": tfrep, "keras": keras, "strategy": strategy, "repl": tfrep.Replicator(strategy), "tf": tf}
    for text in getattr(old_spellings, table).values():
        assert text.startswith(("write ", "leave it out")), text
        assert text.endswith("."), text
        for root, path in re.findall(r"\b(tfrep|keras|strategy|repl|tf)((?:\.\w+)+)\b", text):
            found: Any = roots[root]
            for name in path.split(".")[1:]:
                found = getattr(found, name)


def test_an_alias_that_tensorflow_keeps_works(strategy: tfrep.MirroredStrategy) -> None:
    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))

    old = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    new = strategy.distribute_datasets_from_function(dataset_fn)
    for first, second in zip(old, new, strict=True):
        for a, b in zip(*map(strategy.experimental_local_results, (first, second)), strict=True):
            np.testing.assert_array_equal(a, b)


# TensorFlow 1's graphs.


def in_graph_mode() -> None:
    tf.compat.v1.disable_v2_behavior()
    for make in (tfrep.MirroredStrategy, tfrep.MultiWorkerStrategy, tfrep.ParameterServerStrategy):
        hint = _hint(make)
        assert hint.startswith("leave out tf.compat.v1.disable_v2_behavior()"), hint


@pytest.mark.lane("migration")
def test_graph_mode_is_refused() -> None:
    done = subprocess.run(command(in_graph_mode), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# Optimizers.


@pytest.mark.parametrize("make", [lambda: _V1.AdamOptimizer(), lambda: _V1.GradientDescentOptimizer(0.5)])
def test_optimizers_of_tensorflow_1(make: Callable[[], Any], strategy: tfrep.MirroredStrategy) -> None:
    with strategy.scope():
        model = _model()
    for call in (
        lambda: model.compile(make(), "mse"),
        lambda: model.compile(loss="mse", optimizer=make()),
        lambda: tfrep.Replicator(strategy).wrap_optimizer(make()),
    ):
        with refuses(code="TFREP-E002", told=["TensorFlow 1"], hint="keras.optimizers", optimizer=...):
            call()


@pytest.mark.parametrize("legacy", [False, True])
def test_optimizers_of_keras_2(legacy: bool, strategy: tfrep.MirroredStrategy) -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="needs the extra bench")
    optimizers = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    with strategy.scope():
        model, optimizer = _model(), optimizers.SGD(0.2, momentum=0.9)
    with refuses(code="TFREP-E002", told=["`compile`", "Keras 2"], optimizer=type(optimizer).__name__):
        model.compile(optimizer)
    assert "write an optimizer of keras.optimizers" in _hint(lambda: model.compile(optimizer))


@pytest.mark.lane("migration")
@needs_horovod
def test_optimizers_and_callbacks_of_horovod() -> None:
    done = subprocess.run(command(of_horovod), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def of_horovod() -> None:
    """Runs in a process of its own: Horovod starts threads."""
    import horovod.tensorflow.keras as hvd

    hvd.init()
    strategy = tfrep.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = _model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9))
    line = "write an optimizer of keras.optimizers with the same settings: strategies sum its gradients."
    assert _hint(lambda: model.compile(optimizer, "mse")) == line
    assert _hint(lambda: tfrep.Replicator(strategy).wrap_optimizer(optimizer)) == line
    with strategy.scope():
        assert _hint(lambda: optimizer.build(model.trainable_variables)) == line  # As a loop of the user's own does.
    model.compile("sgd", "mse")
    for callback in (
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5),
    ):
        for given in ([callback], [keras.callbacks.History(), callback], keras.callbacks.CallbackList([callback], model=model)):
            hint = _hint(lambda given=given: model.fit(np.ones((4, 3)), np.ones((4, 2)), callbacks=given, verbose=0))
            assert "docs/migration/horovod.md" in hint
    hvd.shutdown()
    sys.exit(0)


def on_parameter_servers() -> None:
    with tfrep.local_cluster(workers=1, servers=1) as cluster:
        strategy = tfrep.ParameterServerStrategy(cluster)
        with strategy.scope():
            model = _model()
        hint = _hint(lambda: model.compile(_V1.GradientDescentOptimizer(0.5), "mse"))
        assert "write an optimizer of keras.optimizers" in hint
        assert "write strategy.run" in _hint(lambda: strategy.experimental_run_v2, AttributeError)


@pytest.mark.lane("migration")
def test_parameter_servers_show_new_lines() -> None:
    done = subprocess.run(command(on_parameter_servers), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_optimizers_of_keras_3_are_taken(strategy: tfrep.MirroredStrategy) -> None:
    for optimizer in ("adam", {"class_name": "SGD", "config": {"learning_rate": 0.1}}, None):
        with strategy.scope():
            model = _model()
        model.compile(loss="mse", **({} if optimizer is None else {"optimizer": optimizer}))
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


def test_wrap_optimizer_returns_what_it_got(strategy: tfrep.MirroredStrategy) -> None:
    repl = tfrep.Replicator(strategy)
    with repl.context():
        optimizer = keras.optimizers.SGD(0.1)
        assert repl.wrap_optimizer(optimizer) is optimizer
    assert "pass keras.optimizers.SGD(0.1)" in _hint(lambda: repl.wrap_optimizer("sgd"))  # type: ignore[arg-type]


# The page.


def _of_tensorflow() -> Iterator[tuple[str, str, str]]:
    """Gives the rows of the page's second table: what was written, what the error says, what to write today."""
    rows = re.findall(r"^\| `(.+?)` \| (.+) \| (.+) \|$", _PAGE.partition("## Errors of TensorFlow and Keras")[2], re.MULTILINE)
    assert len(rows) > 10
    error = ""
    for old, said, today in rows:
        error = error if said == "the same" else said
        yield old, error, today


@pytest.mark.parametrize(("old", "said", "today"), list(_of_tensorflow()))
def test_what_tensorflow_and_keras_say(old: str, said: str, today: str) -> None:
    names = {"tf": tf, "keras": keras, "tfrep": tfrep, "model": _model(), "generator": None}
    if said == "a warning: it is ignored":
        with pytest.warns(UserWarning, match="no longer supported and will be ignored"):
            eval(old, names)
    else:
        with pytest.raises((AttributeError, ImportError, TypeError, ValueError)) as caught:
            eval(old.replace("...", ""), names)
        assert re.sub(r"^`([^`]*)`$", r"\1", said) in str(caught.value)
    line = re.fullmatch(r"`((?:tfrep|keras)\..+)`", today)
    if line is not None:
        eval(line[1], names)
