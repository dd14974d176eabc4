"""Parameter servers on two hosts, for which network namespaces stand (`tests/networks.py`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import pytest
from calling import command
from networks import HOSTS, HOSTS_6, cable_cut, needs_networks, on, two_networks
from parameter_server_support import data, dense_model, environ_in
from rough_cable import rough_cable

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.rendezvous.meeting import with_port

LIMIT = 200
EPOCHS = 3
_EPOCHS_WITH_A_CUT = 40

pytestmark = [pytest.mark.lane("servers"), needs_networks]


def _learned(epochs: int, callbacks: Sequence[keras.callbacks.Callback] = ()) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = dense_model()
    model.fit(*data(), batch_size=32, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def _task(epochs: str) -> None:
    strategy = tfrep.ParameterServerStrategy(connect_timeout=100)
    tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("EPOCH", flush=True))
    with strategy.scope():
        model = _learned(int(epochs), [tell])
    found = {"steps": int(model.optimizer.iterations), "weights": [weight.tolist() for weight in model.get_weights()]}
    print("FOUND " + json.dumps(found), flush=True)


@contextlib.contextmanager
def _tasks(
    names: Sequence[str], addresses: Sequence[str], hosts: dict[str, list[int]], epochs: int, folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the tasks of a cluster, and yields the coordinator first.

    Args:
        names: Of the network namespaces.
        addresses: Of the hosts.
        hosts: The host of each task of each job.
        epochs: How long the coordinator trains.
        folder: For their temporary files.
    """
    places = [(job, index, host) for job, all_hosts in hosts.items() for index, host in enumerate(all_hosts)]
    ports = {place: 29600 + number for number, place in enumerate(places)}
    cluster = {job: [with_port(addresses[place[2]], port) for place, port in ports.items() if place[0] == job] for job in hosts}
    with contextlib.ExitStack() as stack:
        tasks = []
        for job, index, host in places:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            own = folder / f"{job}{index}"
            own.mkdir()
            with open(own / "errors", "w") as errors:
                task = subprocess.Popen(
                    [*on(names[host]), *command(_task, str(epochs))],
                    cwd=own, env=environ_in(own) | {"TF_CONFIG": config}, stdout=subprocess.PIPE, stderr=errors, text=True,
                )  # fmt: skip
            stack.enter_context(task)
            stack.callback(task.kill)
            tasks.append(task)
        yield tasks


def _found(coordinator: subprocess.Popen[str], folder: Path) -> dict[str, object]:
    output, _ = coordinator.communicate(timeout=LIMIT)
    assert coordinator.returncode == 0, (folder / "chief0" / "errors").read_text("utf-8")[-3000:]
    found: dict[str, object] = json.loads(output.partition("FOUND ")[2])
    return found


def _check(found: dict[str, object], epochs: int) -> None:
    assert found["steps"] == 20 * epochs
    for own, expected in zip(found["weights"], _learned(epochs).get_weights(), strict=True):  # type: ignore[call-overload]
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("addresses", [HOSTS, HOSTS_6], ids=["IPv4", "IPv6"])
def test_a_worker_on_another_host_learns_what_one_device_learns(addresses: Sequence[str], tmp_path: Path) -> None:
    with (
        two_networks(addresses) as names,
        _tasks(names, addresses, {"chief": [0], "ps": [0], "worker": [1]}, EPOCHS, tmp_path) as tasks,
    ):
        found = _found(tasks[0], tmp_path)
        assert all(task.poll() is None for task in tasks[1:])
    _check(found, EPOCHS)


def test_a_worker_behind_a_cable_that_loses_packets(tmp_path: Path) -> None:
    jobs = {"chief": [0], "ps": [0], "worker": [1]}
    with two_networks() as names, rough_cable(names) as cable, _tasks(names, HOSTS, jobs, 1, tmp_path) as tasks:
        found = _found(tasks[0], tmp_path)
        assert all(task.poll() is None for task in tasks[1:])
    _check(found, 1)
    assert cable.lost > 10


def test_a_worker_behind_a_cut_cable_is_done_without(tmp_path: Path) -> None:
    jobs = {"chief": [0], "ps": [0], "worker": [0, 1]}
    with two_networks() as names, _tasks(names, HOSTS, jobs, _EPOCHS_WITH_A_CUT, tmp_path) as tasks:
        assert tasks[0].stdout is not None
        assert tasks[0].stdout.readline() == "EPOCH\n", (tmp_path / "chief0" / "errors").read_text("utf-8")
        with cable_cut(names[0]):
            found = _found(tasks[0], tmp_path)
    assert found["steps"] == 20 * _EPOCHS_WITH_A_CUT
