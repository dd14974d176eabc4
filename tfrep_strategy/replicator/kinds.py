"""Replicators that make their own strategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.replicator.loop import Replicator
from tfrep_strategy.strategies.mirrored import MirroredStrategy
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy


class MultiGpuReplicator(Replicator):
    """Replicas on the GPUs of this process.

    Args:
        num_gpus: The number of GPUs. Default: all.
        **options: As for `Replicator`.

    Raises:
        ConfigurationError: There are fewer GPUs.
    """

    def __init__(self, num_gpus: int | None = None, **options: Any) -> None:
        present = len(tf.config.list_logical_devices("GPU"))
        wanted = present if num_gpus is None else num_gpus
        if not 1 <= wanted <= present:
            raise ConfigurationError(
                message(
                    f"TensorFlow sees {present} GPUs.",
                    hint="use fewer, or tfrep.Replicator(tfrep.MirroredStrategy(tfrep.use_logical_cpus(n))) on a CPU.",
                    num_gpus=num_gpus,
                )
            )
        super().__init__(MirroredStrategy([f"GPU:{i}" for i in range(wanted)]), **options)


class MultiWorkerReplicator(Replicator):
    """One replica in each process of the run.

    Args:
        communicator: As for `MultiWorkerStrategy`.
        device: As for `MultiWorkerStrategy`.
        **options: As for `Replicator`.

    Example:
        >>> MultiWorkerReplicator().num_replicas_in_sync
        1
    """

    def __init__(self, communicator: Any = "auto", device: str | None = None, **options: Any) -> None:
        super().__init__(MultiWorkerStrategy(communicator, device), **options)


class TpuReplicator(Replicator):
    """Replicas on the cores of a TPU, with TensorFlow's own strategy. It was not tested on a TPU so far.

    Args:
        num_workers: The number of hosts of the TPU.
        num_tpu_cores_per_worker: The number of cores of each host.
        tpu: Name or address of the TPU. Default: the TPU of this machine.
        **options: As for `Replicator`.

    Raises:
        ConfigurationError: There is no TPU, or it has another number of cores.
    """

    def __init__(self, num_workers: int = 1, num_tpu_cores_per_worker: int = 8, tpu: str = "local", **options: Any) -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
            if tpu not in ("", "local"):
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            strategy = tf.distribute.TPUStrategy(resolver)
        except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
            hint = "give the name of a TPU, or use tfrep.Replicator(tfrep.MirroredStrategy())."
            raise ConfigurationError(message("TensorFlow finds no TPU here.", hint, tpu=tpu)) from error
        check_cores(strategy.num_replicas_in_sync, num_workers, num_tpu_cores_per_worker)
        super().__init__(strategy, **options)


def check_cores(present: int, num_workers: int, num_tpu_cores_per_worker: int) -> None:
    if present != num_workers * num_tpu_cores_per_worker:
        raise ConfigurationError(
            message(
                f"The TPU has {present} cores.",
                hint="num_workers times num_tpu_cores_per_worker must be this number.",
                num_workers=num_workers,
                num_tpu_cores_per_worker=num_tpu_cores_per_worker,
            )
        )
