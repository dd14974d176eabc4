"""Twenty names of older years and of other packages. An error shows the line to write today.

Articles on TF-Replicator, Horovod and the first versions of `tf.distribute` use them. docs/migration/old_spellings.md lists them,
and others, which fail without a message of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tfrep_strategy.errors import message

_LEAVE_OUT = "leave it out: "

OF_PACKAGE = {
    "MultiWorkerMirroredStrategy": "write tfrep.MultiWorkerStrategy().",
    "CollectiveAllReduceStrategy": "write tfrep.MultiWorkerStrategy().",
    "OneDeviceStrategy": 'write tfrep.MirroredStrategy(["GPU:0"]).',
    "DistributedOptimizer": "write the optimizer itself, such as keras.optimizers.SGD(0.1): strategies sum its gradients.",
    "DistributedGradientTape": "write tf.GradientTape(): optimizer.apply sums gradients, in a step of strategy.run.",
    "init": _LEAVE_OUT + "making a strategy, or `tfrep run`, connects the processes.",
    "rank": "write tfrep.replica_id() in a step, and tfrep.is_chief() outside of it, or the rank of a MultiWorkerStrategy.",
    "size": "write tfrep.num_replicas() in a step, and strategy.num_replicas_in_sync outside of it.",
    "MultiGpuReplicator": "write tfrep.Replicator(tfrep.MirroredStrategy()).",
    "TpuReplicator": "write tfrep.Replicator(tf.distribute.TPUStrategy(resolver)).",
    "local_rank": _LEAVE_OUT + "each process takes its own GPU.",
    "allreduce": 'write tfrep.all_mean(value), or tfrep.all_reduce(value, "sum"), in a step; all_gather_object(value) outside.',
    "allgather": "write tfrep.all_gather(value) in a step, and tfrep.all_gather_object(value) outside of it.",
    "broadcast_variables": _LEAVE_OUT + "new variables get rank 0's values.",
}
"""Names of `tfrep_strategy`."""

MOVED_MODULES = {
    "callbacks": "training.callbacks",
    "collectives": "training.collectives",
    "digits": "contrib.digits",
    "doctor": "contrib.doctor",
    "environments": "cluster.environments",
    "estimator": "contrib.estimator",
    "replicator": "training.replicator",
}
"""Modules that programs import by their names in 0.2, and their present places."""

LOST_MODULES = {"examples": "what the notebooks need is in notebooks/helpers.py and notebooks/pictures.py."}
"""Removed modules of 0.2."""

OF_STRATEGIES = {
    "experimental_run_v2": "write strategy.run(fn, args=(...)), in a tf.function.",
    "distribute_dataset": "write iter(strategy.experimental_distribute_dataset(dataset)).",
    "make_input_iterator": "write iter(strategy.distribute_datasets_from_function(fn)).",
    "num_replicas": "write strategy.num_replicas_in_sync.",
}
"""Names of strategies."""

OF_REPLICATORS = {
    "scope": "write repl.context().",
    "all_reduce": "write tfrep.all_reduce(value), in the step.",
}
"""Names of replicators."""


class ShowsNewNames:
    """Base of classes that show, for an attribute of older years, the line to write today.

    Example:
        >>> class Model(ShowsNewNames):
        ...     _old_names = {"fit_generator": "write model.fit(generator)."}
        >>> Model().fit_generator
        Traceback (most recent call last):
        ...
        AttributeError: 'Model' object has no attribute 'fit_generator'.
        Hint: write model.fit(generator).
    """

    _old_names: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # A type checker would take any name.

        def __getattr__(self, name: str) -> Any:
            line = type(self)._old_names.get(name)
            if line is None:
                return object.__getattribute__(self, name)  # Raises Python's error, or the error of a property.
            owner = f"{type(self).__name__!r} object"
            raise AttributeError(message(f"{owner} has no attribute {name!r}.", hint=line), name=name, obj=self)
