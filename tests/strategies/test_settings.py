"""Settings of strategies: each is an argument and an attribute, and is checked as both; and how many names a strategy shows."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.strategies.settings import take_settings

pytestmark = pytest.mark.lane("quick")

_SETTINGS = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
_CLASSES = (tfrep.MirroredStrategy, tfrep.MultiWorkerStrategy, tfrep.ParameterServerStrategy)
_MOST_NAMES = 19

SYNCHRONOUS = [
    ("compression", "bf16", ["int8", 16, True, ["bf16"]]),
    ("bucket_bytes", 1 << 20, [0, -1, 1.5, "1", True]),
    ("densify_sparse_gradients", True, [1, "yes", None]),
    ("gradient_transformers", [abs], [5, "abs", [5], None]),
    ("gradient_aggregator", max, [5, "sum"]),
    ("check_sync_every", 3, [0, 2.5, "3", False]),
    ("shard_optimizer_state", True, [1, "yes", None]),
    ("shard_weights", True, [1, "yes", None]),
    ("shard_weights_min_bytes", 1, [0, -1, "1", None]),
    ("batch_statistics", "replica", ["own", True, None]),
    ("allow_plain_models", True, [1, "yes", None]),
    ("partition_functions", False, [1, "yes", None]),
]
OF_CLASS: dict[type, list[tuple[str, Any, list[Any]]]] = {
    tfrep.MirroredStrategy: [
        *SYNCHRONOUS,
        ("devices", ["CPU:1", "CPU:0"], [["CPU:9"], [], ["CPU:0", "CPU:0"], [0, 1], "CPU:0"]),
        ("devices_per_replica", 2, [0, 3, "2", 1.0]),
        ("keras_layer_placement", {"dense": 0}, [["dense"], {"dense": 1}]),
    ],
    tfrep.MultiWorkerStrategy: [
        *SYNCHRONOUS,
        ("communicator", None, ["none", 5]),
        ("device", "CPU:1", ["CPU:9"]),
        ("rank_data", "own", ["shared", None]),
    ],
    tfrep.ParameterServerStrategy: [
        ("variable_partitioner", tf.distribute.experimental.partitioners.FixedShardsPartitioner(1), [5, "cut"]),
        ("max_in_flight", 2, [0, 1.5, "2"]),
        ("sync", True, [1, None]),
        ("replicas_to_aggregate", 1, [0, 2, "1"]),
        ("worker_timeout", 30, [0, -1, "30", None, float("nan"), True]),
        ("connect_timeout", 5.5, [0, "5"]),
        ("coordinator_timeout", 60.0, [0, "60"]),
        ("allow_plain_models", True, [1, None]),
    ],
}
FIXED = {
    "devices", "devices_per_replica", "keras_layer_placement", "communicator", "device", "variable_partitioner", "sync",
    "replicas_to_aggregate", "connect_timeout", "coordinator_timeout", "shard_optimizer_state", "shard_weights",
    "shard_weights_min_bytes", "batch_statistics",
}  # fmt: skip


_NEEDED = {"replicas_to_aggregate": {"sync": True}, "shard_weights": {"shard_optimizer_state": True}}


def _shown(strategy: Any) -> list[str]:
    return [name for name in dir(strategy) if not name.startswith("_") and not hasattr(tf.distribute.Strategy, name)]


def _check(kind: type, make: Any) -> None:
    """Sets each setting as an argument and as an attribute: to a good value, and to bad ones."""
    for name, good, bad in OF_CLASS[kind]:
        options = _NEEDED.get(name, {})
        strategy = make(**options) if good is None else make(**options, **{name: good})
        assert good is None or getattr(strategy, name) == good, name
        assert len(_shown(strategy)) <= _MOST_NAMES, _shown(strategy)
        for value in bad:
            with pytest.raises(ConfigurationError, match=r"(?s)Received: .*\nHint: ."):
                make(**options, **{name: value})
            with pytest.raises(ConfigurationError, match=rf"(?s){name}.*Received: {name}=.*\nHint: ."):
                setattr(strategy, name, value)
        assert good is None or getattr(strategy, name) == good, name
        if name in FIXED:
            with refuses(code="TFREP-E008", told=[name], **{name: good}):
                setattr(strategy, name, good)
        else:
            setattr(make(**options), name, good)


def test_settings_of_mirrored_replicas() -> None:
    def make(**options: Any) -> Any:
        return tfrep.MirroredStrategy(**{"devices": ["CPU:0", "CPU:1"]} | options)

    _check(tfrep.MirroredStrategy, make)
    assert make().devices == ["CPU:0", "CPU:1"]


def test_settings_of_processes() -> None:
    _check(tfrep.MultiWorkerStrategy, tfrep.MultiWorkerStrategy)
    assert isinstance(tfrep.MultiWorkerStrategy().communicator, tfrep.Communicator)


def of_parameter_servers() -> None:
    with tfrep.local_cluster(workers=1, servers=1) as cluster:
        _check(tfrep.ParameterServerStrategy, lambda **options: tfrep.ParameterServerStrategy(cluster, **options))


@pytest.mark.lane("short")
def test_settings_of_parameter_servers() -> None:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # A process that has been connected to a cluster has other devices.
    done = subprocess.run(command(of_parameter_servers), env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_transformer_that_is_added_later_is_checked() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0"])
    strategy.gradient_transformers.append(5)
    with refuses(told=["gradient_transformers"], gradient_transformers=[5]):
        strategy.extended.transform_gradients([tf.ones(1)], [])


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_the_table_has_every_setting(kind: type) -> None:
    of_kind = [part for part in _SETTINGS.split("\n## ") if f"`{kind.__name__}`" in part.partition("\n")[0]]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (yes|no) \|", "\n".join(of_kind), re.MULTILINE)
    told = {name: (default, settable) for name, default, settable in rows}
    parameters = list(inspect.signature(kind).parameters.values())
    assert set(told) == {parameter.name for parameter in parameters}
    tested = {name for name, _, _ in OF_CLASS[kind]}
    assert set(told) - tested <= {"cluster_resolver"}
    for parameter in parameters:
        default, settable = told[parameter.name]
        written = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        assert default.strip() == repr(written).replace("'", '"'), parameter.name
        assert settable == ("no" if parameter.name in FIXED | {"cluster_resolver"} else "yes"), parameter.name


def test_what_a_strategy_is_built_on_is_not_taken_later():
    strategy = tfrep.MirroredStrategy(["CPU:0"])
    take_settings(strategy, tfrep.MirroredStrategy, (["CPU:1"],), {"devices_per_replica": 1, "check_sync_every": 3})
    assert (strategy.devices, strategy.check_sync_every) == (["CPU:0"], 3)
    with refuses(code="TFREP-E008", devices_per_replica=2):
        take_settings(strategy, tfrep.MirroredStrategy, (), {"devices_per_replica": 2})
