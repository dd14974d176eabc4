"""TF-Replicator's programming model: an input function, a step function, and your own training loop.

Sources: Buchlovsky et al., "TF-Replicator: Distributed Machine Learning for Researchers" (arXiv:1902.00465), and
TensorFlow's RFC "Distribution Strategy - Revised API" (2018).
"""

from tfrep_strategy.replicator.inputs import InputContext, InputReplicationMode
from tfrep_strategy.replicator.loop import Replicator
from tfrep_strategy.replicator.on_workers import ParameterServerReplicator

__all__ = ["InputContext", "InputReplicationMode", "ParameterServerReplicator", "Replicator"]
