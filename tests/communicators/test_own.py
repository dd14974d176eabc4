"""A transport of one's own: one file, three methods, and a name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.rendezvous.introductions import versions
from tfrep_strategy.communicators import make_communicator
from tfrep_strategy.errors import ConfigurationError

_SCRIPTS = Path(__file__).parent / "scripts"
_EXAMPLES = Path(__file__).parents[2] / "examples"
_ALONE = SimpleNamespace(rank=0, size=1, addresses=None, name="alone")


def train(strategy: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    rng = np.random.RandomState(0)
    x, y = rng.randn(13, 3).astype("float32"), rng.randn(13, 1).astype("float32")
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


@contextlib.contextmanager
def folder_transport(examples: str, folder: str) -> Iterator[type[tfrep.Communicator]]:
    """Gives the class of the transport, and leaves a process of a pool as it was."""
    path, variables = mock.patch.object(sys, "path", [examples, *sys.path]), mock.patch.dict(os.environ, TALK_FOLDER=folder)
    with path, variables, mock.patch.dict("tfrep_strategy.cluster.transports._registered"):
        from own_transport import FolderCommunicator

        yield FolderCommunicator


def train_through_folder(strategy: Any, examples: str, folder: str) -> tuple[list[np.ndarray], dict[str, Any], float]:
    with folder_transport(examples, folder) as kind:
        tfrep.register_communicator("folder", kind)
        own = tfrep.MultiWorkerStrategy("folder")
        assert own.communicator.name == "folder"
        group = own.new_group([1])
        alone = tf.function(lambda: own.run(lambda: tfrep.all_sum(1.0 + tfrep.replica_id(), group=group)))()
        return *train(own), float(alone)


def test_a_registered_transport_trains(tmp_path: Path, worker_pool: Any) -> None:
    weights, history = train(tf.distribute.get_strategy())
    found = worker_pool("tf", 2).run(train_through_folder, str(_EXAMPLES), str(tmp_path))
    for rank, (rank_weights, rank_history, alone) in enumerate(found):
        for own, want in zip(rank_weights, weights, strict=True):
            np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rank_history["loss"], history["loss"], rtol=1e-5)
        assert alone == rank + 1.0


def differ(strategy: Any, examples: str, folder: str) -> list[str]:
    own = {**versions(), **({"Keras": "3.0"} if strategy.rank == 1 else {})}
    with folder_transport(examples, folder) as kind:
        made = kind(strategy.extended.environment)  # type: ignore[call-arg]
    with mock.patch("tfrep_strategy.communicators.versions", return_value=own), pytest.raises(ConfigurationError) as caught:
        tfrep.MultiWorkerStrategy(made)
    return str(caught.value).splitlines()


def test_ranks_of_different_versions_are_refused(tmp_path: Path, worker_pool: Any) -> None:
    """Here no meeting of ours has compared them."""
    first, second = worker_pool("tf", 2).run(differ, str(_EXAMPLES), str(tmp_path))
    assert first == second
    assert first[0].startswith(f"Rank 1 has Keras 3.0, and rank 0 has {keras.__version__}. Received: communicator='folder'")
    assert first[1] == "Hint: install the same versions everywhere. [TFREP-E003]"


@pytest.mark.lane("wires")
def test_an_installed_transport_has_a_name_in_every_process(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(_EXAMPLES / "own_transport.py", site)
    about = site / "folder_transport-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-transport\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text("[tfrep_strategy.communicators]\nfolder = own_transport:FolderCommunicator\n", "utf-8")
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", str(tmp_path / "logs")]
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    environ = os.environ | {"PYTHONPATH": paths, "TALK_FOLDER": str(tmp_path / "talk"), "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, text = run("--communicator", "folder", str(_SCRIPTS / "says_communicator.py"))
    assert code == 0, text
    assert "folder 0 of 2, sum 3.0" in text
    code, text = run("--communicator", "tray", str(_SCRIPTS / "says_communicator.py"))
    assert code == 2
    assert "Unknown communicator. Received: communicator='tray'" in text
    assert "use auto, horovod, tf, mpi, shared_memory, folder." in text


@pytest.mark.lane("wires")
def test_the_example_trains_what_one_device_trains(tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / "own_transport.py")],
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["difference"] < 1e-5


class Alone(tfrep.communicators.SingleCommunicator):
    name = "alone"

    def __init__(self, environment: Any) -> None:
        assert environment.size == 1


@pytest.mark.lane("quick")
def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfrep_strategy.cluster.transports._registered", {})
    assert tfrep.register_communicator("alone", Alone) is Alone
    assert tfrep.register_communicator("alone", Alone) is Alone  # A cell of a notebook may run twice.
    assert tfrep.MultiWorkerStrategy("alone").communicator.name == "alone"
    monkeypatch.setenv("TFREP_COMMUNICATOR", "alone")
    monkeypatch.setenv("TFREP_STRATEGY", "multi-worker")
    assert tfrep.auto_strategy.__wrapped__().communicator.name == "alone"

    for name in ("alone", "tf", "mpi", "shared_memory", "horovod", "auto"):
        with refuses(hint=" tf, mpi, shared_memory, alone", name=name):
            tfrep.register_communicator(name, lambda environment: Alone(environment))
    for name in ("", " ", 3, None):
        with refuses(told=["must be text"], name=name):
            tfrep.register_communicator(name, Alone)  # type: ignore[arg-type]
    for factory in (Alone(_ALONE), "Alone", None):
        with refuses(factory=factory):
            tfrep.register_communicator("other", factory)  # type: ignore[arg-type]
    known = "auto, horovod, tf, mpi, shared_memory, alone"
    for unknown in ("other", "", 5, None, Alone):
        with refuses(code="TFREP-E005", hint=f"use {known}", communicator=unknown):
            make_communicator(unknown, _ALONE)  # type: ignore[arg-type]
    tfrep.register_communicator("number", lambda environment: 5)
    with refuses(told=["'number'"], returned=5):
        tfrep.MultiWorkerStrategy("number")


@pytest.mark.lane("quick")
def test_three_methods_are_a_transport() -> None:
    assert tfrep.Communicator.__abstractmethods__ == {"all_reduce", "all_gather", "subgroup"}
