"""Which GPU a process takes, from made-up lists of devices: nothing here needs a GPU."""

from __future__ import annotations

import os
import subprocess
import warnings

import pynvml
import pytest
import tensorflow as tf
from calling import command
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster import devices, hardware

pytestmark = pytest.mark.lane("quick")


def _told(physical, visible, local_rank, local_size, limits=None):
    """What TensorFlow is told, and how many warnings there are. Only the list of devices is made up."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(physical)]
    shown, grows = [gpus[i] for i in visible], []
    tf.config.list_physical_devices = lambda kind=None: gpus
    tf.config.get_visible_devices = lambda kind=None: list(shown)
    tf.config.get_logical_device_configuration = lambda gpu: (limits or {}).get(gpus.index(gpu))

    def set_visible_devices(chosen, kind):
        shown[:] = chosen

    def set_memory_growth(gpu, grow):
        if limits:
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        grows.append(gpus.index(gpu))

    tf.config.set_visible_devices = set_visible_devices
    tf.config.experimental.set_memory_growth = set_memory_growth
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        devices.take_own_gpu(local_rank, local_size)
    return [gpus.index(g) for g in shown], grows, devices.replica_device(local_rank), len(warned)


def _places():
    """All of it before TensorFlow starts."""
    everything = list(range(8))
    assert _told(8, everything, 3, 8) == ([3], [3], "GPU:0", 0)  # A process for each GPU.
    assert _told(8, [4, 5, 6, 7], 1, 4) == ([5], [5], "GPU:0", 0)  # CUDA's own numbers of what the user has shown.
    assert _told(8, [6], 6, 8) == ([6], [6], "GPU:0", 0)  # Horovod's usual four lines, or a scheduler that shows one.
    assert _told(2, [0, 1], 3, 4) == ([1], [1], "GPU:0", 0)  # Two processes share a GPU.
    assert _told(1, [0], 1, 2) == ([0], [0], "GPU:0", 0)
    assert _told(8, everything, 0, 1) == (everything, [], "GPU:0", 1)  # One process of many GPUs uses one, and is told.
    assert _told(1, [0], 0, 1) == ([0], [], "GPU:0", 0)
    assert _told(1, [0], 1, 2, {0: [None, None]}) == ([0], [], "GPU:1", 0)  # Logical GPUs are shared out too.
    assert _told(4, [], 1, 2) == ([], [], "CPU:0", 0)  # Hidden on purpose.
    assert _told(0, [], 0, 1) == ([], [], "CPU:0", 0)

    devices.driver_gpus = lambda: [hardware.Gpu(0, "made up", 1, 1)]
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    assert _told(0, [], 0, 1)[3] == 1  # TensorFlow found no CUDA.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    assert _told(0, [], 0, 1)[3] == 0

    tf.constant(0)  # Once TensorFlow has started, nothing can be changed.
    assert _told(8, everything, 3, 8)[:3] == (everything, [], "GPU:3")


@pytest.mark.lane("short")
def test_what_a_process_takes_of_the_gpus_that_it_sees():
    subprocess.run(command(_places), check=True, timeout=120)


def test_the_driver_is_asked_and_may_be_missing():
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        count = 0
    assert [gpu.index for gpu in hardware.driver_gpus()] == list(range(count))


@pytest.mark.parametrize("what", ["CUDA_ERROR_DEVICE_UNAVAILABLE: busy", "failed to allocate on GPU: out of memory"])
def test_a_gpu_that_cannot_be_used_is_named_with_what_to_do(what, monkeypatch):
    def fails(kind=None):
        raise tf.errors.InternalError(None, None, what)

    busy = hardware.Gpu(2, "NVIDIA H200", 2 << 30, 1 << 30)
    monkeypatch.setattr(tf.config, "list_logical_devices", fails)
    monkeypatch.setattr(devices, "driver_gpus", lambda: [busy])
    with refuses(
        code="TFREP-E011", told=["GPU 2: ", " 1.0 of 2.0 GiB free"], hint="CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES=...
    ):
        tfrep.MirroredStrategy()


def test_an_error_that_is_not_of_gpus_stays_as_it_is(monkeypatch):
    def fails(kind=None):
        raise RuntimeError("something else")

    monkeypatch.setattr(tf.config, "list_logical_devices", fails)
    with pytest.raises(RuntimeError, match="something else"):
        devices.logical_devices()
