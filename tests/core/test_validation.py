"""Settings from outside, drawn by Hypothesis: each is taken, or refused with a message, in time.

In the short lane each reader gets a hundred draws, in the lane `drawn` two thousand, which makes 14,000. The draws are the same in
every run, unless TFREP_RANDOM_DRAWS=1 asks for new ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import in_lane
from raising import refuses

from tfrep_strategy.cluster.environments import detect_environment, identity_variables
from tfrep_strategy.cluster.environments.tf_config import read_tf_config
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.cluster.rendezvous.meeting import shared_secret
from tfrep_strategy.cluster.transports import wanted_communicator
from tfrep_strategy.core.limits import longest_silence, meeting_seconds, timeout_seconds
from tfrep_strategy.core.validation import MOST_PROCESSES, MOST_RANKS, Address, check_fields, checked, made_folder
from tfrep_strategy.errors import LONGEST_SECONDS, ConfigurationError, message
from tfrep_strategy.running.coordinator import ClusterOptions
from tfrep_strategy.running.joining import for_this_pod
from tfrep_strategy.running.nodes import Node
from tfrep_strategy.running.runs import Options

pytestmark = pytest.mark.lane("quick")

SECONDS = 5
LONGEST_MESSAGE = 4000


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Has these variables, and no others that describe a run."""
    before = dict(os.environ)
    own = identity_variables() | {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"}
    kept = {name: value for name, value in before.items() if name not in own and not name.startswith("TFREP_")}
    try:
        os.environ.clear()
        os.environ.update(kept | variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def taken(read: Callable[[], Any]) -> Any:
    """Returns what was read; None if it was refused, with a message that people can read."""
    began = time.process_time()  # Other processes may keep this one waiting.
    found, refusal = None, "Received: "
    try:
        found = read()
    except ConfigurationError as error:
        refusal = str(error)
    assert time.process_time() - began < SECONDS
    assert len(refusal) < LONGEST_MESSAGE
    assert "Received: " in refusal or " missing" in refusal
    return found


# Draws.

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
ODD_TEXTS = st.sampled_from(
    [
        *("", " ", "\n", "a b", "-1", "1_0", "0x10", "1e3", "1e400", "inf", "-inf", "nan", "True", "[]", "٣", "\udcff"),
        *("1" * 5000, "9" * 30),
    ]
) | st.text(CHARACTERS, max_size=20)
ADDRESSES = st.sampled_from(
    ["a:1", "b:2", "[::1]:3", "10.0.0.1:65535", "a:0", "a:65536", "a", ":1", "a b:1", "a:" + "1" * 5000, "a:٣", "@/:1"]
)
COUNTS = st.integers(0, 5).map(str) | st.sampled_from(["100000", "99999999", "4000000000000"])
NUMBERS = st.integers(0, 12).map(str) | st.sampled_from(["007", "99", "100000", "99999999", "1" * 30])
RANGES = st.tuples(NUMBERS, st.just("-") | st.just(""), NUMBERS).map(lambda parts: "".join(parts[: 3 if parts[1] else 1]))
NODES = st.lists(
    st.tuples(
        st.sampled_from(["n", "gpu-", "", ","]),
        st.lists(RANGES, max_size=3).map(lambda each: f"[{','.join(each)}]") | st.just(""),
    ),
    max_size=8,
).map(lambda pieces: "".join(plain + numbers for plain, numbers in pieces))
TASKS = st.lists(st.builds("{}{}".format, COUNTS, st.just("") | COUNTS.map("(x{})".format)), max_size=5).map(",".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_TEXTS | ADDRESSES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["cluster", "task", "worker", "0", "1"]), inner, max_size=4)
    ),
    max_leaves=10,
)
JOBS = st.lists(ADDRESSES, max_size=4) | st.dictionaries(st.sampled_from("012"), ADDRESSES, max_size=3) | JSON
CLUSTERS = st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator", "other"]), JOBS, max_size=4)
TASKS_OF_CLUSTERS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["chief", "worker", "ps"]) | JSON, "index": st.integers(-1, 3) | JSON}
)
TF_CONFIGS = st.one_of(
    st.fixed_dictionaries({"cluster": CLUSTERS | JSON, "task": TASKS_OF_CLUSTERS | JSON}).map(json.dumps),
    JSON.map(json.dumps),
    st.builds(str.__mul__, st.sampled_from(['{"cluster":', "[", '{"task":{"type":']), st.integers(1, 100_000)),
    ODD_TEXTS,
)
SPECIAL = {
    "TF_CONFIG": TF_CONFIGS,
    "SLURM_STEP_NODELIST": NODES, "SLURM_JOB_NODELIST": NODES, "SLURM_STEP_TASKS_PER_NODE": TASKS, "SLURM_TASKS_PER_NODE": TASKS,
    "SLURM_DISTRIBUTION": st.sampled_from(["block", "cyclic", "plane=4"]),
    "MASTER_ADDR": st.sampled_from(["a", "::1", "127.0.0.1", "[::1]", "a b"]), "PET_MASTER_ADDR": st.just("a"),
    "MASTER_PORT": st.sampled_from(["1", "65535", "65536"]), "PET_MASTER_PORT": st.just("29400"),
    "TORCHELASTIC_USE_AGENT_STORE": st.just("True"),
}  # fmt: skip
KINDS = [
    ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_HOSTNAME"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT"],
    ["TF_CONFIG"],
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"],
    ["PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"],
    ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
    [
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID",
        "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_DISTRIBUTION", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE",
    ],
]  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(), st.just(10**5000), st.just(10**400), ODD_TEXTS,
    st.binary(max_size=3), st.lists(st.integers() | ADDRESSES, max_size=3), st.dictionaries(ODD_TEXTS, st.integers(), max_size=2),
)  # fmt: skip


