"""Which physical GPU is behind a device of TensorFlow, and whether NCCL connects some of them."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import warnings
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfrep_strategy.errors import message


def nccl_connects(gpus: Sequence[str | None]) -> bool:
    """Whether NCCL connects the devices of some replicas. It refuses two members on one physical GPU.

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
    """Returns the GPUs that several replicas have, with the replicas' numbers.

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
    """Warns where several replicas have the same GPU, given the identity of each replica's."""
    shared = shared_gpus(gpus)
    if shared:
        warnings.warn(
            message(
                "Several replicas share a GPU. NCCL refuses that, so that TensorFlow sums gradients without it.",
                hint="give each replica a GPU of its own; several on one are no faster than one.",
                replicas_by_gpu=shared,
            ),
            stacklevel=2,
        )


def physical_by_logical(visible: Sequence[str], parts: Mapping[str, int]) -> list[str]:
    """Returns the physical GPU of each logical one.

    Args:
        visible: The physical GPUs that TensorFlow uses, in its order.
        parts: How many logical GPUs those that were split have.

    Example:
        >>> physical_by_logical(["GPU:2", "GPU:0"], {"GPU:2": 3})
        ['GPU:2', 'GPU:2', 'GPU:2', 'GPU:0']
    """
    return [gpu for gpu in visible for _ in range(parts.get(gpu, 1))]


def identity_of_gpu(device: str) -> str | None:
    """Names the physical GPU of a device of this process, the same in all processes; None for another kind of device.

    Args:
        device: Such as `"GPU:0"`, or a full name.
    """
    spec = tf.DeviceSpec.from_string(device if "/" in device else f"/device:{device}")
    if spec.device_type != "GPU":
        return None
    visible = tf.config.get_visible_devices("GPU")
    parts = {gpu.name: len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in visible}
    physical = physical_by_logical([gpu.name for gpu in visible], parts)
    index = spec.device_index or 0
    if index >= len(physical):  # Who places things there is told so by TensorFlow.
        return None
    return f"{socket.gethostname()} {_address(int(physical[index].rpartition(':')[2]))}"


@functools.cache
def _address(number: int) -> str:
    """Returns the PCI address of the CUDA device of a number, by which NCCL tells GPUs apart.

    Where CUDA's driver cannot be asked, the entry of CUDA_VISIBLE_DEVICES has to do.
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
