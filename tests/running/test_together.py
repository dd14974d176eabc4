"""Launchers that start all ranks again, played by several on one machine. Their ranks are small programs without TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import refuses
from test_nodes import ROOT, SCRIPTS

from tfrep_strategy.cluster.notices import Progress, Step
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.running.nodes import Node
from tfrep_strategy.running.runs import Options

pytestmark = pytest.mark.lane("faults")

LIMIT = 60


class Launchers:
    """Launchers of one run, and what their ranks have shown."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"localhost:{free_ports(1)[0]}"
        self.shown, self.running = folder / "shown", list[subprocess.Popen[str]]()
        self.shown.mkdir()

    def start(self, size: int = 1, *, rank: int | None = None, count: int = 2, least: int | None = None, **own: Any) -> Any:
        """Starts a launcher."""
        place = {"rank": rank, "count": count, "rendezvous": self.address, "least": least}
        given: dict[str, Any] = {"num_replicas": size, "node": place, "backup_dir": str(self.folder / "backups")}
        given |= {"log_dir": str(self.folder / f"logs{len(self.running)}")} | own
        folder = str(self.folder)
        variables = {"XDG_CACHE_HOME": folder, "TMPDIR": folder, "TFREP_RENDEZVOUS_TIMEOUT": "20"}
        launcher = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "launches.py"), json.dumps([ROOT]), json.dumps(given), str(SCRIPTS / "stays.py"),
             str(self.shown)],
            env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.running.append(launcher)
        return launcher

    def round(self, number: int, size: int) -> list[dict[str, Any]]:
        """Returns what the ranks of a round show, when all do."""
        files = [self.shown / f"{number}-{rank}" for rank in range(size)]
        deadline = time.monotonic() + LIMIT
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                for each in self.running:
                    each.kill()
                raise AssertionError([each.communicate() for each in self.running])
            time.sleep(0.05)
        shown = [json.loads(file.read_text()) for file in files]
        assert [(each["size"], each["replicas"]) for each in shown] == [(size, str(size))] * size
        return shown

    def end(self, number: int, rank: int, code: int) -> None:
        """Ends a rank."""
        file = self.shown / f".end-{number}-{rank}"
        file.write_text(str(code))
        file.rename(self.shown / f"end-{number}-{rank}")

    def wait_for_line(self, launcher: subprocess.Popen[str], line: str) -> None:
        """Returns when a launcher has said something."""
        assert launcher.stderr is not None
        assert any(line in said for said in launcher.stderr)

    def done(self) -> None:
        """Lets all ranks end well."""
        (self.shown / "done").touch()


