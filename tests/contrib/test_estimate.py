"""`tfrep estimate`, compared with sums by hand and with what a step takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfrep_strategy.cluster.hardware import Gpu
from tfrep_strategy.contrib import estimate as estimated
from tfrep_strategy.contrib.estimated_script import Rehearsal
from tfrep_strategy.errors import ConfigurationError

_SCRIPT = str(Path(__file__).with_name("scripts") / "estimated.py")
_ROOT = str(Path(__file__).resolve().parents[2])
_LIMIT = 150

_DENSE = {"kernels": [(512, 1024), (1024, 1024), (1024, 10)], "biases": [1024, 1024, 10]}
_PARAMETERS = sum(a * b for a, b in _DENSE["kernels"]) + sum(_DENSE["biases"])
_SCALARS = 12
"""The bytes of the optimizer's count of iterations (int64) and learning rate."""


def _run(command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": _ROOT, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    line = [sys.executable, "-m", "tfrep_strategy.cli", command, *arguments]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)


def _estimate(*arguments: str, replicas: int) -> dict[str, Any]:
    done = _run("estimate", _SCRIPT, *arguments, "--replicas", str(replicas), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The script has ended." not in done.stderr, "it does not train"
    return dict(json.loads(done.stdout))


@pytest.mark.lane("launchers")
def test_a_dense_net_by_hand() -> None:
    found = _estimate("dense", replicas=4)
    assert (found["batch_size"], found["examples_of_replica"]) == (1024, 256)
    exact = found["exact"]
    assert exact["weights"] == exact["gradients"] == 4 * _PARAMETERS
    assert exact["optimizer"] == 2 * 4 * _PARAMETERS + _SCALARS
    assert exact["accumulators"] == 0
    needed_by_backward = 256 * (512 + 1024 + 1024 + 10) * 4
    assert needed_by_backward <= found["upper_bound"]["activations"]
    assert found["upper_bound"]["total"] == sum(exact.values()) + found["upper_bound"]["activations"]
    assert found["tensors_of_guessed_size"] == 0
    assert found["memory"] is found["fits"] is None


@pytest.mark.lane("launchers")
def test_a_convnet_by_hand() -> None:
    found = _estimate("convnet", replicas=2)
    trained = 3 * 3 * 3 * 16 + 16 + 2 * 16 + 3 * 3 * 16 * 32 + 32 + 32 * 10 + 10
    assert found["exact"]["weights"] == 4 * (trained + 2 * 16), "with moving statistics"
    assert found["exact"]["gradients"] == 4 * trained
    assert found["exact"]["optimizer"] == 4 * trained + _SCALARS
    # The pictures, the inputs of batch normalization, ReLU and the second convolution, and what that gives.
    needed_by_backward = 16 * 48 * 48 * (3 + 16 + 16 + 16 + 32) * 4
    assert needed_by_backward <= found["upper_bound"]["activations"] < 5 * needed_by_backward


@pytest.mark.lane("launchers")
def test_parts_of_slots_and_other_settings() -> None:
    parts = (171 * 1024 + 342) + (342 * 1024 + 342) + (342 * 10 + 4)  # Of three replicas: rows, or elements of the short bias.
    sharded = _estimate("dense", "", "sharded", replicas=3)
    assert sharded["exact"]["optimizer"] == 2 * 4 * parts + _SCALARS
    assert sharded["exact"]["weights"] == sharded["exact"]["gradients"] == 4 * _PARAMETERS
    mixed = _estimate("dense", "", "mixed_float16", replicas=2)
    assert mixed["exact"]["weights"] == mixed["exact"]["gradients"] == 4 * _PARAMETERS
    assert 0 <= mixed["exact"]["optimizer"] - 2 * 4 * _PARAMETERS - _SCALARS < 40, "the scale of the loss, and when it changes"
    accumulated = _estimate("dense", "256", "accumulation", replicas=2)
    assert accumulated["exact"]["accumulators"] == 4 * _PARAMETERS
    assert accumulated["exact"]["optimizer"] == 2 * 4 * _PARAMETERS + _SCALARS
    assert accumulated["exact"]["gradients"] == 4 * _PARAMETERS
    loop = _estimate("loop", replicas=2)
    assert loop["exact"] == {**loop["exact"], "weights": 4 * _PARAMETERS, "gradients": 4 * _PARAMETERS}
    assert loop["examples_of_replica"] == 512


@pytest.mark.lane("launchers")
def test_parts_of_weights() -> None:
    (into, wide, out), biases = (a * b for a, b in _DENSE["kernels"]), sum(_DENSE["biases"])
    sharded = _estimate("dense", "", "weights", replicas=4)["exact"]
    assert sharded["weights"] == 4 * ((into + wide) // 4 + out + biases), "those of less than 64 KiB stay whole"
    assert sharded["gradients"] == 4 * ((into + wide + out + 2 * 1024) // 4 + 3), "of ten numbers a replica has three"
    assert sharded["optimizer"] == 2 * sharded["gradients"] + _SCALARS
    layouts = _estimate("dense", "", "layouts", replicas=4)
    held = 4 * ((into + wide + 1024) // 4 + out + 1024 + 10)
    assert layouts["exact"]["weights"] == layouts["exact"]["gradients"] == held
    assert layouts["exact"]["optimizer"] == 2 * held + _SCALARS
    assert layouts["examples_of_replica"] == layouts["batch_size"] == 1024
    done = _run("estimate", "-n", "4", _SCRIPT, "dense", "", "mesh")
    assert "several replicas along both axes are not estimated. Received: replicas=4" in done.stderr
    done = _run("estimate", "-n", "1", _SCRIPT, "dense", "", "weights")
    assert "The script shards weights, of which one replica has all. Received: replicas=1" in done.stderr


@pytest.mark.lane("launchers")
@pytest.mark.parametrize(
    ("net", "setting", "replicas", "communicator"),
    [
        ("dense", "", 1, "auto"), ("dense", "", 2, "auto"), ("convnet", "", 1, "auto"), ("lstm", "", 1, "auto"),
        ("embedding", "", 2, "auto"), ("many words", "", 2, "tf"), ("dense", "weights", 2, "tf"), ("dense", "layouts", 2, "auto"),
    ],
)  # fmt: skip
def test_a_step_takes_less(net: str, setting: str, replicas: int, communicator: str, tmp_path: Path) -> None:
    """TensorFlow counts the bytes of tensors on a CPU with oneDNN, those of 256 KB and more, and what it rounds them up to.

    It does not count what travels through shared memory.
    """
    found, file = _estimate(net, "", setting, replicas=replicas), tmp_path / "peak.json"
    options = ["-n", str(replicas), "--communicator", communicator]
    done = _run("run", *options, _SCRIPT, net, "", setting, PEAK_FILE=str(file), TF_ENABLE_ONEDNN_OPTS="1")
    assert done.returncode == 0, done.stderr
    peak = json.loads(file.read_text("utf-8"))
    assert 0 < peak <= found["upper_bound"]["total"]


@pytest.mark.lane("launchers")
def test_what_would_make_it_fit() -> None:
    memory = _estimate("dense", "2048", replicas=2)["upper_bound"]["total"] - 1
    done = _run("estimate", "-n", "2", "--memory", str(memory), "--json", _SCRIPT, "dense", "2048")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["memory"], found["fits"]) == (memory, None), "without activations it would fit"
    smaller, accumulated, sharded = found["changes"]
    assert smaller["fits"]
    again = _estimate("dense", str(smaller["batch_size"]), replicas=2)
    assert again["upper_bound"]["total"] == smaller["total"] <= memory
    assert _estimate("dense", "2048", "sharded", replicas=2)["upper_bound"]["total"] <= sharded["total"]
    assert accumulated["batch_size"] * accumulated["gradient_accumulation_steps"] == 2048
    assert all(change["fits"] == (change["total"] <= memory) for change in found["changes"])


@pytest.mark.lane("launchers")
def test_scripts_that_cannot_be_estimated(tmp_path: Path) -> None:
    done = _run("estimate", _SCRIPT, "nothing")
    assert done.returncode == 2
    assert "The script ended without a training step" in done.stderr
    failing = tmp_path / "fails.py"
    failing.write_text("raise SystemExit(3)\n", "utf-8")
    done = _run("estimate", str(failing))
    assert done.returncode == 1
    assert "failed before its first training step. Received: exit_code=3" in done.stderr


@pytest.mark.lane("quick")
def test_settings_that_are_refused() -> None:
    for text in ("16 XB", "", "-1GB", "0GB", "GB"):
        with pytest.raises(ConfigurationError, match="This is not a size of memory. Received: memory="):
            estimated.bytes_of(text)
    assert estimated.bytes_of("16gb") == 16 * 10**9
    assert estimated.bytes_of("80GiB") == 80 << 30
    assert estimated.bytes_of("1024") == 1024
    with pytest.raises(ConfigurationError, match="There is no such script"):
        estimated.estimate("absent.py", [], replicas=2)


@pytest.mark.lane("quick")
def test_the_smallest_gpu_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(0, "made up", 80 << 30, 0), Gpu(1, "smaller", 16 << 30, 0)]
    monkeypatch.setattr(estimated, "driver_gpus", lambda: gpus)
    monkeypatch.setattr(estimated, "gpus_are_visible", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert estimated.memory_of_gpus() == 16 << 30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert estimated.memory_of_gpus() == 80 << 30
    monkeypatch.setattr(estimated, "gpus_are_visible", lambda: False)
    assert estimated.memory_of_gpus() is None


@pytest.mark.lane("quick")
def test_what_is_told() -> None:
    exact = {"weights": 10**9, "optimizer": 2 * 10**9, "accumulators": 0, "gradients": 10**9, "others": 8}
    found = {
        "replicas": 8, "batch_size": 512, "examples_of_replica": 64, "exact": exact, "tensors_of_guessed_size": 0,
        "upper_bound": {"activations": 5 * 10**9, "total": 9 * 10**9}, "memory": 8 * 10**9, "fits": None, "line": "train.py:9",
        "changes": [{"batch_size": 256, "gradient_accumulation_steps": 2, "total": 75 * 10**8, "fits": True}],
    }  # fmt: skip
    told = "\n".join(estimated.lines_of(found))
    assert "Each of 8 replicas has 64 of 512 examples in a step (train.py:9)." in told
    assert "accumulated" not in told.partition("batch_size")[0]
    assert "metrics" not in told
    assert "That may be more than 8.00 GB." in told
    assert told.endswith("7.50 GB  fits")
    assert "  batch_size=256, gradient_accumulation_steps=2  " in told
    assert "already" in "\n".join(estimated.lines_of({**found, "fits": False}))
    assert "fits into 8.00 GB." in "\n".join(estimated.lines_of({**found, "fits": True}))


@pytest.mark.lane("quick")
def test_ranks_that_do_not_exist_have_what_rank_0_has() -> None:
    ranks = Rehearsal(3)
    x = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(ranks.all_reduce([x])[0], [3.0, 6.0])
    np.testing.assert_array_equal(ranks.all_reduce([x], "mean")[0], x)
    np.testing.assert_array_equal(ranks.all_reduce([x], "product")[0], [1.0, 8.0])
    np.testing.assert_array_equal(ranks.all_gather(x), [1.0, 2.0] * 3)
    np.testing.assert_array_equal(ranks.broadcast([x])[0], x)
    assert ranks.all_gather_object("a") == ["a"] * 3
    assert ranks.subgroup([0, 2]).size == 2
    assert ranks.subgroup([1]) is None
