"""Finds the physical GPU behind a TensorFlow device, and whether NCCL can connect the GPUs of some replicas.

`NCCL_MULTI_RANK_GPU_ENABLE=1` lets several replicas use NCCL on one physical GPU (NCCL 2.30 and later). Parts of a GPU that MIG
has cut need it. It is NCCL's own variable, so it is not one of this package.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfrep_strategy._tensorflow import operations_are_deterministic
from tfrep_strategy.errors import message, warn

_SEVERAL_ON_ONE = "NCCL_MULTI_RANK_GPU_ENABLE"


def is_gpu(device: str) -> bool:
    """Returns whether a device, such as `"GPU:0"` or a full name, is a GPU."""
    return _spec(device).device_type == "GPU"


def _spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device if "/" in device else f"/device:{device}")


def nccl_connects(gpus: Sequence[str | None]) -> bool:
    """Returns whether NCCL connects the devices of some replicas. NCCL refuses two replicas on one GPU.

    Args:
        gpus: The identity of each replica's GPU, as `identity_of_gpu` gives it; None for another kind of device.

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
                hint="give each replica a GPU of its own; several on one are no faster than one."
                f" For parts that MIG has cut, {_SEVERAL_ON_ONE}=1 (NCCL 2.30).",
                replicas_by_gpu=shared,
            ),
        )


def warn_of_sparse_gradients(devices: Sequence[str]) -> None:
    """Warns if sparse gradients may make replicas on these devices differ in their last bits.

    GPUs add up the slices of a row in any order, unless TensorFlow's operations are deterministic. Each replica adds them up
    for itself.
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

    The identity is the same in all processes. If NCCL may connect several replicas on one GPU, it is each device's own.

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
    # Other ranks see it too, so that all decide alike, even if only some have set the variable.
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
