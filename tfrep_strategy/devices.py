"""Chooses the GPUs of this process, and reports GPUs that TensorFlow cannot use."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import runtime_has_started
from tfrep_strategy.errors import ConfigurationError, message, shown, warn
from tfrep_strategy.nvidia import driver_gpus


def own_gpu(num_visible: int, local_rank: int, local_size: int) -> int | None:
    """Chooses the GPU of a process among those that it sees.

    A scheduler, or the user, may show each process one GPU; then there is nothing to choose. Processes that see several
    GPUs take them by local rank.

    Args:
        num_visible: How many GPUs the process sees.
        local_rank: Rank of the process among those of the run on this machine.
        local_size: How many processes of the run are on this machine.

    Returns:
        The number of the GPU; None if the process keeps all GPUs that it sees.

    Example:
        >>> [own_gpu(8, rank, 8) for rank in (0, 7)], own_gpu(1, 3, 8), own_gpu(8, 0, 1)
        ([0, 7], None, None)
    """
    return local_rank % num_visible if num_visible > 1 and local_size > 1 else None


def take_own_gpu(local_rank: int, local_size: int) -> None:
    """Shows TensorFlow one GPU, and lets its memory grow, if several processes share the GPUs of this machine.

    Otherwise every process would open a context and take memory on every GPU, and NCCL would find one GPU twice. Earlier
    settings are kept: the choice is among the visible devices, and logical devices and memory limits stay. Once TensorFlow
    has started, nothing can be changed.

    Args:
        local_rank: Rank of this process among those of the run on this machine.
        local_size: How many processes of the run are on this machine.
    """
    if runtime_has_started():
        return
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        warn_of_unseen_gpus()
        return
    own = own_gpu(len(visible), local_rank, local_size)
    if own is not None:
        visible = visible[own : own + 1]
        tf.config.set_visible_devices(visible, "GPU")
    elif len(visible) > 1:
        warn(
            f"This process sees {len(visible)} GPUs, and its one replica uses the first.\n"
            f"Hint: `tfrep run -n {len(visible)}` starts a process for each; MirroredStrategy() uses all from one process.",
        )
    if local_size > 1:
        for gpu in visible:
            with contextlib.suppress(ValueError):  # A GPU with a memory limit cannot grow its memory.
                tf.config.experimental.set_memory_growth(gpu, True)


def warn_of_unseen_gpus() -> None:
    """Warns if TensorFlow cannot use the GPUs of this machine. TensorFlow itself mentions it in its log only."""
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ or tf.config.list_physical_devices("GPU")
    gpus = [] if hidden else driver_gpus()
    if gpus:
        warn(
            message(
                f"The driver sees {len(gpus)} GPU(s) and TensorFlow none, so this run uses the CPU.",
                hint="pip install 'tensorflow[and-cuda]', or name the folders of CUDA's libraries in LD_LIBRARY_PATH."
                " To use the CPU, set CUDA_VISIBLE_DEVICES=-1.",
                LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""),
            ),
        )


def replica_device(local_rank: int) -> str:
    """Names the device of the one replica of a process, without starting TensorFlow.

    Args:
        local_rank: Rank of this process among those of the run on this machine.

    Returns:
        `"GPU:0"`, `"GPU:1"`, ..., or `"CPU:0"` if the process sees no GPU.
    """
    limits = [tf.config.get_logical_device_configuration(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    num_logical = sum(len(logical or [None]) for logical in limits)
    return f"GPU:{local_rank % num_logical}" if num_logical else "CPU:0"


def logical_devices(kind: str | None = None) -> list[Any]:
    """Lists the logical devices of this process. It starts TensorFlow.

    TensorFlow's own list contains the devices of all processes that it connects.

    Args:
        kind: "CPU", "GPU", or None for all.

    Raises:
        ConfigurationError: A GPU cannot be used: it is busy in exclusive mode, or has no memory left.
    """
    try:
        devices = tf.config.list_logical_devices(kind)
    except (tf.errors.OpError, RuntimeError) as error:
        if "CUDA" not in str(error) and "GPU" not in str(error):
            raise
        raise ConfigurationError(
            message(
                f"TensorFlow cannot use a GPU: {str(error).rstrip('.')}.",
                hint="choose other GPUs with CUDA_VISIBLE_DEVICES, or end what runs on them, as nvidia-smi shows it."
                + "".join(f"\n  {gpu.describe()}" for gpu in driver_gpus()),
                CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
            )
        ) from error
    with tf.init_scope(), tf.device("CPU:0"):
        here = tf.DeviceSpec.from_string(tf.zeros([]).device)
    specs = [tf.DeviceSpec.from_string(device.name) for device in devices]
    return [device for device, spec in zip(devices, specs, strict=True) if spec.task in (here.task, None)]


def full_name(device: str) -> str:
    """Finds a logical device of this process, which starts TensorFlow.

    Args:
        device: Such as `"CPU:0"`, `"/gpu:1"` or a full name; of a job or task in it nothing is asked.

    Returns:
        Its full name, such as `"/job:worker/replica:0/task:1/device:CPU:0"`.

    Raises:
        ConfigurationError: There is none.
    """
    names = {each.name.rpartition("device:")[2]: each.name for each in logical_devices()}
    name = names.get(str(device).upper().rpartition("DEVICE:")[2].lstrip("/"))
    if name is None:
        raise ConfigurationError(
            message(f"There is no device {shown(device)}.", hint=f"this process has {', '.join(names)}.", device=device)
        )
    return name