def ended(launcher: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns what came of a launcher, and what it said."""
    output, said = launcher.communicate(timeout=LIMIT)
    assert "FOUND " in output, (launcher.returncode, said)
    return json.loads(output.partition("FOUND ")[2]), said


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path)
    yield made
    for each in made.running:
        each.kill()
        each.communicate()


def test_a_lost_rank_starts_all_again(launchers: Launchers) -> None:
    both = [launchers.start(size, rank=rank, max_restarts=1) for rank, size in enumerate((1, 2))]
    first = launchers.round(0, 3)
    launchers.end(0, 2, -signal.SIGKILL)
    again = launchers.round(1, 3)
    assert len({each["seed"] for each in first + again}) == 1
    launchers.done()
    for launcher in both:
        result, said = ended(launcher)
        assert result == "ended well"
        assert "Rank 2 failed with exit code 137 (SIGKILL)" in said
        assert "All ranks are started again (1 of 1). No fit has a backup yet" in said


def test_a_lost_rank_too_many(launchers: Launchers) -> None:
    both = [launchers.start(rank=rank, max_restarts=1) for rank in range(2)]
    for number in range(2):
        launchers.round(number, 2)
        launchers.end(number, 1, -signal.SIGKILL)
    for launcher in both:
        assert ended(launcher)[0].startswith("RunFailed: Rank 1 failed with exit code 137 (SIGKILL)")


def test_an_error_ends_the_run(launchers: Launchers) -> None:
    both = [launchers.start(rank=rank, max_restarts=9) for rank in range(2)]
    launchers.round(0, 2)
    launchers.end(0, 1, 7)
    for launcher in both:
        assert ended(launcher)[0].startswith("RunFailed: Rank 1 failed with exit code 7; all ranks were ended.")


def test_a_lost_machine_is_waited_for(launchers: Launchers) -> None:
    first, second = (launchers.start(rank=rank, max_restarts=1) for rank in range(2))
    launchers.round(0, 2)
    second.kill()
    back = launchers.start(rank=1, max_restarts=1)
    launchers.round(1, 2)
    twice = launchers.start(rank=1, max_restarts=1)
    assert "Two processes say that they are node 1: " in ended(twice)[0]
    launchers.done()
    result, said = ended(first)
    assert result == ended(back)[0] == "ended well"
    assert f"process {second.pid} was lost." in said


def test_machines_come_and_go(launchers: Launchers) -> None:
    options: dict[str, Any] = {"count": 3, "least": 1}
    first = launchers.start(2, **options)
    launchers.round(0, 2)
    second, third = launchers.start(1, **options), launchers.start(1, **options)
    launchers.round(1, 4)
    spare = launchers.start(1, **options)
    launchers.wait_for_line(spare, "The run has its 3 nodes.")
    second.kill()
    launchers.round(2, 4)  # The spare one has taken the place.
    third.send_signal(signal.SIGTERM)
    launchers.round(3, 3)
    third.communicate(timeout=LIMIT)
    assert third.returncode == -signal.SIGTERM
    launchers.done()
    result, said = ended(first)
    assert result == ended(spare)[0] == "ended well"
    assert said.count("All ranks are started again.") == 3
    assert "Machines have come." in said
    assert f"process {second.pid} was lost." in said
    assert f"process {third.pid} has left." in said


def test_machine_0_is_lost(launchers: Launchers) -> None:
    first = launchers.start(count=2, least=1)
    launchers.round(0, 1)
    second = launchers.start(count=2, least=1)
    launchers.round(1, 2)
    first.kill()
    result, _ = ended(second)
    assert result.startswith("PeerError: Machine 0, with the rendezvous of the run, was lost.")
    assert launchers.address in result


def test_machine_0_is_lost_before_the_first_round(launchers: Launchers) -> None:
    first, second = (launchers.start(rank=rank, count=3, max_restarts=1) for rank in range(2))
    launchers.wait_for_line(first, "Node 2 has not come")
    first.kill()
    time.sleep(1)
    assert second.poll() is None
    back, third = (launchers.start(rank=rank, count=3, max_restarts=1) for rank in (0, 2))
    launchers.round(0, 3)
    launchers.done()
    assert [ended(each)[0] for each in (back, second, third)] == ["ended well"] * 3


def test_a_signal_ends_the_wait_for_machine_0(launchers: Launchers) -> None:
    first, second = (launchers.start(rank=rank, count=3, max_restarts=1) for rank in range(2))
    launchers.wait_for_line(first, "Node 2 has not come")
    first.kill()
    time.sleep(1)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=8)
    assert second.returncode == -signal.SIGTERM


def test_a_newcomer_with_another_folder_is_refused(launchers: Launchers) -> None:
    first = launchers.start(count=2, least=1)
    launchers.round(0, 1)
    other = launchers.start(count=2, least=1, backup_dir=str(launchers.folder / "elsewhere"))
    assert "This machine does not see in the folder for backups what machine 0 has written there." in ended(other)[0]
    launchers.done()
    result, said = ended(first)
    assert result == "ended well"
    assert "started again" not in said


def test_a_second_machine_0_forgets_nothing(launchers: Launchers) -> None:
    launchers.start(rank=0, count=1, least=1)
    launchers.round(0, 1)
    progress = Progress(launchers.folder / "backups")
    progress.note(Step(0, 1, 2))
    twice = launchers.start(rank=0, count=1, least=1)
    assert launchers.address in ended(twice)[0]
    assert progress.read() == Step(0, 1, 2)


def test_machine_0_is_asked_to_end(launchers: Launchers) -> None:
    first, second = (launchers.start(rank=rank, max_restarts=2) for rank in range(2))
    launchers.round(0, 2)
    first.send_signal(signal.SIGTERM)
    assert ended(second)[0] == "RunFailed: Node 0 was asked to end."
    first.communicate(timeout=LIMIT)
    assert first.returncode == -signal.SIGTERM


def test_too_few_machines(launchers: Launchers) -> None:
    first, second = (launchers.start(rank=rank, count=3, least=2) for rank in range(2))
    launchers.round(0, 2)
    second.kill()
    assert "to the rendezvous within 20 seconds. 1 of at least 2 nodes is here." in ended(first)[0]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"max_restarts": 0}, "start all machines with the same"),
        ({"max_restarts": 3}, "has --max-restarts 3, and node 0"),
        ({"max_restarts": 1, "least": 1}, "has --nnodes 1:2, and node 0"),
        ({"max_restarts": 1, "communicator": "horovod"}, "has communicator horovod, and node 0"),
        ({"max_restarts": 1, "backup_dir": "elsewhere"}, "This machine does not see in the folder for backups what machine 0"),
    ],
)
def test_launchers_that_do_not_fit(own: dict[str, Any], said: str, launchers: Launchers) -> None:
    if "backup_dir" in own:
        own["backup_dir"] = str(launchers.folder / own["backup_dir"])
    first = launchers.start(rank=0, max_restarts=1)
    result, _ = ended(launchers.start(rank=1, **own))
    assert said in result
    assert first.poll() is None


@pytest.mark.parametrize(
    ("nnodes", "own", "received"),
    [
        ("3:2", {}, {"nnodes_min": 3}),
        ("0:2", {}, {"nnodes_min": 0}),
        ("1:2:3", {}, {"nnodes": "1:2:3"}),
        ("1:4", {}, {"backup_dir": None}),
        ("2", {"max_restarts": 1}, {"backup_dir": None}),
    ],
)
def test_options_that_cannot_be(nnodes: str, own: dict[str, Any], received: dict[str, Any]) -> None:
    with refuses(**received):
        Options(1, node=Node.of(rank=0, nnodes=nnodes, rendezvous="a:1"), **own)
