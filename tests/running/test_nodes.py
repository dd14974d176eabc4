"""Launchers on several machines, played by several on one. Their ranks are small programs, which do not load TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from needs import needs_horovod
from raising import refuses
from typer.testing import CliRunner

import tfrep_strategy as tfrep
from tfrep_strategy.cli import app
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.running import Options, nodes
from tfrep_strategy.running.joining import for_this_pod
from tfrep_strategy.running.nodes import Node, meet_nodes

ROOT = str(Path(tfrep.__file__).parents[1])
SCRIPTS = Path(__file__).with_name("scripts")
LIMIT = 60
SOON = 30
"""Seconds in which a mistake is told."""
NEEDED = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "localhost:1"]


def launch(
    folder: Path,
    options: Sequence[Mapping[str, Any]],
    prefixes: Sequence[Sequence[str]] = ((), ()),
    failing: int | None = None,
    seconds: float = LIMIT,
    **variables: str,
) -> tuple[list[Any], dict[int, dict[str, str]]]:
    """Starts a launcher for each of some options, and returns what came of each, and the variables of each rank."""
    with contextlib.ExitStack() as stack:
        launchers = []
        for number, (own, prefix) in enumerate(zip(options, prefixes, strict=True)):
            given = {"log_dir": str(folder / f"logs{number}"), **own}
            program = [str(SCRIPTS / "shows.py"), str(failing)]
            launcher = subprocess.Popen(
                [*prefix, sys.executable, str(SCRIPTS / "launches.py"), json.dumps([ROOT]), json.dumps(given), *program],
                env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")} | variables, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(launcher)
            stack.callback(launcher.terminate)
            launchers.append(launcher)
        deadline = time.monotonic() + seconds
        outputs = [launcher.communicate(timeout=deadline - time.monotonic())[0] for launcher in launchers]
    results = [json.loads(output.partition("FOUND ")[2].splitlines()[0]) for output in outputs]
    shown = [output.partition("FOUND ")[0] for output in outputs]
    texts = dict(enumerate(text for text in shown if text))  # Rank 0 writes to the terminal of its launcher.
    texts |= {int(log.stem.removeprefix("rank")): log.read_text("utf-8") for log in folder.glob("logs*/rank*.log")}
    return results, {rank: json.loads(text.partition("RANK ")[2].splitlines()[0]) for rank, text in sorted(texts.items())}


def options_of(rendezvous: str, sizes: Sequence[int], **others: Any) -> list[dict[str, Any]]:
    places = [{"rank": rank, "count": len(sizes), "rendezvous": rendezvous} for rank in range(len(sizes))]
    return [{"num_replicas": size, "node": place, **others} for size, place in zip(sizes, places, strict=True)]


def check_ranks(ranks: dict[int, dict[str, str]], hosts: Sequence[str], port: int) -> None:
    assert list(ranks) == list(range(len(hosts)))
    configs = [json.loads(each["TF_CONFIG"]) for each in ranks.values()]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in ranks]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"]["worker"] == addresses for config in configs)
    assert [address.rpartition(":")[0] for address in addresses] == list(hosts)
    assert len(set(addresses)) == len(addresses)
    assert not any(address.endswith(f":{port}") for address in addresses)
    assert {each["TFREP_NUM_REPLICAS"] for each in ranks.values()} == {str(len(hosts))}
    assert {each["TFREP_COMMUNICATOR"] for each in ranks.values()} == {"tf"}
    assert len({each["PYTHONHASHSEED"] for each in ranks.values()}) == 1


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_two_launchers(host: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The machines may have different numbers of ranks."""
    (port,) = free_ports(1)
    results, ranks = launch(tmp_path, options_of(f"{host}:{port}", (1, 2), speaks=True))
    assert results == ["ended well"] * 2
    last, *others = sorted(capfd.readouterr().err.splitlines(), key=lambda line: "done in" not in line)
    assert re.fullmatch(r"tfrep: done in \d+\.\d s", last)
    assert sorted(others) == [
        f"tfrep: 3 replicas on 2 machines (CPU), tf; logs in {tmp_path / 'logs0'}",
        f"tfrep: This machine has ranks 1 to 2 of 3; logs in {tmp_path / 'logs1'}",
    ]
    check_ranks(ranks, ["127.0.0.1"] * 3, port)


