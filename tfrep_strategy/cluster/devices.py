"""The GPUs of this process: the one that it takes, the physical GPU behind a device, and whether NCCL can connect replicas.

`NCCL_MULTI_RANK_GPU_ENABLE=1` lets several replicas use NCCL on one physical GPU (NCCL 2.30 and later). MIG partitions of a GPU
need it. It is NCCL's own variable, not one of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.hardware import driver_gpus
from tfrep_strategy.core.tf import operations_are_deterministic, runtime_has_started
from tfrep_strategy.errors import ConfigurationError, message, shown, warn


def own_gpu(num_visible: int, local_rank: int, local_size: int) -> int | None:
    """Chooses the GPU of a process among those that it sees.

    A scheduler, or the user, may show each process one GPU; then there is no choice. Processes that see several
    GPUs take them by local rank.

    Args:
        num_visible: Number of GPUs that the process sees.
        local_rank: Rank of the process among those of the run on this machine.
        local_size: Number of processes of the run on this machine.

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
        local_size: Number of processes of the run on this machine.
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
    """Warns if TensorFlow cannot use the GPUs of this machine. TensorFlow mentions this only in its log."""
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ or tf.config.list_physical_devices("GPU")
    gpus = [] if hidden else driver_gpus()
    if gpus:
        warn(
            message(
                f"The driver sees {len(gpus)} GPU(s) and TensorFlow none, so this run uses the CPU.",
                hint="pip install 'tensorflow[and-cuda]', or name the folders of CUDA's libraries in LD_LIBRARY_PATH."
                " To use the CPU, set CUDA_VISIBLE_DEVICES=-1.",
                code="TFREP-E009",
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
                code="TFREP-E011",
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
        device: Such as `"CPU:0"`, `"/gpu:1"` or a full name; a job or task in it is ignored.

    Returns:
        Its full name, such as `"/job:worker/replica:0/task:1/device:CPU:0"`.

    Raises:
        ConfigurationError: There is no such device.
    """
    names = {each.name.rpartition("device:")[2]: each.name for each in logical_devices()}
    name = names.get(str(device).upper().rpartition("DEVICE:")[2].lstrip("/"))
    if name is None:
        raise ConfigurationError(
            message(
                f"There is no device {shown(device)}.",
                hint=f"this process has {', '.join(names)}.",
                code="TFREP-E010",
                device=device,
            )
        )
    return name


_SEVERAL_ON_ONE = "NCCL_MULTI_RANK_GPU_ENABLE"


def is_gpu(device: str) -> bool:
    """Returns whether a device, such as `"GPU:0"` or a full name, is a GPU."""
    return _spec(device).device_type == "GPU"


def _spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device if "/" in device else f"/device:{device}")


def nccl_connects(gpus: Sequence[str | None]) -> bool:
    """Returns whether NCCL connects the devices of some replicas. NCCL refuses two replicas on one GPU.

    Args:
        gpus: The identity of each replica's GPU, from `identity_of_gpu`; None for another kind of device.

    Example:
        >>> nccl_connects(["a 0000:07:00.0", "a 0000:0f:00.0"]), nccl_connects(["a 0000:07:00.0", "a 0000:07:00.0"])
        (True, False)
        >>> nccl_connects([None, None]), nccl_connects(["a 0000:07:00.0"])
        (False, False)
    """
    return len(gpus) > 1 and None not in gpus and len(set(gpus)) == len(gpus)


def shared_gpus(gpus: Sequence[str | None]) -> dict[str, list[int]]:
    """Returns the GPUs that several replicas share, with the ids of these replicas.

    Example:
        >>> shared_gpus(["a 0000:07:00.0", "a 0000:0f:00.0", "a 0000:07:00.0", None, None])
        {'a 0000:07:00.0': [0, 2]}
    """
    replicas: dict[str, list[int]] = {}
    for replica, gpu in enumerate(gpus):
        if gpu is not None:
            replicas.setdefault(gpu, []).append(replica)
    return {gpu: members for gpu, members in replicas.items() if len(members) > 1}


def warn_if_shared(gpus: Sequence[str | None]) -> None:
    """Warns if several replicas share a GPU, given the identity of each replica's GPU."""
    shared = shared_gpus(gpus)
    if shared:
        warn(
            message(
                "Several replicas share a GPU. NCCL refuses that, so gradients are summed without it.",
                hint="give each replica its own GPU; several on one are no faster than one."
                f" For parts that MIG has cut, {_SEVERAL_ON_ONE}=1 (NCCL 2.30).",
                replicas_by_gpu=shared,
            ),
        )


def warn_of_sparse_gradients(devices: Sequence[str]) -> None:
    """Warns if sparse gradients may make replicas on these devices differ in their last bits.

    GPUs add the slices of a row in any order, unless TensorFlow's operations are deterministic. Each replica adds them
    separately.
    """
    if is_gpu(devices[0]) and not operations_are_deterministic():
        warn(
            message(
                "Gradients are sparse, as those of embeddings are. GPUs add up their slices in any order, so that the"
                " replicas' weights may come to differ in the last bits.",
                hint="tf.config.experimental.enable_op_determinism() before the first step.",
                devices=list(devices),
            ),
        )


def physical_by_logical(visible: Sequence[str], parts: Mapping[str, int]) -> list[str]:
    """Returns the physical GPU of each logical GPU.

    Args:
        visible: The physical GPUs that TensorFlow uses, in its order.
        parts: The number of logical GPUs of each GPU that was split.

    Example:
        >>> physical_by_logical(["GPU:2", "GPU:0"], {"GPU:2": 3})
        ['GPU:2', 'GPU:2', 'GPU:2', 'GPU:0']
    """
    return [gpu for gpu in visible for _ in range(parts.get(gpu, 1))]


def identity_of_gpu(device: str) -> str | None:
    """Returns the identity of the physical GPU behind a device of this process; None for another kind of device.

    The identity is the same in all processes. If NCCL may connect several replicas on one GPU, each device has its own.

    Args:
        device: A device name such as `"GPU:0"`, or a full name.
    """
    if not is_gpu(device):
        return None
    visible = tf.config.get_visible_devices("GPU")
    parts = {gpu.name: len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in visible}
    physical = physical_by_logical([gpu.name for gpu in visible], parts)
    index = _spec(device).device_index or 0
    if index >= len(physical):  # TensorFlow itself refuses to place operations there.
        return None
    identity = f"{socket.gethostname()} {_address(int(physical[index].rpartition(':')[2]))}"
    # Other ranks see the identity as well, so all decide alike, even if only some have set the variable.
    return f"{identity}, device {index} of process {os.getpid()}" if os.environ.get(_SEVERAL_ON_ONE) == "1" else identity


@functools.cache
def _address(number: int) -> str:
    """Returns the PCI address of a CUDA device. NCCL identifies GPUs by it.

    If CUDA's driver is not available, it returns the device's entry in CUDA_VISIBLE_DEVICES.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
        found = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number)
        if not found and not cuda.cuDeviceGetPCIBusId(address, len(address), device):
            return address.value.decode()
    except OSError:
        pass
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"CUDA device {chosen[number] if number < len(chosen) and chosen[number] else number}"
