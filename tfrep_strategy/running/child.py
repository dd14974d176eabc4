"""What happens inside a rank before the user's code runs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.startup_log import quiet_start

STRATEGIES = ("auto", "mirrored", "multi-worker")
"""What a run may be asked for."""

# A rank finds this package where its launcher found it, whatever folder it is started in. It gets its own search path
# back before the user's script runs.
_BOOTSTRAP = (
    "import json, sys; own = sys.path[:]; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfrep_strategy.running.{module} import main; main(sys.argv[2:], own)"
)


def rank_command(module: str, *arguments: str) -> list[str]:
    """Gives the command line of a rank.

    Args:
        module: Module of this folder whose `main` it runs.
        *arguments: What `main` gets.

    Returns:
        The command line.

    Example:
        >>> rank_command("script", "note.json", "script", "train.py")[1]
        '-c'
    """
    return [
        sys.executable,
        "-c",
        _BOOTSTRAP.format(module=module),
        json.dumps(sys.path),
        *arguments,
    ]


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

        import tfrep_strategy as tfrep
        from tfrep_strategy.running.stand_ins import put, strategy_everywhere

        gpus = tf.config.get_visible_devices("GPU")
    for gpu in gpus:  # Ranks may share them, and scripts ask for it when it is too late.
        tf.config.experimental.set_memory_growth(gpu, True)
    if os.environ["TFREP_STRATEGY"] == "mirrored":
        _show_devices(int(os.environ["TFREP_NUM_REPLICAS"]))
    runs_on_servers = os.environ["TFREP_STRATEGY"] == "parameter-server"
    strategy = tfrep.ParameterServerStrategy() if runs_on_servers else tfrep.auto_strategy()
    with contextlib.ExitStack() as stack:
        if runs_on_servers:
            stack.enter_context(tfrep.exit_on_server_loss(strategy))
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
        yield strategy


def _warns_when_late(setting: Callable[..., None]) -> Callable[..., None]:
    """Lets a script go on whose settings come when the run's strategy has started TensorFlow already."""

    @functools.wraps(setting)
    def set_or_warn(*args: Any, **kwargs: Any) -> None:
        try:
            setting(*args, **kwargs)
        except RuntimeError as error:
            warnings.warn(f"tf.config: {setting.__name__} has no effect in this run. {str(error).rstrip('.')}.", stacklevel=2)

    return set_or_warn


def _show_devices(count: int) -> None:
    """Lets TensorFlow see as many devices as a mirrored strategy is to have replicas: GPUs if there are any."""
    import tensorflow as tf

    import tfrep_strategy as tfrep

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        tfrep.use_logical_cpus(count)
    elif count <= len(gpus):
        tf.config.set_visible_devices(gpus[:count], "GPU")
    else:
        raise ConfigurationError(
            message(
                "There are not that many GPUs.",
                hint="use fewer replicas, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to use the CPU.",
                num_replicas=count,
                gpus=len(gpus),
            )
        )
