"""What cannot work, and what is left after an error, on a real cluster: two workers, two servers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import keras
import parameter_server_cases
import pytest
import tensorflow as tf
from parameter_server_cases import BATCH, ROWS, RowCount, make_data, make_model
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration import refusals

strategy = parameter_server_cases.strategy


def test_an_error_on_a_worker_names_it(strategy: Any) -> None:
    def dataset_fn(context: Any) -> tf.data.Dataset:
        bad = tf.data.Dataset.range(100).map(lambda i: tf.debugging.check_numerics(1.0 / tf.cast(7 - i, "float32"), "!"))
        return bad.map(lambda v: (tf.fill([BATCH, 4], v), tf.zeros([BATCH, 1])))

    model = make_model(strategy, metrics=[RowCount()])
    with pytest.raises(RuntimeError, match=r"Worker \d \(127.0.0.1:\d+\) raised InvalidArgumentError"):
        model.fit(tfrep.DatasetCreator(dataset_fn), steps_per_epoch=50, verbose=0)
    x, y = make_data()
    assert model.fit(x, y, batch_size=BATCH, verbose=0).history["rows"] == [ROWS]  # The workers are still there.


def test_an_interrupted_training_leaves_nothing_behind(strategy: Any) -> None:
    class Stop(keras.callbacks.Callback):
        supports_remote_logs = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                raise KeyboardInterrupt

    x, y = make_data()
    model = make_model(strategy, metrics=[RowCount()])
    for use in (model.fit, model.evaluate):
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Stop()])
        rows = use(x, y, batch_size=BATCH, verbose=0)
        assert (rows.history["rows"] if use == model.fit else rows[1:]) == [ROWS]
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Stop()])
    assert model.train_on_batch(x, y, return_dict=True)["rows"] == ROWS


@pytest.mark.skipif(not find_spec("tf_keras"), reason="needs the extra bench (tf_keras)")
def test_keras_2(strategy: Any) -> None:
    import tf_keras

    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        with refuses(code="TFREP-E002", told=["`compile`", "tf_keras"]):
            model.compile("sgd", "mse")


def test_a_model_made_outside_the_scope_trains_here(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_warned", set())  # Another test may have been told.
    refusals.note(strategy)  # Of the module: a test begins without the strategies of those before.
    x, y = make_data()
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="`fit` got a model made outside the strategy's scope, so only one device works"):
        model.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ({"run_eagerly": True}, {}, "run_eagerly"),
        ({}, {"x": tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2, 1]))).repeat()}, "steps_per_epoch"),
    ],
)
def test_bad_input(strategy: Any, options: Any, arguments: Any, text: str) -> None:
    x, y = make_data()
    model = make_model(strategy, **options)
    with pytest.raises(ValueError, match=text):
        model.fit(**(arguments or {"x": x, "y": y}), verbose=0)


def test_a_dataset_function_that_returns_something_else(strategy: Any) -> None:
    with pytest.raises(TypeError, match="must return a `tf.data.Dataset`"):
        make_model(strategy).fit(tfrep.DatasetCreator(lambda context: [1, 2]), steps_per_epoch=2, verbose=0)


def test_a_layer_that_talks_to_other_replicas(strategy: Any) -> None:
    class Sums(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tfrep.all_sum(inputs)

    with refuses(hint="MultiWorkerStrategy for collectives", strategy="ParameterServerStrategy"):
        make_model(strategy, layers=(Sums(),))


def _resolver(task_type: str | None = None, **jobs: list[str]) -> Any:
    spec = tf.train.ClusterSpec(jobs)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc", task_type=task_type, task_id=0)


@pytest.mark.parametrize(
    ("jobs", "settings", "text"),
    [
        ({"worker": ["127.0.0.1:1"]}, {}, "no parameter server"),
        ({"ps": ["127.0.0.1:1"]}, {}, "no worker"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "task_type": "evaluator"}, {}, "SidecarEvaluator"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, {"max_in_flight": 0}, "max_in_flight"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, {"replicas_to_aggregate": 1}, "sync"),
        (
            {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]},
            {"sync": True, "replicas_to_aggregate": 2},
            "of at most 1 workers",
        ),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, {"variable_partitioner": 3}, "partitioner"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, {"connect_timeout": 0}, "connect_timeout"),
        ({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, {"coordinator_timeout": 0}, "coordinator_timeout"),
    ],
)
def test_bad_clusters_and_settings(jobs: Any, settings: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tfrep.ParameterServerStrategy(_resolver(**jobs), **settings)


def test_an_address_where_nobody_listens_is_named() -> None:
    resolver = _resolver(ps=["127.0.0.1:1"], worker=["127.0.0.1:2"])
    with pytest.raises(RuntimeError, match=r"127.0.0.1:2 \(worker 0\)"):
        tfrep.ParameterServerStrategy(resolver, connect_timeout=0.5)


@pytest.mark.parametrize("counts", [{"workers": 0}, {"servers": 0}, {"workers": 1.5}, {"servers": True}])
def test_bad_local_clusters(counts: Any) -> None:
    with refuses(**counts), tfrep.local_cluster(**counts):
        pass
