"""Distributed training for unmodified Keras 3, with results that match single-device training."""

import sys
from typing import TYPE_CHECKING

from tfrep_strategy._lazy import OldModuleNames, names_loaded_when_used
from tfrep_strategy._platform import refuse_other_systems
from tfrep_strategy._version import __version__
from tfrep_strategy.core.old_spellings import LOST_MODULES, MOVED_MODULES, OF_PACKAGE

refuse_other_systems()
sys.meta_path.insert(0, OldModuleNames(__name__, MOVED_MODULES, LOST_MODULES))
if TYPE_CHECKING:
    from tfrep_strategy import communicators as communicators
    from tfrep_strategy import errors as errors
    from tfrep_strategy.cluster import environments as environments
    from tfrep_strategy.cluster.environments import Environment, register_environment
    from tfrep_strategy.cluster.flight_recorder import flight_recorder
    from tfrep_strategy.cluster.resolver import local_cluster
    from tfrep_strategy.cluster.transports import register_communicator
    from tfrep_strategy.communicators import Communicator
    from tfrep_strategy.contrib import digits as digits
    from tfrep_strategy.contrib import estimator as estimator
    from tfrep_strategy.keras_integration.dataset_creator import DatasetCreator
    from tfrep_strategy.keras_integration.saving.model_files import TimedCheckpoint
    from tfrep_strategy.running import launch
    from tfrep_strategy.running.coordinator import exit_on_server_loss
    from tfrep_strategy.strategies.auto import auto_strategy
    from tfrep_strategy.strategies.keras_distribution import enable_keras_distribution
    from tfrep_strategy.strategies.logical_devices import logical_device
    from tfrep_strategy.strategies.mirrored import MirroredStrategy, use_logical_cpus
    from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy
    from tfrep_strategy.strategies.parameter_server import ParameterServerStrategy
    from tfrep_strategy.strategies.partitioned_functions import partition
    from tfrep_strategy.training import callbacks as callbacks
    from tfrep_strategy.training.collectives import (
        all_gather,
        all_gather_object,
        all_mean,
        all_reduce,
        all_sum,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        chief_first,
        is_chief,
        map_gather,
        map_reduce,
        num_replicas,
        reduce_scatter,
        replica_id,
    )
    from tfrep_strategy.training.ending import is_ending
    from tfrep_strategy.training.replicator import InputContext, InputReplicationMode, ParameterServerReplicator, Replicator
    from tfrep_strategy.training.sidecar_evaluator import SidecarEvaluator
else:
    __getattr__, __dir__ = names_loaded_when_used(__name__, {
        "cluster.environments": ["Environment", "register_environment"], "cluster.flight_recorder": ["flight_recorder"],
        "cluster.resolver": ["local_cluster"],
        "cluster.transports": ["register_communicator"], "communicators": ["Communicator"],
        "keras_integration.dataset_creator": ["DatasetCreator"], "keras_integration.saving.model_files": ["TimedCheckpoint"],
        "running": ["launch"], "running.coordinator": ["exit_on_server_loss"], "strategies.auto": ["auto_strategy"],
        "strategies.keras_distribution": ["enable_keras_distribution"],
        "strategies.logical_devices": ["logical_device"], "strategies.mirrored": ["MirroredStrategy", "use_logical_cpus"],
        "strategies.multi_worker": ["MultiWorkerStrategy"], "strategies.parameter_server": ["ParameterServerStrategy"],
        "strategies.partitioned_functions": ["partition"],
        "training.collectives": [
            "all_gather", "all_gather_object", "all_mean", "all_reduce", "all_sum", "all_to_all", "barrier", "broadcast",
            "broadcast_object", "chief_first", "is_chief", "map_gather", "map_reduce", "num_replicas", "reduce_scatter",
            "replica_id",
        ],
        "training.ending": ["is_ending"],
        "training.replicator": ["InputContext", "InputReplicationMode", "ParameterServerReplicator", "Replicator"],
        "training.sidecar_evaluator": ["SidecarEvaluator"],
    }, OF_PACKAGE)  # fmt: skip

__all__ = [
    "Communicator", "DatasetCreator", "Environment", "InputContext", "InputReplicationMode", "MirroredStrategy",
    "MultiWorkerStrategy", "ParameterServerReplicator", "ParameterServerStrategy",
    "Replicator", "SidecarEvaluator", "TimedCheckpoint", "__version__", "all_gather", "all_gather_object",
    "all_mean", "all_reduce", "all_sum", "all_to_all", "auto_strategy", "barrier", "broadcast", "broadcast_object", "chief_first",
    "enable_keras_distribution",
    "exit_on_server_loss", "flight_recorder", "is_chief", "is_ending", "launch", "local_cluster", "logical_device", "map_gather",
    "map_reduce",
    "num_replicas", "partition",
    "reduce_scatter", "register_communicator", "register_environment", "replica_id", "use_logical_cpus",
]  # fmt: skip
