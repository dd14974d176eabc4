"""Whatever public name a script makes a strategy by, it gets the run's, and the name keeps its other meanings."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.running.scope import run_strategy_scope

pytestmark = pytest.mark.lane("quick")

BASES = (tf.distribute.Strategy, tf.compat.v1.distribute.Strategy)


def public_strategies() -> list[tuple[Any, str, type]]:
    """Every name in TensorFlow's public modules, and in this package's, that is a strategy: module, name and class."""
    public = [module for name, module in sys.modules.items() if name.startswith("tensorflow._api.")]
    assert all(hasattr(tfrep, name) for name in tfrep.__all__)  # Names of the package are loaded when they are used.
    return [
        (module, name, value)
        for module in (*public, tfrep)
        for name, value in list(vars(module).items())
        if isinstance(value, type) and issubclass(value, BASES) and value not in BASES
    ]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("TFREP_STRATEGY", "multi-worker")
    with run_strategy_scope() as strategy:
        yield strategy


def test_every_public_name_gives_the_strategy_of_the_run(monkeypatch):
    stock = public_strategies()
    names = {name for _, name, _ in stock}
    assert {"OneDeviceStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy", "TPUStrategy"} < names
    monkeypatch.setenv("TFREP_STRATEGY", "multi-worker")
    with run_strategy_scope() as strategy:
        for module, name, cls in stock:
            stand_in = getattr(module, name)
            assert isinstance(stand_in, type), (module.__name__, name)
            if name == "TPUStrategy":
                with refuses(told=["test_stand_ins.py:", "TPUStrategy"]):
                    stand_in()
            else:
                assert stand_in("GPU:7") is strategy, (module.__name__, name)
            assert issubclass(cls, stand_in)
            assert not issubclass(str, stand_in)
            assert isinstance(strategy, stand_in) == isinstance(strategy, cls)
            assert stand_in.scope is cls.scope
    assert public_strategies() == stock


def test_as_scripts_write_them(run):
    import tensorflow.compat.v1 as tf1
    import tensorflow.compat.v2 as tf2
    from tensorflow.compat.v1 import distribute

    made = [
        tf.distribute.OneDeviceStrategy(device="/gpu:0"),
        tf.distribute.experimental.CentralStorageStrategy(),
        tf.distribute.experimental.MultiWorkerMirroredStrategy(
            communication=tf.distribute.experimental.CollectiveCommunication.AUTO
        ),
        tf1.distribute.MirroredStrategy(devices=["/gpu:0"]),
        tf1.distribute.experimental.CentralStorageStrategy(),
        tf2.distribute.MirroredStrategy(),
        tf2.compat.v1.distribute.OneDeviceStrategy("/cpu:0"),
        distribute.experimental.ParameterServerStrategy(),
        tfrep.auto_strategy(),
    ]
    assert all(each is run for each in made)


def test_names_keep_their_meaning(run):
    stand_in = tf.distribute.OneDeviceStrategy

    class Own(stand_in):
        def __init__(self, device: str, answer: int) -> None:
            super().__init__(device)
            self.answer = answer

    own = Own("/cpu:0", 42)
    assert own.answer == 42
    assert isinstance(own, stand_in)
    assert isinstance(own, Own)
    assert issubclass(Own, stand_in)
    assert not isinstance(run, Own)
    assert not isinstance(run, stand_in)
    assert isinstance(run, tfrep.MultiWorkerStrategy)
    assert isinstance(run, tf.distribute.Strategy)
    assert own.num_replicas_in_sync == 1
    assert isinstance(None, stand_in | None)
    assert stand_in.__name__ == "OneDeviceStrategy"
    assert tf.distribute.get_strategy() is run


def test_unknown_arguments_are_told_in_a_run(run):
    with pytest.raises(TypeError, match="no_such_argument"):
        tfrep.MirroredStrategy(no_such_argument=2)


def test_a_strategy_of_the_run_takes_settings(run):
    def double(gradients):
        return [2.0 * gradient for gradient in gradients]

    with pytest.warns(UserWarning, match="(?s)This run uses the communicator .*`tfrep run --communicator horovod`"):
        made = tfrep.MultiWorkerStrategy(
            "horovod", bucket_bytes=1 << 10, gradient_transformers=[double], shard_optimizer_state=True, compression="bf16"
        )
    assert made is run
    assert (run.bucket_bytes, run.compression, run.shard_optimizer_state) == (1 << 10, "bf16", True)
    assert run.gradient_transformers == [double]
    assert run.communicator.name != "horovod"  # The launcher has chosen.
    assert tfrep.MirroredStrategy(["GPU:7"], densify_sparse_gradients=True) is run
    assert run.densify_sparse_gradients
    assert run.compression == "bf16"
    with refuses(bucket_bytes=0):
        tfrep.MultiWorkerStrategy(bucket_bytes=0)
    with pytest.warns(UserWarning, match="MultiWorkerStrategy, which has no setting devices_per_replica"):
        tfrep.MirroredStrategy(devices_per_replica=2)
    with pytest.raises(TypeError, match="bucket_byte"):
        tfrep.MultiWorkerStrategy(bucket_byte=1 << 10)
