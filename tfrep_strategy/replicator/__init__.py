"""TF-Replicator's programming model: an input function, a step function, and a loop of one's own."""

from tfrep_strategy.replicator.inputs import InputContext, InputReplicationMode
from tfrep_strategy.replicator.kinds import MultiGpuReplicator, MultiWorkerReplicator, TpuReplicator
from tfrep_strategy.replicator.loop import Replicator
from tfrep_strategy.replicator.parameter_server import ParameterServerReplicator

__all__ = [
    "InputContext", "InputReplicationMode", "MultiGpuReplicator", "MultiWorkerReplicator", "ParameterServerReplicator",
    "Replicator", "TpuReplicator",
]  # fmt: skip
