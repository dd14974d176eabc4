"""Every environment, by table: variables in, place out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from raising import refuses

from tfrep_strategy.cluster.environments import (
    AwsBatchEnvironment,
    Environment,
    HorovodEnvironment,
    IndexedJobEnvironment,
    KerasDistributionEnvironment,
    MpiEnvironment,
    SingleEnvironment,
    SlurmEnvironment,
    TfConfigEnvironment,
    TorchrunEnvironment,
    TrainJobEnvironment,
    _environments,
    detect_environment,
    identity_variables,
    register_environment,
)
from tfrep_strategy.cluster.environments.slurm import expand_counts, expand_nodes
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.errors import ConfigurationError

pytestmark = pytest.mark.lane("quick")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    of_slurm = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PTY_PORT", "SLURM_TASK_PID"}
    for name in identity_variables() | of_slurm:
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def tf_config(cluster: object, task_type: str = "worker", index: object = 0) -> dict[str, object]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})}


HOROVOD = {
    "HOROVOD_RANK": 3,
    "HOROVOD_SIZE": 4,
    "HOROVOD_LOCAL_RANK": 1,
    "HOROVOD_LOCAL_SIZE": 2,
    "HOROVOD_HOSTNAME": "b",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 2,
    "OMPI_COMM_WORLD_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 0,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
}
MVAPICH = {f"MV2{name[4:]}": value for name, value in OPEN_MPI.items()}
PMI = {"PMI_RANK": 1, "PMI_SIZE": 2}
SLURM = {
    "SLURM_PROCID": 5,
    "SLURM_NTASKS": 10,
    "SLURM_LOCALID": 1,
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_JOB_ID": 42,
}

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": 29500}
TORCHRUN = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, **MASTER}
TRAIN_JOB = {
    "PET_NODE_RANK": 1, "PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": 29400,
}  # fmt: skip
INDEXED_JOB = {"JOB_COMPLETION_INDEX": 1, "WORLD_SIZE": 3, **MASTER}
AWS_BATCH = {
    "AWS_BATCH_JOB_NODE_INDEX": 2, "AWS_BATCH_JOB_NUM_NODES": 3, "AWS_BATCH_JOB_MAIN_NODE_INDEX": 0,
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}  # fmt: skip

KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1,a:2", "KERAS_DISTRIBUTION_NUM_PROCESSES": 3, "KERAS_DISTRIBUTION_PROCESS_ID": 2,
}  # fmt: skip

ALONE = {"RANK": 0, "WORLD_SIZE": 1}

PLACES = [
    # variables, class, rank, size, local rank, local size
    ({}, SingleEnvironment, 0, 1, 0, 1),
    ({"TF_CONFIG": ""}, SingleEnvironment, 0, 1, 0, 1),
    ({"TF_CONFIG": "{}"}, SingleEnvironment, 0, 1, 0, 1),
    (HOROVOD, HorovodEnvironment, 3, 4, 1, 2),
    ({"HOROVOD_RANK": 1, "HOROVOD_SIZE": 2}, HorovodEnvironment, 1, 2, 1, 2),
    (OPEN_MPI, MpiEnvironment, 2, 4, 0, 2),
    (MVAPICH, MpiEnvironment, 2, 4, 0, 2),
    (PMI, MpiEnvironment, 1, 2, 1, 2),
    ({"PMIX_RANK": 1, "PMI_SIZE": 2}, MpiEnvironment, 1, 2, 1, 2),
    ({**PMI, "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 1}, MpiEnvironment, 1, 2, 0, 1),
    (tf_config({"worker": ["a:1", "b:1", "a:2"]}, index=2), TfConfigEnvironment, 2, 3, 1, 2),
    (tf_config({"worker": ["a:1", "b:1"]}, index="1"), TfConfigEnvironment, 1, 2, 0, 1),
    (tf_config({"worker": ["a:2"], "chief": ["a:1"]}, "chief"), TfConfigEnvironment, 0, 2, 0, 2),
    (tf_config({"worker": ["b:2"], "chief": ["a:1"]}, "worker"), TfConfigEnvironment, 1, 2, 0, 1),
    (tf_config({"worker": ["a:1"], "ps": ["c:1"], "evaluator": ["d:1"]}), TfConfigEnvironment, 0, 1, 0, 1),
    (tf_config({"worker": {"0": "a:1", "1": "b:1"}}, index=1), TfConfigEnvironment, 1, 2, 0, 1),
    (tf_config({"worker": ["[::1]:1", "[::1]:2"]}, index=1), TfConfigEnvironment, 1, 2, 1, 2),
    (SLURM, SlurmEnvironment, 5, 10, 1, 4),
    ({**SLURM, "SLURM_PROCID": 9}, SlurmEnvironment, 9, 10, 1, 2),
    ({"SLURM_PROCID": 1, "SLURM_NTASKS": 2}, SlurmEnvironment, 1, 2, 1, 2),
    # The step in which salloc runs a shell.
    ({**SLURM, "SLURM_PROCID": 0, "SLURM_STEP_ID": 4294967290}, SingleEnvironment, 0, 1, 0, 1),
    # Slurm gives these names to jobs of srun bash and of salloc. Their tasks are ranks.
    ({**SLURM, "SLURM_JOB_NAME": "bash"}, SlurmEnvironment, 5, 10, 1, 4),
    ({**SLURM, "SLURM_JOB_NAME": "interactive"}, SlurmEnvironment, 5, 10, 1, 4),
    # A batch script is one process, which Slurm numbers 0 of all tasks that it might start.
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 1}, SingleEnvironment, 0, 1, 0, 1),
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0}, SlurmEnvironment, 0, 4, 0, 4),
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 1, "PMI_RANK": 0, "PMI_SIZE": 2}, MpiEnvironment, 0, 2, 0, 2),
    (TORCHRUN, TorchrunEnvironment, 3, 4, 1, 2),
    ({"RANK": 1, "WORLD_SIZE": 2, **MASTER}, TorchrunEnvironment, 1, 2, 0, 1),
    ({"RANK": 1, "WORLD_SIZE": 2, **MASTER, "MASTER_ADDR": "127.0.0.1"}, TorchrunEnvironment, 1, 2, 1, 2),
    ({"RANK": 0, "WORLD_SIZE": 1}, TorchrunEnvironment, 0, 1, 0, 1),
    ({"RANK": 1}, SingleEnvironment, 0, 1, 0, 1),
    ({"WORLD_SIZE": 2, **MASTER}, SingleEnvironment, 0, 1, 0, 1),
    (TRAIN_JOB, TrainJobEnvironment, 1, 2, 0, 1),
    ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}, TrainJobEnvironment, 1, 2, 0, 1),
    (INDEXED_JOB, IndexedJobEnvironment, 1, 3, 0, 1),
    ({"JOB_COMPLETION_INDEX": 0, "WORLD_SIZE": 1}, IndexedJobEnvironment, 0, 1, 0, 1),
    (AWS_BATCH, AwsBatchEnvironment, 2, 3, 0, 1),
    ({**AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": 1}, AwsBatchEnvironment, 1, 3, 0, 1),
    ({**AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": 2}, AwsBatchEnvironment, 0, 3, 0, 1),
    ({"AWS_BATCH_JOB_NODE_INDEX": 0, "AWS_BATCH_JOB_NUM_NODES": 1}, AwsBatchEnvironment, 0, 1, 0, 1),
    ({"AWS_BATCH_JOB_ARRAY_INDEX": 3}, SingleEnvironment, 0, 1, 0, 1),
    (KERAS, KerasDistributionEnvironment, 2, 3, 1, 2),
    ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1"}, KerasDistributionEnvironment, 2, 3, 0, 1),
    ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:1"}, KerasDistributionEnvironment, 2, 3, 2, 3),
    # Which one wins.
    ({**TORCHRUN, **TRAIN_JOB, **INDEXED_JOB, "WORLD_SIZE": 4, **SLURM}, TorchrunEnvironment, 3, 4, 1, 2),
    ({**TRAIN_JOB, **INDEXED_JOB}, TrainJobEnvironment, 1, 2, 0, 1),
    ({**OPEN_MPI, **TORCHRUN}, MpiEnvironment, 2, 4, 0, 2),
    ({**AWS_BATCH, **OPEN_MPI}, MpiEnvironment, 2, 4, 0, 2),
    ({**TORCHRUN, **tf_config({"worker": ["a:1", "b:1"]})}, TfConfigEnvironment, 0, 2, 0, 1),
    ({**HOROVOD, **OPEN_MPI, **SLURM}, HorovodEnvironment, 3, 4, 1, 2),
    ({**OPEN_MPI, **SLURM, **tf_config({"worker": ["a:1"]})}, MpiEnvironment, 2, 4, 0, 2),
    ({**SLURM, **tf_config({"worker": ["a:1", "b:1"]})}, TfConfigEnvironment, 0, 2, 0, 1),
    ({**SLURM, "PMI_RANK": 5, "PMI_SIZE": 10}, SlurmEnvironment, 5, 10, 1, 4),
    ({**SLURM, "PMI_RANK": 1, "PMI_SIZE": 2}, MpiEnvironment, 1, 2, 1, 2),
    ({**SLURM, "SLURM_STEP_ID": 0, "PMIX_RANK": 5}, SlurmEnvironment, 5, 10, 1, 4),
    ({**SLURM, "SLURM_PROCID": 0, "SLURM_STEP_ID": 4294967290, "PMIX_RANK": 0}, SingleEnvironment, 0, 1, 0, 1),
    # What describes one process beside what describes one process, or nothing that can be read.
    ({**ALONE, "SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_JOB_ID": 42, "SLURM_STEP_ID": 3}, TorchrunEnvironment, 0, 1, 0, 1),
    ({**ALONE, "SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 42}, TorchrunEnvironment, 0, 1, 0, 1),
    ({**ALONE, **SLURM, "SLURM_PROCID": 0, "SLURM_STEP_ID": 4294967290}, TorchrunEnvironment, 0, 1, 0, 1),
    ({"PET_NODE_RANK": 0, "PET_NNODES": 1, "JOB_COMPLETION_INDEX": 0}, TrainJobEnvironment, 0, 1, 0, 1),
    ({**ALONE, "JOB_COMPLETION_INDEX": 3}, TorchrunEnvironment, 0, 1, 0, 1),
]


@pytest.mark.parametrize(("variables", "kind", "rank", "size", "local_rank", "local_size"), PLACES)
def test_place(monkeypatch, variables, kind, rank, size, local_rank, local_size):
    set_variables(monkeypatch, variables)
    found = detect_environment()
    assert type(found) is kind
    assert (found.rank, found.size, found.local_rank, found.local_size) == (rank, size, local_rank, local_size)
    assert len(found.hosts) == size


REFUSED = [
    ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1"}, "job_addresses='a:1,b:1'"),
    ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a"}, "KERAS_DISTRIBUTION_JOB_ADDRESSES"),
    ({**KERAS, "KERAS_DISTRIBUTION_PROCESS_ID": 3}, "3"),
    # variables, what the message names
    ({"TF_CONFIG": "worker"}, "invalid JSON"),
    ({"TF_CONFIG": "[1]"}, "TF_CONFIG=[1]"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "TF_CONFIG.cluster cannot be used: field required"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG.task cannot be used: field required"),
    (tf_config({"worker": ["a:1"]}, "wroker"), "type='wroker'"),
    (tf_config({"worker": ["a:1"], "ps": ["a:2"]}, "ps"), "has no rank"),
    (tf_config({"worker": ["a:1"], "evaluator": ["a:2"]}, "evaluator"), "has no rank"),
    (tf_config({"ps": ["a:1"]}), "not in the cluster"),
    (tf_config({"worker": ["a:1", "a:2"]}, index=2), "index=2"),
    (tf_config({"worker": ["a:1", "a:2"]}, index=-1), "task.index=-1"),
    (tf_config({"worker": ["a:1"]}, index="first"), "task.index='first'"),
    (tf_config({"worker": "a:1"}), "cluster.worker='a:1'"),
    (tf_config({"worker": ["a:1"], "chief": ["a:2", "a:3"]}, "chief"), "more than one chief"),
    (tf_config({"worker": ["a:1", "b:1", "a:1"]}), "ranks=[0, 2]"),
    (tf_config({"worker": ["a:1", "b"]}), "addresses.1='b'"),
    (tf_config({"worker": ["a:1", "b:port"]}), "addresses.1='b:port'"),
    (tf_config({"worker": ["a:1", "b:99999"]}), "addresses.1='b:99999'"),
    ({"HOROVOD_RANK": 2, "HOROVOD_SIZE": 2}, "rank=2, size=2"),
    ({"HOROVOD_RANK": 0}, "HOROVOD_SIZE is missing"),
    ({"HOROVOD_RANK": "x", "HOROVOD_SIZE": 2}, "HOROVOD_RANK='x'"),
    ({**HOROVOD, "HOROVOD_LOCAL_SIZE": 8}, "local_size=8"),
    ({**HOROVOD, "HOROVOD_LOCAL_RANK": 2}, "local_rank=2"),
    ({"HOROVOD_RANK": 0, "HOROVOD_SIZE": 0}, "HOROVOD_SIZE='0'"),
    ({"OMPI_COMM_WORLD_RANK": 0}, "OMPI_COMM_WORLD_SIZE"),
    ({"PMIX_RANK": 0}, "PMI_SIZE is missing"),
    ({"PMIX_RANK": 1, "SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 1}, "PMI_SIZE is missing"),
    ({**SLURM, "SLURM_PROCID": 10}, "rank=10"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "tasks_per_node=[4, 4]"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(y2),2"}, "cannot read the tasks"),
    ({**SLURM, "SLURM_STEP_NODELIST": "node[01-"}, "cannot read the node list"),
    ({**SLURM, "SLURM_NODEID": 2}, "expected='node02'"),
    ({**TORCHRUN, "RANK": 4}, "rank=4, size=4"),
    ({"RANK": 1, "WORLD_SIZE": 2}, "MASTER_ADDR is missing"),
    ({"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "a"}, "MASTER_PORT is missing"),
    ({"RANK": 1, **MASTER}, "WORLD_SIZE is missing"),
    ({**TORCHRUN, "MASTER_PORT": 99999}, "MASTER_PORT='99999'"),
    ({**TORCHRUN, "LOCAL_RANK": 2}, "local_rank=2"),
    ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, **MASTER}, "LOCAL_WORLD_SIZE is missing"),
    ({"PET_NODE_RANK": 1}, "PET_NNODES is missing"),
    ({"PET_NNODES": 2}, "PET_NODE_RANK is missing"),
    ({**TRAIN_JOB, "PET_NNODES": "1:2"}, "PET_NNODES='1:2'"),
    ({**TRAIN_JOB, "PET_NPROC_PER_NODE": 4}, "PET_NPROC_PER_NODE=4"),
    ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE='all'"),
    ({"PET_NODE_RANK": 1, "PET_NNODES": 2}, "PET_MASTER_ADDR is missing"),
    ({"JOB_COMPLETION_INDEX": 1}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT must be set"),
    ({"JOB_COMPLETION_INDEX": 1, "WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT must be set"),
    ({**INDEXED_JOB, "JOB_COMPLETION_INDEX": 3}, "rank=3, size=3"),
    ({**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": 3}, "AWS_BATCH_JOB_NODE_INDEX=3"),
    ({**AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": 3}, "AWS_BATCH_JOB_MAIN_NODE_INDEX=3"),
    ({"AWS_BATCH_JOB_NODE_INDEX": 1}, "AWS_BATCH_JOB_NUM_NODES is missing"),
    (
        {"AWS_BATCH_JOB_NODE_INDEX": 1, "AWS_BATCH_JOB_NUM_NODES": 2},
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is missing",
    ),
    ({**OPEN_MPI, "MASTER_ADDR": "a"}, "MASTER_PORT is missing"),
    ({**SLURM, **ALONE}, "torchrun describes a process that is alone, and Slurm rank 5 of 10."),
    ({**SLURM, **ALONE}, "Hint: unset RANK, WORLD_SIZE if this process is a rank, or unset SLURM_PROCID, SLURM_NTASKS,"),
    ({**SLURM, **tf_config({"worker": ["a:1"]})}, "Hint: unset TF_CONFIG if this process is a rank, or unset SLURM_PROCID,"),
    ({**TORCHRUN, "HOROVOD_RANK": 0, "HOROVOD_SIZE": 1}, "Hint: unset HOROVOD_RANK, HOROVOD_SIZE if this process is a rank"),
    ({**ALONE, **TRAIN_JOB}, "TrainJob rank 1 of 2"),
]


@pytest.mark.parametrize(("variables", "named"), REFUSED)
def test_refused(monkeypatch, variables, named):
    set_variables(monkeypatch, variables)
    with pytest.raises(ConfigurationError) as caught:
        detect_environment()
    assert named in str(caught.value)


RENDEZVOUS = [
    (TORCHRUN, "node1:29500"),
    ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "node1:29501"),
    (TRAIN_JOB, "job-node-0-0.job:29400"),
    (INDEXED_JOB, "node1:29500"),
    (AWS_BATCH, "10.0.0.7:29500"),
    ({**AWS_BATCH, "MASTER_PORT": 1234}, "10.0.0.7:1234"),
    ({**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": 0}, f"{socket.gethostname()}:29500"),
    ({**OPEN_MPI, **MASTER}, "node1:29500"),
    ({**OPEN_MPI, "PMIX_NAMESPACE": 7}, None),  # The job is on several machines.
    ({"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}, None),
    (HOROVOD, None),
    (SLURM, None),
]


@pytest.mark.parametrize(("variables", "rendezvous"), RENDEZVOUS)
def test_where_ranks_meet(monkeypatch, variables, rendezvous):
    set_variables(monkeypatch, variables)
    found = detect_environment()
    assert found.rendezvous == rendezvous
    assert found.can_tell_addresses == (rendezvous is not None or variables is SLURM)


@pytest.mark.parametrize(("gpus", "processes"), [(0, 0), (1, 0), (4, 4)])
def test_a_pod_that_asks_for_a_process_on_each_gpu(monkeypatch, gpus, processes):
    """With one process, the other GPUs would have nothing to do."""
    monkeypatch.setattr("tfrep_strategy.cluster.environments.kubernetes.driver_gpus", lambda: [None] * gpus)
    set_variables(monkeypatch, {**TRAIN_JOB, "PET_NPROC_PER_NODE": "gpu"})
    assert TrainJobEnvironment.processes() == processes
    if not processes:
        assert detect_environment().size == 2
    else:
        with refuses(PET_NPROC_PER_NODE=4):
            detect_environment()


def test_jobs_of_one_machine_meet_on_ports_of_their_own(monkeypatch):
    def rendezvous(job: int, rank: int) -> str:
        own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "PMIX_NAMESPACE": job}
        set_variables(monkeypatch, own)
        return detect_environment().rendezvous

    assert rendezvous(705691649, 0) == rendezvous(705691649, 1)
    assert rendezvous(705691649, 0) != rendezvous(705691650, 0)


KINDS = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
    "TrainJob": {"PET_NODE_RANK": "{rank}", "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "{port}"},
    "indexed Job": {"JOB_COMPLETION_INDEX": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
    "AWS Batch": {
        "AWS_BATCH_JOB_NODE_INDEX": "{rank}",
        "AWS_BATCH_JOB_NUM_NODES": "2",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
        "MASTER_PORT": "{port}",
    },
    "keras.distribution": {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "localhost:{port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": "{rank}",
    },
    "MPI": {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_meet_to_get_addresses(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    (port,) = free_ports(1, "")
    inherited = {name: value for name, value in os.environ.items() if name not in identity_variables()}
    inherited |= {"TFREP_SECRET_FILE": str(secret), "PYTHONPATH": os.pathsep.join([*sys.path])}
    program = Path(__file__).parent / "scripts" / "tells.py"
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, program],
                    env=inherited | {name: value.format(rank=rank, port=port) for name, value in KINDS[kind].items()},
                    stdout=subprocess.PIPE,
                    text=True,
                )  # fmt: skip
            )
            for rank in range(2)
        ]
        stack.callback(lambda: [rank.kill() for rank in ranks])
        first, second = (json.loads(rank.communicate(timeout=60)[0]) for rank in ranks)
    assert first["place"] == [kind, 0, 2]
    assert second["place"] == [kind, 1, 2]
    assert first["addresses"] == second["addresses"] == first["again"]
    assert {address.rpartition(":")[0] for address in first["addresses"]} == {"127.0.0.1"}
    assert len(set(first["addresses"])) == 2
    assert first["hosts"] == ["127.0.0.1"] * 2


def test_the_page_names_every_environment_and_its_variables():
    page = (Path(__file__).parents[3] / "docs" / "environment.md").read_text("utf-8")
    for kind in (each for each in _environments if each.__module__.startswith("tfrep_strategy.")):
        missing = [name for name in kind.variables if f"`{name.replace('MV2_', 'OMPI_')}`" not in page]  # It says "the same".
        missing += [] if f"| {kind.name} |" in page else [kind.name]
        assert not missing, f"add {kind.name} and its variables to docs/environment.md"


NODES = [
    ("n1", ["n1"]),
    ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
    ("a[1-2],b3", ["a1", "a2", "b3"]),
    ("b3,a[1-2]", ["b3", "a1", "a2"]),
    ("n[1-2]-[3-4]", ["n1-3", "n1-4", "n2-3", "n2-4"]),
    ("n[1,3]-x", ["n1-x", "n3-x"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ("a-1.cluster,b_2.cluster", ["a-1.cluster", "b_2.cluster"]),
]


@pytest.mark.parametrize(("text", "names"), NODES)
def test_expand_nodes(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[", "n]1", "n[a-b]", "a,,b", "a,", "n[1-2", "n[]"])
def test_expand_nodes_refuses(text):
    with pytest.raises(ConfigurationError):
        expand_nodes(text)


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("4(x2),2", [4, 4, 2]), ("1,2(x3)", [1, 2, 2, 2])])
def test_expand_counts(text, counts):
    assert expand_counts(text) == counts


def slurm_addresses(monkeypatch, **variables: object) -> list[str]:
    set_variables(monkeypatch, {**SLURM, **variables})
    return detect_environment().addresses


def test_slurm_addresses_agree_between_ranks(monkeypatch):
    addresses = slurm_addresses(monkeypatch)
    assert addresses[0].split(":")[0] == "node01"
    assert addresses[-1].split(":")[0] == "node03"
    assert len(set(addresses)) == 10
    assert addresses == slurm_addresses(monkeypatch, SLURM_PROCID=0, SLURM_LOCALID=0)


@pytest.mark.parametrize("tasks", [1, 2, 16, 17, 128])
def test_slurm_jobs_and_steps_that_follow_each_other_have_ports_of_their_own(monkeypatch, tasks):
    of_node = {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NTASKS": tasks}
    one = {**of_node, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    steps = [{"SLURM_JOB_ID": 42 + job, "SLURM_STEP_ID": step} for job in range(8) for step in range(3)]
    found = [address for step in steps for address in slurm_addresses(monkeypatch, **one, **step)]
    assert len(set(found)) == len(found) == len(steps) * tasks
    assert all(10_000 <= int(address.rpartition(":")[2]) < 30_000 for address in found)


def test_small_slurm_jobs_of_different_sizes_have_ports_of_their_own(monkeypatch):
    one = {"SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    jobs = [{"SLURM_JOB_ID": 42 + n, "SLURM_NTASKS": n, "SLURM_STEP_TASKS_PER_NODE": n} for n in range(1, 17)]
    found = [address for job in jobs for address in slurm_addresses(monkeypatch, **one, **job)]
    assert len(set(found)) == len(found) == sum(range(1, 17))


SHELLS = [
    # variables, whether standard input is a terminal, whether this is a process of a shell
    ({"SLURM_PTY_PORT": 40000, "SLURM_PROCID": 0}, True, True),
    ({"SLURM_PTY_PORT": 40000, "SLURM_PROCID": 0}, False, False),
    ({"SLURM_PTY_PORT": 40000, "SLURM_PROCID": 0, "SLURM_TASK_PID": os.getpid()}, True, False),
    ({"SLURM_PTY_PORT": 40000, "SLURM_PROCID": 1}, True, False),
    ({"SLURM_PROCID": 0}, True, False),
]


@pytest.mark.parametrize(("variables", "has_terminal", "in_shell"), SHELLS)
def test_a_shell_of_srun_is_one_process(monkeypatch, variables, has_terminal, in_shell):
    monkeypatch.setattr(os, "isatty", lambda file: has_terminal)
    set_variables(monkeypatch, {**SLURM, "SLURM_STEP_ID": 0, **variables})
    assert detect_environment().size == (1 if in_shell else 10)


def test_slurm_cyclic(monkeypatch):
    set_variables(monkeypatch, {**SLURM, "SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": 4, "SLURM_NODEID": 1})
    assert detect_environment().hosts == [
        *("node01", "node02", "node03"),
        *("node01", "node02", "node03"),
        *("node01", "node02"),
        *("node01", "node02"),
    ]


def test_hosts_that_are_not_told_stay_empty(monkeypatch):
    set_variables(monkeypatch, HOROVOD)
    assert detect_environment().hosts == ["", "", "", "b"]
    assert detect_environment().addresses is None


def test_describe_says_why(monkeypatch):
    set_variables(monkeypatch, HOROVOD)
    assert "rank 3 of 4" in detect_environment().describe()
    assert "HOROVOD_LOCAL_RANK=1" in detect_environment().describe()


def test_a_users_environment_goes_first(monkeypatch):
    monkeypatch.setattr("tfrep_strategy.cluster.environments._environments", list(_environments))
    set_variables(monkeypatch, {**HOROVOD, "MINE": "7"})

    @register_environment
    class Mine(Environment):
        name, variables = "mine", ("MINE",)

        @classmethod
        def detect(cls) -> bool:
            return True

        def __init__(self) -> None:
            super().__init__(rank=1, size=3, hosts=["x", "y", "y"], addresses=["x:1", "y:1", "y:2"])

    found = detect_environment()
    assert type(found) is Mine
    assert (found.local_rank, found.local_size) == (0, 2)
    assert found.describe() == "mine: rank 1 of 3 (MINE=7)"
    assert "MINE" in identity_variables()


def test_a_users_environment_is_believed(monkeypatch):
    monkeypatch.setattr("tfrep_strategy.cluster.environments._environments", list(_environments))
    set_variables(monkeypatch, SLURM)

    @register_environment
    class Alone(SingleEnvironment):
        name = "alone"

    assert type(detect_environment()) is Alone


@pytest.mark.parametrize(
    "parts",
    [{"hosts": ["a"]}, {"hosts": ["a", "b"], "addresses": ["a:1"]}, {"hosts": ["a", "b"], "addresses": ["a:1"] * 2}],
)
def test_parts_that_do_not_fit_are_refused(parts):
    class Mine(Environment):
        name = "mine"

        @classmethod
        def detect(cls) -> bool:
            return True

        def __init__(self) -> None:
            super().__init__(rank=0, size=2, **parts)

    with pytest.raises(ConfigurationError):
        Mine()


def test_only_environments_can_be_registered():
    with refuses(hint="pass a subclass of tfrep.Environment", environment=dict):
        register_environment(dict)
