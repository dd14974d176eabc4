"""The manifests of `deploy/`: as their schemas want them, and what the controllers set, played to the ranks."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starting import JOINS, LIMIT, REPOSITORY, RUN, check_ranks, environ, found_in

from tfrep_strategy.cluster.environments import detect_environment, identity_variables
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("engines")

DEPLOY = REPOSITORY / "deploy"
KINDS = ("indexed_job", "tf_job", "train_job")
INDEXED = ("indexed_job", "gpu_job")


def read(kind: str) -> dict[str, Any]:
    """Returns the objects of a manifest by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / f"{kind}.yaml").read_text("utf-8"))}


def pods(kind: str) -> Iterator[dict[str, Any]]:
    """Gives the templates of the pods of a manifest."""
    objects = read(kind)
    if kind in INDEXED:
        yield objects["Job"]["spec"]["template"]
    elif kind == "tf_job":
        yield from (each["template"] for each in objects["TFJob"]["spec"]["tfReplicaSpecs"].values())
    else:
        jobs = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        yield from (job["template"]["spec"]["template"] for job in jobs)


def check_schema(thing: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(thing, validate.latest_version(), strict=True)


@pytest.mark.parametrize("kind", INDEXED)
def test_kubernetes_takes_the_indexed_jobs(kind: str) -> None:
    for thing in read(kind).values():
        check_schema(thing)
        changed = copy.deepcopy(thing)
        changed["spec"]["compltions"] = 2
        with pytest.raises(Exception, match="compltions"):
            check_schema(changed)


@pytest.mark.parametrize("kind", [*KINDS, "gpu_job"])
def test_kubernetes_takes_the_pods(kind: str) -> None:
    for template in pods(kind):
        spec = {"restartPolicy": "OnFailure"} | template["spec"]
        check_schema({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec})


@pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
def test_kubeflows_trainer_takes_the_train_job(kind: str) -> None:
    """Its models read every field of the manifest, and would leave out one that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    thing = read("train_job")[kind]
    model = getattr(models, f"TrainerV1alpha1{kind}")
    assert model.from_dict(thing).to_dict() == thing
    changed = copy.deepcopy(thing)
    changed["spec"]["numNods"] = 2
    assert model.from_dict(changed).to_dict() != changed


def test_kubeflows_operator_takes_the_tf_job() -> None:
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")
    job = read("tf_job")["TFJob"]
    assert set(job["spec"]) <= set(models.KubeflowOrgV1TFJobSpec.attribute_map.values())
    for replicas in job["spec"]["tfReplicaSpecs"].values():
        assert set(replicas) <= set(models.KubeflowOrgV1ReplicaSpec.attribute_map.values())


def variables(kind: str, index: int) -> dict[str, str]:
    """Returns what is set in a pod: by the manifest, and by the controllers, as their sources do it."""
    (template,) = pods(kind)
    (container,) = template["spec"]["containers"]
    own = {each["name"]: each["value"] for each in container.get("env", [])}
    objects = read(kind)
    if kind in INDEXED:
        return own | {"JOB_COMPLETION_INDEX": str(index)}
    if kind == "tf_job":
        (port,) = container["ports"]
        name, space = (objects["TFJob"]["metadata"][key] for key in ("name", "namespace"))
        workers = objects["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]["replicas"]
        addresses = [f"{name}-worker-{worker}.{space}.svc:{port['containerPort']}" for worker in range(workers)]
        task = {"type": "worker", "index": index}
        return own | {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task, "environment": "cloud"})}
    name = objects["TrainJob"]["metadata"]["name"]
    return own | {
        "JOB_COMPLETION_INDEX": str(index),
        "PET_NNODES": str(objects["TrainJob"]["spec"]["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
    }


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("kind", "environment", "address"),
    [
        ("indexed_job", "indexed Job", "train-0.train:29500"),
        ("tf_job", "TF_CONFIG", "train-worker-0.default.svc:2222"),
        ("train_job", "TrainJob", "train-node-0-0.train:29400"),
    ],
)
def test_pods_are_ranks(kind: str, environment: str, address: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in identity_variables():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables(kind, index).items():
        monkeypatch.setenv(name, value)
    found = detect_environment()
    assert (found.name, found.rank, found.size) == (environment, index, 2)
    assert (found.local_rank, found.local_size) == (0, 1)
    assert (found.rendezvous or (found.addresses or [""])[0]) == address
    if kind == "indexed_job":  # The address is that of pod 0 in the Service.
        job, service = (read(kind)[each] for each in ("Job", "Service"))
        name = job["metadata"]["name"]
        assert address == f"{name}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == found.size


def replaced(variables: dict[str, str], texts: dict[str, str]) -> dict[str, str]:
    """Returns variables of a pod for a process of this machine."""
    for of_pod, of_test in texts.items():
        variables = {name: value.replace(of_pod, of_test) for name, value in variables.items()}
    return variables


def outputs_of(commands: list[list[str]], variables: list[dict[str, str]], folder: Path) -> list[str]:
    """Runs the commands of pods at the same time, and returns what each has printed."""
    started = [
        subprocess.Popen(command, cwd=folder, env=environ(**own), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [pod.communicate(timeout=LIMIT) for pod in started]
    finally:
        for pod in started:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in started] == [0, 0], [error[-3000:] for _, error in outputs]
    return [output for output, _ in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_of_the_pods_makes_a_run(kind: str, tmp_path: Path) -> None:
    """Two processes with the variables of the pods. Their hosts are this machine, and the secret is a file."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test", "utf-8")
    port, other = free_ports(2)
    here = {
        "train-0.train": "localhost", "29500": str(port),
        "train-node-0-0.train": "localhost", "29400": str(port),
        "train-worker-0.default.svc:2222": f"localhost:{port}", "train-worker-1.default.svc:2222": f"localhost:{other}",
        "/secret/secret": str(secret),
    }  # fmt: skip
    outputs = outputs_of([[*RUN, JOINS]] * 2, [replaced(variables(kind, index), here) for index in range(2)], tmp_path)
    # The pods of the test are on one machine, which a run with a rendezvous does not ask for.
    communicator = "shared_memory" if kind == "tf_job" else "tf"
    check_ranks([each for output in outputs for each in found_in(output)], communicator)


def test_the_launchers_of_pods_with_gpus_make_a_run(tmp_path: Path) -> None:
    """As above. Each pod starts one rank, in place of one for each of its GPUs."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test", "utf-8")
    (template,) = pods("gpu_job")
    (container,) = template["spec"]["containers"]
    *shell, command = container["command"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(command.split(" -n ")[1].split()[0])
    job, service = (read("gpu_job")[each] for each in ("Job", "Service"))
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(command.split(" --nnodes ")[1].split()[0])
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert f" --rendezvous train-0.train:{service['spec']['ports'][0]['port']} " in command
    (port,) = free_ports(1)
    here = {"train-0.train:29500": f"localhost:{port}", "-n 4": "-n 1", "train.py": JOINS, "tfrep run": shlex.join(RUN)}
    for of_pod, of_test in here.items():
        command = command.replace(of_pod, of_test)
    environs = [replaced(variables("gpu_job", index), {"/secret/secret": str(secret)}) for index in range(2)]
    outputs = outputs_of([[*shell, command]] * 2, environs, tmp_path)
    check_ranks([each for output in outputs for each in found_in(output)], "tf")
