"""Slurm, for real: `srun` starts the ranks, and `sbatch` starts a job again that was warned of the end of its time."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from networks import HOSTS, needs_networks, two_networks
from slurm_cluster import Cluster, cluster
from starting import GOES_ON, JOINS, REPOSITORY, RUN, TELLS, check_fits, check_ranks, done, found_in, needs, places_in


def _name_is_known() -> bool:
    with contextlib.suppress(OSError):
        return bool(socket.gethostbyname(socket.gethostname()))
    return False


pytestmark = [
    pytest.mark.lane("engines"),
    needs("munged", "slurmctld", "slurmd", "srun", "sbatch"),
    pytest.mark.skipif(not _name_is_known(), reason="The name of this machine has no address"),
]
SLOW_FITS = str(Path(__file__).with_name("scripts") / "slow_fits.py")
RESTART_SECONDS = 250


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for all tests of this module."""
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def finished(slurm: Cluster, job: str, output: Path, seconds: float = 120.0) -> str:
    """Waits until a job has ended well, and returns its output. A job that waits to start again starts now."""
    deadline = time.monotonic() + seconds
    while (state := slurm.state(job)) in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
        assert time.monotonic() < deadline, (output.read_text("utf-8")[-3000:] if output.exists() else state) + slurm.logs()
        if state == "PENDING" and slurm.state(job, "Restarts") != "0":
            time.sleep(3.0)  # A job that starts in the second in which it was ended counts as ended.
            with contextlib.suppress(subprocess.CalledProcessError):  # It has started meanwhile.
                slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(1.0)
    text = output.read_text("utf-8")
    assert state == "COMPLETED", text[-3000:] + slurm.logs()
    return text


def test_srun_starts_the_ranks(slurm: Cluster, tmp_path: Path) -> None:
    output, _ = done(["srun", "-n", "2", sys.executable, JOINS], tmp_path, **slurm.variables)
    check_ranks(found_in(output), "shared_memory")


def test_ranks_of_srun_learn_what_one_device_learns(slurm: Cluster, one_device: list[Any], tmp_path: Path) -> None:
    output, _ = done(["srun", "-n", "2", *RUN, GOES_ON], tmp_path, **slurm.variables)
    check_fits(output, one_device)


def test_ranks_of_srun_talk_through_mpi(slurm: Cluster, one_device: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    try:
        slurm.ask("srun", "--mpi=pmix", "true")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Slurm cannot use PMIx (libpmix-dev): {error.stderr.splitlines()[0]}")
    command = ["srun", "--mpi=pmix", "-n", "2", *RUN, "--communicator", "mpi", GOES_ON]
    check_fits(done(command, tmp_path, **slurm.variables)[0], one_device)


def test_the_body_of_a_batch_script_is_one_process(slurm: Cluster, one_device: list[Any], tmp_path: Path) -> None:
    """It has all variables of a rank, and is none: `tfrep run` starts a run of its own there."""
    body = tmp_path / "body.sh"
    run = " ".join([*RUN, "-n", "2", "--communicator", "tf", GOES_ON])
    body.write_text(f"#!/bin/bash\n[[ $SLURM_PROCID == 0 && $SLURM_NTASKS == 2 ]] || exit 9\n{run}\n", "utf-8")
    output = tmp_path / "output.txt"
    job = slurm.ask("sbatch", "--parsable", "-n", "2", f"--chdir={tmp_path}", f"--output={output}", str(body))
    check_fits(finished(slurm, job, output), one_device)


@needs_networks
def test_a_job_of_two_nodes_with_gpus(one_device: list[Any], tmp_path: Path) -> None:
    """The script of docs/recipes/clusters.md, with two tasks and two GPUs, which devices stand for, on each node."""
    page = (REPOSITORY / "docs/recipes/clusters.md").read_text("utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    here = {
        "per-node=4": "per-node=2",
        "cpus-per-task=8": "cpus-per-task=1",
        "%x-%j.out": "output.txt",
        "source venv/bin/activate\n": "",
        "tfrep run train.py": shlex.join([*RUN, "--communicator", "tf", GOES_ON]),
    }
    for of_page, of_test in here.items():
        assert of_page in script
        script = script.replace(of_page, of_test)
    (tmp_path / "job.sh").write_text(f"{script}srun --label env\n", "utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        two_networks() as networks,
        cluster(Path(folder), networks) as slurm,
    ):
        job = slurm.ask("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh"))
        text = finished(slurm, job, tmp_path / "output.txt")
    check_fits(text, one_device)
    tasks = re.findall(r"(\d): SLURMD_NODENAME=(.*)", text)
    assert sorted(tasks) == [(str(rank), HOSTS[rank // 2]) for rank in range(4)]
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(.*)", text) == ["0,1"] * 4


def in_terminal(*command: str) -> list[str]:
    """Returns a command whose standard input is a terminal."""
    return ["script", "--quiet", "--return", "--command", shlex.join(command), "/dev/null"]


PLACE = f"{sys.executable} {TELLS}"
OF_BASH = ["bash", "-c", f"{PLACE}; true"]  # With a second command, bash does not become the first one.
ALONE, RANKS = [["single process", 0, 1]], [["Slurm", 0, 2], ["Slurm", 1, 2]]
PLACES = {
    "srun bash": (["srun", "-n", "2", *OF_BASH], RANKS),
    "srun under salloc": (["salloc", "-n", "2", "srun", *PLACE.split()], RANKS),
    "shell of salloc": (in_terminal("salloc", "-n", "2", "srun", "--interactive", "--pty", *OF_BASH), ALONE),
    "shell of srun": (in_terminal("srun", "-n", "2", "--pty", *OF_BASH), ALONE),
    "srun in a shell": (in_terminal("srun", "-n", "2", "--pty", "bash", "-c", f"srun --overlap -n 2 {PLACE}"), RANKS),
}


@pytest.mark.parametrize("how", PLACES)
def test_ranks_and_shells(slurm: Cluster, how: str, tmp_path: Path) -> None:
    """A process of an interactive shell is alone. What `srun` starts from there is not, nor what it starts through bash."""
    command, places = PLACES[how]
    output, _ = done(command, tmp_path, **slurm.variables)
    assert [each["place"] for each in places_in(output)] == places


def script_of_the_page() -> str:
    """Returns the script of docs/engines.md, which runs another program here."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (REPOSITORY / "docs/engines.md").read_text("utf-8"), re.DOTALL)
    assert "srun tfrep run --backup-dir" in script
    return script.replace("tfrep run", " ".join(RUN)).replace("train.py", f"{SLOW_FITS} 2")


def test_a_job_that_is_warned_starts_again_and_ends_as_if_undisturbed(slurm: Cluster, tmp_path: Path) -> None:
    (alone,) = found_in(done([sys.executable, SLOW_FITS, "0"], tmp_path)[0])
    body, output = tmp_path / "body.sh", tmp_path / "output.txt"
    body.write_text(script_of_the_page(), "utf-8")
    job = slurm.ask("sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={output}", str(body))
    text = finished(slurm, job, output, RESTART_SECONDS)
    check_fits(text, alone["fits"])
    assert "asked to end. A backup was made" in text
    assert "The ranks ended with exit code 143." in text
    assert "fit resumes from its backup" in text
    assert "The ranks ended with exit code 0." in text