@st.composite
def variables_of_a_run(draw: Any) -> dict[str, str]:
    """Draws what one launcher sets, and sometimes a part of what another does. Each variable may be odd, or missing."""
    names = draw(st.sampled_from(KINDS)) + draw(st.just([]) | st.sampled_from(KINDS))
    drawn = {}
    for name in dict.fromkeys(names):
        kind = draw(st.integers(0, 9))
        if kind:
            drawn[name] = draw(SPECIAL.get(name, COUNTS) if kind > 1 else ODD_TEXTS)
    return drawn


def _sometimes(usual: Any) -> Any:
    return st.integers(0, 4).flatmap(lambda kind: usual if kind else VALUES)


PLACES = {
    "rank": _sometimes(st.integers(0, 3)),
    "nnodes": _sometimes(st.sampled_from(["1", "4", "1:4", "3:3", "4:1", "0:2", "2:", ":", "1:2:3"])),
    "rendezvous": _sometimes(ADDRESSES),
}
OPTIONS = {
    "num_replicas": _sometimes(st.none() | st.integers(0, 8) | st.sampled_from([1000, 1001, 100_000, 10**9])),
    "strategy": _sometimes(st.sampled_from([None, "auto", "mirrored", "multi-worker"])),
    "communicator": _sometimes(st.sampled_from(["auto", "horovod", "tf"])),
    "hosts": _sometimes(st.none() | st.lists(ADDRESSES, max_size=3).map(",".join) | st.just("a:99999,b:9")),
    "export": _sometimes(st.sampled_from([(), ("HOME",)])),
    "log_dir": _sometimes(st.none() | st.just(Path("logs"))),
    "timeout": _sometimes(st.none() | st.floats(0, 10)),
    "prefix": _sometimes(st.booleans()),
    "max_restarts": _sometimes(st.integers(0, 3)),
    "node": _sometimes(st.none() | st.just(Node(0, 2, "a:1"))),
}


# Readers: each draws, reads, and checks what it was given.


def read_a_place_in_a_run(draw: Any) -> None:
    with environment(draw(variables_of_a_run())):
        found = taken(detect_environment)
        if found is not None:
            assert 0 <= found.rank < found.size == len(found.hosts) <= MOST_RANKS
            assert 0 <= found.local_rank < found.local_size <= found.size
            assert found.rendezvous is None or checked(Address, "rendezvous", found.rendezvous)
            assert len(found.describe()) < 20 * LONGEST_MESSAGE
        pod = taken(lambda: for_this_pod(Options()))
        assert pod is None or 0 < pod.size <= MOST_PROCESSES