def test_a_rank_of_the_second_machine_fails(tmp_path: Path) -> None:
    """Its own launcher names it by its number in the run, and has its log."""
    (port,) = free_ports(1)
    results, _ = launch(tmp_path, options_of(f"localhost:{port}", (1, 2)), failing=2)
    assert results[0] == "ended well"
    assert results[1].startswith("RunFailed: Rank 2 failed with exit code 7; all ranks were ended. Its last lines:\n  RANK ")


def test_launchers_that_do_not_fit(tmp_path: Path) -> None:
    differing = options_of(f"localhost:{free_ports(1)[0]}", (1, 1))
    differing[1]["node"]["count"] = 3
    results, ranks = launch(tmp_path, differing, seconds=SOON)
    assert all("Node 1 says that there are 3 nodes, and node 0 that there are 2." in each for each in results), results
    assert not ranks


def test_launchers_with_different_communicators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = f"localhost:{free_ports(1)[0]}"
    with ThreadPoolExecutor(2) as threads:
        meetings = [threads.submit(meet_nodes, Node(rank, 2, address), 1, name) for rank, name in enumerate(("tf", "mine"))]
        for each in meetings:
            with refuses(hint="name one", communicators=["tf", "mine"]):
                each.result(SOON)


@needs_horovod
def test_launchers_with_different_versions_of_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = iter(["0.28.1", "0.28.1+tfrep"])
    monkeypatch.setattr(nodes, "horovod_version", lambda: next(versions))
    address = f"localhost:{free_ports(1)[0]}"
    with ThreadPoolExecutor(2) as threads:
        meetings = [threads.submit(meet_nodes, Node(rank, 2, address), 1, "horovod") for rank in range(2)]
        for each in meetings:
            met = each.result(LIMIT)
            with refuses(code="TFREP-E003", versions=...), met.identities():
                pass


def test_several_machines_need_a_secret(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name != "TFREP_SECRET_FILE"}
    done = subprocess.run(
        [sys.executable, "-m", "tfrep_strategy.cli", "run", *NEEDED[:4], "--rendezvous", "host:1", __file__],
        env=own | {"PYTHONPATH": ROOT}, cwd=tmp_path, capture_output=True, text=True, timeout=SOON, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Processes on several machines need a secret to meet." in done.stderr
    assert "TFREP_SECRET_FILE" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (NEEDED[:4], "rendezvous=None"),
        (NEEDED[2:], "nnodes=None"),
        (NEEDED[:2] + NEEDED[4:], "node_rank=None"),
        ([*NEEDED, "--node-rank", "2"], "use a number from 0 to 1, a different one on each machine."),
        ([*NEEDED, "--node-rank", "-1"], "node_rank=-1"),
        ([*NEEDED, "--nnodes", "0"], "nnodes=0"),
        ([*NEEDED, "--rendezvous", "host"], "rendezvous='host'"),
        ([*NEEDED, "--hosts", "a:2"], "hosts='a:2'"),
        ([*NEEDED, "--strategy", "mirrored"], "This strategy has no --nnodes."),
        ([*NEEDED, "--strategy", "parameter-server"], "This strategy has no --nnodes."),
        (["--nnodes", "3:2", "--rendezvous", "a:1"], "nnodes_min=3"),
        ([*NEEDED, "--nnodes", "two"], "write a valid integer, or two as in 1:4. Received: nnodes='two'"),
    ],
)
def test_bad_options(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["run", *arguments, __file__])
    assert done.exit_code != 0
    if isinstance(done.exception, SystemExit):
        assert named in done.output + done.stderr
    else:
        assert isinstance(done.exception, ConfigurationError)
        assert named in str(done.exception)


def test_a_pod_of_a_train_job_is_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29400"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert for_this_pod(Options()) == Options()  # One process: `tfrep run` becomes the rank.
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    node = Node(1, 2, "a:29400")
    assert for_this_pod(Options()) == Options(4, node=node)
    assert for_this_pod(Options(2)) == Options(2, node=node)
    own = Options(node=Node(0, 1, "b:1"))
    assert for_this_pod(own) is own
    monkeypatch.setenv("RANK", "3")  # Torchrun has started the processes of this pod.
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert for_this_pod(Options()) == Options()
