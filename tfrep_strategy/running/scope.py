"""The scope in which a run calls the user's code: that of the strategy which the launcher asked for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfrep_strategy.cluster.events import of_run
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.core.limits import verification
from tfrep_strategy.core.validation import Size, variable
from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.running.coordinator import exit_on_server_loss


@contextlib.contextmanager
def run_strategy_scope() -> Iterator[Any]:
    """Makes the strategy that the launcher asked for, and enters its scope.

    Code that makes its own strategy inside, TensorFlow's or ours, gets this one.

    Yields:
        The strategy.

    Example:
        >>> os.environ["TFREP_STRATEGY"] = "multi-worker"
        >>> with run_strategy_scope() as strategy:
        ...     tf.distribute.MirroredStrategy() is strategy
        True
    """
    with quiet_start():
        import tensorflow as tf

        from tfrep_strategy.keras_integration.profiled_fit import say_without_fit
        from tfrep_strategy.running.stand_ins import put, strategy_everywhere
        from tfrep_strategy.strategies.auto import auto_strategy
        from tfrep_strategy.strategies.keras_distribution import enable_keras_distribution
        from tfrep_strategy.strategies.parameter_server import ParameterServerStrategy

        gpus = tf.config.get_visible_devices("GPU")
    if verification() is not None:
        from keras.utils import set_random_seed

        set_random_seed(0)  # A script without a seed begins with the same weights in each run.
        tf.config.experimental.enable_tensor_float_32_execution(False)  # GPUs would round products to 10 bits.
    for gpu in gpus:  # Ranks may share them, and scripts ask for it when it is too late.
        tf.config.experimental.set_memory_growth(gpu, True)
    if os.environ["TFREP_STRATEGY"] == "mirrored":
        _show_devices(variable(Size, "TFREP_NUM_REPLICAS"))
    runs_on_servers = os.environ["TFREP_STRATEGY"] == "parameter-server"
    strategy = ParameterServerStrategy() if runs_on_servers else auto_strategy()
    enable_keras_distribution()
    with contextlib.ExitStack() as stack:
        if runs_on_servers:
            stack.enter_context(exit_on_server_loss(strategy))
        stack.enter_context(strategy_everywhere(strategy))
        for owner, name in (
            (tf.config, "set_logical_device_configuration"),
            (tf.config, "set_visible_devices"),
            (tf.config.experimental, "set_memory_growth"),
            (tf.config.threading, "set_inter_op_parallelism_threads"),
            (tf.config.threading, "set_intra_op_parallelism_threads"),
        ):
            put(stack, owner, name, _warns_when_late(getattr(owner, name)))
        stack.enter_context(strategy.scope())
        of_run().tell("ready", replicas=strategy.num_replicas_in_sync)
        yield strategy
        if getattr(strategy.extended, "is_chief", True):
            say_without_fit()


def _warns_when_late(setting: Callable[..., None]) -> Callable[..., None]:
    """Lets a script go on whose settings come when the run's strategy has started TensorFlow already."""

    @functools.wraps(setting)
    def set_or_warn(*args: Any, **kwargs: Any) -> None:
        try:
            setting(*args, **kwargs)
        except RuntimeError as error:
            warn(f"tf.config: {setting.__name__} has no effect in this run. {str(error).rstrip('.')}.")

    return set_or_warn


def _show_devices(count: int) -> None:
    """Lets TensorFlow see as many devices as a mirrored strategy is to have replicas: GPUs if there are any."""
    import tensorflow as tf

    from tfrep_strategy.strategies.mirrored import use_logical_cpus

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        use_logical_cpus(count)
    elif count <= len(gpus):
        tf.config.set_visible_devices(gpus[:count], "GPU")
    else:
        raise ConfigurationError(
            message(
                "There are not that many GPUs.",
                hint="use fewer replicas, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to use the CPU.",
                code="TFREP-E010",
                num_replicas=count,
                gpus=len(gpus),
            )
        )