def read_a_cluster(draw: Any) -> None:
    with environment({"TF_CONFIG": draw(TF_CONFIGS)}):
        found = taken(read_tf_config)
        assert found is None or found.task.index >= 0


def read_limits(draw: Any) -> None:
    value = draw(ODD_TEXTS | st.floats().map(str))
    names = ("TFREP_TIMEOUT", "TFREP_SILENCE_TIMEOUT", "TFREP_RENDEZVOUS_TIMEOUT")
    with environment(dict.fromkeys(names, value)):
        for read in (timeout_seconds, longest_silence, meeting_seconds):
            found = taken(read)
            is_without_end = found == math.inf and float(value) == 0 and read is not meeting_seconds
            assert found is None or is_without_end or 0 < found <= LONGEST_SECONDS


def read_options(draw: Any) -> None:
    options = taken(lambda: Options(**draw(st.fixed_dictionaries({}, optional=OPTIONS))))
    if options is not None:
        assert 1 <= options.size <= MOST_RANKS
        assert options.timeout is None or 0 < options.timeout < math.inf


def read_counts_of_a_cluster(draw: Any) -> None:
    names = ("workers", "servers", "max_restarts", "log_dir")
    options = taken(lambda: ClusterOptions(**draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES)))))
    assert options is None or (options.workers > 0 and options.servers > 0 and options.max_restarts >= 0)


def read_a_machine(draw: Any) -> None:
    node = taken(lambda: Node.of(**draw(st.fixed_dictionaries(PLACES))))
    assert node is None or 1 <= (node.least or 1) <= node.count <= MOST_RANKS
    assert node is None or (node.rank is None and node.is_elastic) or 0 <= node.rank < node.count
    place = taken(lambda: Place(draw(PLACES["rendezvous"]), 0, 1))
    assert place is None or 0 < place.target[1] < 65536


READERS = (*(read_a_place_in_a_run, read_a_cluster, read_limits, read_options, read_counts_of_a_cluster, read_a_machine),)
DRAWS = {"some": 100, "many": 2_000}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("draws", ["some", *in_lane("drawn", "many")])
@pytest.mark.timeout(1800)
def test_any_setting_is_taken_or_refused(reader: Callable[[Any], None], draws: str) -> None:
    @settings(
        max_examples=DRAWS[draws],
        deadline=None,
        derandomize=not os.environ.get("TFREP_RANDOM_DRAWS"),
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        reader(data.draw)

    run()


TASK = '"task": {"type": "worker", "index": 0}'
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}


def _tf_config(worker: str = '["a:1"]', task: str = TASK) -> dict[str, str]:
    return {"TF_CONFIG": f'{{"cluster": {{"worker": {worker}}}, {task}}}'}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (_tf_config(worker="[" * 1000 + "]" * 1000), "recursion limit"),
        ({"TF_CONFIG": '{"cluster":' * 100_000}, "recursion limit"),
        (_tf_config(task='"task": {"type": ["worker"], "index": 0}'), "TF_CONFIG.task.type=['worker']"),
        (_tf_config(task='"task": {"type": "worker", "index": Infinity}'), "TF_CONFIG.task.index=inf"),
        (_tf_config(task='"task": {"type": "worker", "index": 0.5}'), "TF_CONFIG.task.index=0.5"),
        (_tf_config(worker=f'["a:{"1" * 5000}"]'), "5004 characters"),
        ({**TORCHRUN, "MASTER_PORT": "1" * 5000}, "MASTER_PORT='111"),
        ({**TORCHRUN, "MASTER_ADDR": "a b"}, "rendezvous='a b:1'"),
        ({**TORCHRUN, "WORLD_SIZE": "1000000000"}, "WORLD_SIZE='1000000000'"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1000000000"}, "HOROVOD_SIZE='1000000000'"),
        ({"JOB_COMPLETION_INDEX": "0", **TORCHRUN, "RANK": "", "WORLD_SIZE": "1000000000"}, "RANK is missing"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[0-99999999]"}, "nodes='n[0-99999999]'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[0-999][0-999][0-999]"}, "nodes='n[0-999][0-999][0-999]'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[0-99999]," * 5000 + "n"}, "cannot read the node list"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n" * 100_000 + "[0-9999]"}, "cannot read the node list"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n" + "[1]" * 30_000 + "[0-9999]"}, "cannot read the node list"),
        ({**SRUN, "SLURM_STEP_NODELIST": f"n[{'1' * 5000}]"}, "cannot read the node list"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "tasks_per_node='1(x999999999)'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "99999999", "SLURM_NTASKS": "99999999"}, "SLURM_NTASKS='99999999'"),
    ],
)
def test_a_place_in_a_run_that_cannot_be(variables: dict[str, str], named: str) -> None:
    with environment(variables):
        assert taken(detect_environment) is None
        with pytest.raises(ConfigurationError) as caught:
            detect_environment()
    assert named in str(caught.value)


