"""Every environment, by table: variables in, place out."""

from __future__ import annotations

import json

import pytest

from tfrep_strategy.environments import (
    Environment,
    HorovodEnvironment,
    MpiEnvironment,
    SingleEnvironment,
    SlurmEnvironment,
    TfConfigEnvironment,
    _environments,
    detect_environment,
    identity_variables,
    register_environment,
)
from tfrep_strategy.environments.slurm import expand_counts, expand_nodes
from tfrep_strategy.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in identity_variables() | {"SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"}:
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
PMI = {"PMI_RANK": 1, "PMI_SIZE": 2}
SLURM = {
    "SLURM_PROCID": 5,
    "SLURM_NTASKS": 10,
    "SLURM_LOCALID": 1,
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_JOB_ID": 42,
}

PLACES = [
    # variables, class, rank, size, local rank, local size
    ({}, SingleEnvironment, 0, 1, 0, 1),
    ({"TF_CONFIG": ""}, SingleEnvironment, 0, 1, 0, 1),
    ({"TF_CONFIG": "{}"}, SingleEnvironment, 0, 1, 0, 1),
    (HOROVOD, HorovodEnvironment, 3, 4, 1, 2),
    ({"HOROVOD_RANK": 1, "HOROVOD_SIZE": 2}, HorovodEnvironment, 1, 2, 1, 2),
    (OPEN_MPI, MpiEnvironment, 2, 4, 0, 2),
    (PMI, MpiEnvironment, 1, 2, 1, 2),
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
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_NAME": "bash"}, SingleEnvironment, 0, 1, 0, 1),
    # A batch script is one process, which Slurm numbers 0 of all tasks that it might start.
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 1}, SingleEnvironment, 0, 1, 0, 1),
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0}, SlurmEnvironment, 0, 4, 0, 4),
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 1, "PMI_RANK": 0, "PMI_SIZE": 2}, MpiEnvironment, 0, 2, 0, 2),
    # Which one wins.
    ({**HOROVOD, **OPEN_MPI, **SLURM}, HorovodEnvironment, 3, 4, 1, 2),
    ({**OPEN_MPI, **SLURM, **tf_config({"worker": ["a:1"]})}, MpiEnvironment, 2, 4, 0, 2),
    ({**SLURM, **tf_config({"worker": ["a:1"]})}, TfConfigEnvironment, 0, 1, 0, 1),
    ({**SLURM, "PMI_RANK": 5, "PMI_SIZE": 10}, SlurmEnvironment, 5, 10, 1, 4),
    ({**SLURM, "PMI_RANK": 1, "PMI_SIZE": 2}, MpiEnvironment, 1, 2, 1, 2),
]


@pytest.mark.parametrize(("variables", "kind", "rank", "size", "local_rank", "local_size"), PLACES)
def test_place(monkeypatch, variables, kind, rank, size, local_rank, local_size):
    set_variables(monkeypatch, variables)
    found = detect_environment()
    assert type(found) is kind
    assert (found.rank, found.size, found.local_rank, found.local_size) == (rank, size, local_rank, local_size)
    assert len(found.hosts) == size


REFUSED = [
    # variables, what the message names
    ({"TF_CONFIG": "worker"}, "not JSON"),
    ({"TF_CONFIG": "[1]"}, "lacks 'cluster'"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "lacks 'cluster'"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "lacks 'task'"),
    (tf_config({"worker": ["a:1"]}, "wroker"), "type='wroker'"),
    (tf_config({"worker": ["a:1"], "ps": ["a:2"]}, "ps"), "has no rank"),
    (tf_config({"worker": ["a:1"], "evaluator": ["a:2"]}, "evaluator"), "has no rank"),
    (tf_config({"ps": ["a:1"]}), "not in the cluster"),
    (tf_config({"worker": ["a:1", "a:2"]}, index=2), "index=2"),
    (tf_config({"worker": ["a:1", "a:2"]}, index=-1), "index=-1"),
    (tf_config({"worker": ["a:1"]}, index="first"), "no integer index"),
    (tf_config({"worker": "a:1"}), "not a list"),
    (tf_config({"worker": ["a:1"], "chief": ["a:2", "a:3"]}, "chief"), "more than one chief"),
    (tf_config({"worker": ["a:1", "b:1", "a:1"]}), "ranks=[0, 2]"),
    (tf_config({"worker": ["a:1", "b"]}), "address='b'"),
    (tf_config({"worker": ["a:1", "b:port"]}), "address='b:port'"),
    (tf_config({"worker": ["a:1", "b:99999"]}), "address='b:99999'"),
    ({"HOROVOD_RANK": 2, "HOROVOD_SIZE": 2}, "rank=2, size=2"),
    ({"HOROVOD_RANK": 0}, "HOROVOD_SIZE is missing"),
    ({"HOROVOD_RANK": "x", "HOROVOD_SIZE": 2}, "HOROVOD_RANK='x'"),
    ({**HOROVOD, "HOROVOD_LOCAL_SIZE": 8}, "local_size=8"),
    ({**HOROVOD, "HOROVOD_LOCAL_RANK": 2}, "local_rank=2"),
    ({"HOROVOD_RANK": 0, "HOROVOD_SIZE": 0}, "size=0"),
    ({"OMPI_COMM_WORLD_RANK": 0}, "OMPI_COMM_WORLD_SIZE"),
    ({**SLURM, "SLURM_PROCID": 10}, "rank=10"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "tasks_per_node=[4, 4]"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(y2),2"}, "cannot read the tasks"),
    ({**SLURM, "SLURM_STEP_NODELIST": "node[01-"}, "cannot read the node list"),
    ({**SLURM, "SLURM_NODEID": 2}, "expected='node02'"),
]


@pytest.mark.parametrize(("variables", "named"), REFUSED)
def test_refused(monkeypatch, variables, named):
    set_variables(monkeypatch, variables)
    with pytest.raises(ConfigurationError) as caught:
        detect_environment()
    assert named in str(caught.value)


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


def test_slurm_addresses_agree_between_ranks_and_differ_between_jobs(monkeypatch):
    def addresses(**variables: object) -> list[str]:
        set_variables(monkeypatch, {**SLURM, **variables})
        return detect_environment().addresses

    first = addresses()
    assert first[0].split(":")[0] == "node01"
    assert first[-1].split(":")[0] == "node03"
    assert len(set(first)) == 10
    assert first == addresses(SLURM_PROCID=0, SLURM_LOCALID=0)
    assert not set(first) & set(addresses(SLURM_JOB_ID=43 + 4))
    assert not set(first) & set(addresses(SLURM_JOB_ID=42, SLURM_STEP_ID=1))


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
    monkeypatch.setattr("tfrep_strategy.environments._environments", list(_environments))
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
    with pytest.raises(ConfigurationError, match="(?s)Received: environment=.*Hint: pass a subclass of tfrep.Environment"):
        register_environment(dict)