def test_a_large_run_is_read_in_time() -> None:
    nodes = {"SLURM_STEP_NODELIST": "n[0-999]", "SLURM_STEP_TASKS_PER_NODE": "49001,1(x999)", "SLURM_NTASKS": "50000"}
    with environment({**SRUN, **nodes, "SLURM_DISTRIBUTION": "cyclic"}):
        found = taken(detect_environment)
    assert found.hosts[:1001] == [f"n{index}" for index in range(1000)] + ["n0"]
    assert len(set(found.addresses)) == 50_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"timeout": value}, "timeout=") for value in ("60", [60], True, math.inf, -math.inf, math.nan, 0, 1e300, 10**400)),
        *(({"hosts": value}, "hosts=") for value in (4, ["a:1"], b"a:1", "a:" + "1" * 5000, "a:99999999", "a:99999,b:9")),
        *(({"num_replicas": value}, "num_replicas=") for value in (100_000, 10**5000, "2", 2.0, True)),
        *(({name: 3.5}, f"{name}=3.5") for name in OPTIONS if name != "timeout"),
    ],
)
def test_options_of_a_run_that_cannot_be(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Options(**options)
    assert named in str(caught.value)
    assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless", "long"])
def test_a_secret_that_is_no_file_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    if kind == "folder":
        path.mkdir(0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)  # A read would wait for ever.
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.touch(0o600)
        os.truncate(path, 1 << 40)
    monkeypatch.setenv("TFREP_SECRET_FILE", str(path))
    with refuses(code="TFREP-E015", told=["65536 bytes"], TFREP_SECRET_FILE=str(path)):
        shared_secret(one_machine=True)


def test_a_communicator_of_the_environment_is_named() -> None:
    for value, name in (("", "auto"), ("tf", "tf")):
        with environment({"TFREP_COMMUNICATOR": value}):
            assert wanted_communicator() == name
    for value in ("mpirun", " tf", "\udcff", "x" * 10_000):
        with environment({"TFREP_COMMUNICATOR": value}), pytest.raises(ConfigurationError) as caught:
            wanted_communicator()
        assert "TFREP_COMMUNICATOR='" in str(caught.value)
        assert len(str(caught.value)) < LONGEST_MESSAGE


def test_more_ports_than_a_process_may_open() -> None:
    with refuses(count=1_000_000):
        free_ports(1_000_000)


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError


def test_long_values_are_cut_in_messages() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, 10**5000, deep, [Unshowable()], list(range(10**5))):
        assert len(message("No.", setting=value)) < 600
    assert message("No.", setting="short") == "No. Received: setting='short'"


@dataclass
class Door:
    address: Address
    open_to: list[int]


def test_fields_are_what_their_annotations_say() -> None:
    check_fields(Door("a:1", [1, 2]))
    with refuses(**{"open_to.1": "2"}):
        check_fields(Door("a:1", [1, "2"]))  # type: ignore[list-item]
    with refuses(address="a"):
        check_fields(Door("a", []))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/logs", "x" * 5000, "a\0b", "/proc/logs"):
        with refuses(log_dir=...):
            made_folder("log_dir", tmp_path / name)
    assert made_folder("log_dir", tmp_path / "a" / "b").is_dir()
