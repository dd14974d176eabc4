"""Open MPI's `mpirun`, for real: it starts the ranks, which talk through TensorFlow's collectives, MPI, or Horovod."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import command
from starting import GOES_ON, JOINS, RUN, TESTS, check_fits, check_ranks, done, found_in, needs

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.transports import horovod_transports

pytestmark = [pytest.mark.lane("engines"), needs("mpirun")]

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HAS_HOROVOD = "mpi" in (horovod_transports() or ())
needs_mpi4py = pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is not installed")
COMMUNICATORS = [
    "tf",
    pytest.param("mpi", marks=needs_mpi4py),
    pytest.param("horovod", marks=pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod with MPI is not installed")),
]


def mpirun(ranks: int, arguments: list[str], folder: Path, exit_code: int = 0, **own: str) -> tuple[str, str]:
    """Runs a command on some ranks, which may share cores. Their meetings have a secret in the test's folder.

    Returns:
        What the ranks wrote, one after the other (`mpirun` mixes their long lines), and what came through standard error.
    """
    start = ["mpirun", "--oversubscribe", "-np", str(ranks), "--output-filename", f"{folder / 'output'}:nojobid"]
    _, said = done([*start, *arguments], folder, exit_code, **AS_ROOT, XDG_CACHE_HOME=str(folder / "cache"), **own)
    files = [folder / "output" / f"rank.{rank}" / "stdout" for rank in range(ranks)]
    return "".join(file.read_text("utf-8") for file in files), said


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_the_ranks_learn_what_one_device_learns(communicator: str, one_device: list[Any], tmp_path: Path) -> None:
    output, _ = mpirun(2, [*RUN, "--communicator", communicator, GOES_ON], tmp_path)
    check_fits(output, one_device)


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_the_program_of_the_readme(communicator: str, tmp_path: Path) -> None:
    """Ranks and sizes are those that `mpirun` has given, and the weights are those of one device."""
    program = [sys.executable, str(Path(__file__).with_name("scripts") / "readme_program.py")]
    ranks = found_in(mpirun(2, [*program, communicator], tmp_path)[0])
    (alone,) = found_in(done(program, tmp_path)[0])
    assert sorted(each["own"] for each in ranks) == [[0, 2, 0, 2], [1, 2, 1, 2]]
    for each in ranks:
        assert each["own"] == each["told"]
        np.testing.assert_allclose(each["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
        for name, values in alone["history"].items():
            np.testing.assert_allclose(each["history"][name], values, rtol=1e-4, err_msg=name)


def test_a_script_needs_no_launcher_of_ours(tmp_path: Path) -> None:
    """Ranks on one machine need neither mpi4py nor Horovod. A Horovod that was built with MPI would be used."""
    output, _ = mpirun(2, [sys.executable, JOINS], tmp_path)
    check_ranks(found_in(output), "horovod" if HAS_HOROVOD else "shared_memory")


def keep_the_contract() -> None:
    sys.path.insert(0, str(TESTS / "communicators"))
    import tensorflow as tf
    from test_defaults import check, in_processes, own_and_default

    strategy = tfrep.MultiWorkerStrategy("mpi")
    communicator = strategy.communicator.inner
    if communicator.size == 2:
        in_processes(strategy)  # Tensors without rows or columns, too.
    for compiled in (False, True):
        found = tf.function(own_and_default)(communicator) if compiled else own_and_default(communicator)
        check(found, communicator.size)
    print("FOUND " + json.dumps([communicator.rank, communicator.local_rank, communicator.local_size]))


@needs_mpi4py
@pytest.mark.parametrize("ranks", [2, 3])
def test_mpi_gives_what_the_contract_gives(ranks: int, tmp_path: Path) -> None:
    output, _ = mpirun(ranks, command(keep_the_contract), tmp_path)
    assert sorted(found_in(output)) == [[rank, rank, ranks] for rank in range(ranks)]


def reduce_in_all_ways() -> None:
    import tensorflow as tf

    strategy = tfrep.MultiWorkerStrategy("mpi")
    communicator, rank = strategy.communicator, strategy.rank
    values = np.array([[1.5, -2, 3], [rank, 4, 2 - rank]])
    found: dict[str, Any] = {}
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint64"):
        own = tf.cast(np.abs(values) if dtype == "uint64" else values, dtype)
        for op in ("sum", "mean", "min", "max", "product"):
            for way in (communicator.all_reduce, tf.function(communicator.all_reduce)):
                scalar, result, none = way([own[0, 0], own, own[:0]], op)
                assert (scalar.shape, none.shape) == ([], [0, 3])
                assert float(scalar) == float(own[0, 0]) * {"sum": 3, "product": float(own[0, 0]) ** 2}.get(op, 1)
                found.setdefault(f"{dtype} {op}", []).append(tf.cast(result, tf.float64).numpy().tolist())
    signs = communicator.all_reduce([tf.constant([0.0, -0.0]) if rank else tf.constant([-0.0, 0.0])], "max")[0]
    found["bits"] = tf.bitcast(signs, tf.int32).numpy().tolist()
    rows = communicator.all_gather(tf.fill([rank, 0], 1.0)), communicator.all_gather(tf.fill([2 - rank], rank))
    found["gathered"] = [rows[0].shape.as_list(), rows[1].numpy().tolist()]
    group = communicator.subgroup([2, 1])
    found["group"] = None if group is None else [group.size, float(group.all_reduce([tf.constant(1.0 + rank)])[0])]
    assert group is None or group.rank == rank - 1
    communicator.barrier()  # A rank that ends is missed by those that still reduce.
    print("FOUND " + json.dumps(found))


@needs_mpi4py
def test_mpi_reduces_every_dtype_alike_on_all_ranks(tmp_path: Path) -> None:
    output, _ = mpirun(3, command(reduce_in_all_ways), tmp_path)
    ranks = found_in(output)
    groups = sorted(map(str, (found.pop("group") for found in ranks)))
    assert groups == ["None", "[2, 5.0]", "[2, 5.0]"]
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0].pop("gathered") == [[3, 0], [0, 0, 1]]
    del ranks[0]["bits"]
    every = np.stack([[[1.5, -2, 3], [rank, 4, 2 - rank]] for rank in range(3)])
    reduce = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    for name, results in ranks[0].items():
        dtype, op = name.split()
        values = np.abs(every) if dtype == "uint64" else every
        values = np.trunc(values) if "int" in dtype else values
        expected = reduce[op](values, axis=0)
        expected = np.trunc(expected) if "int" in dtype else expected
        np.testing.assert_allclose(results, [expected] * 2, rtol=1e-2 if dtype == "bfloat16" else 1e-3, err_msg=name)


def count_bytes() -> None:
    sys.path.insert(0, str(TESTS / "communicators"))
    from test_compression import _FLOATS, bytes_of_sums, over_loopback

    strategy = tfrep.MultiWorkerStrategy(os.environ["COMMUNICATOR"])
    print("FOUND " + json.dumps([4 * _FLOATS, *bytes_of_sums(strategy, 5, over_loopback)]))


@pytest.mark.parametrize("communicator", COMMUNICATORS[1:])
def test_half_the_bytes(communicator: str, tmp_path: Path) -> None:
    """Of a sum with `compression="bf16"`. The loopback interface stands for the network that MPI would take."""
    network = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    output, _ = mpirun(2, command(count_bytes), tmp_path, COMMUNICATOR=communicator, **network)
    ranks = found_in(output)
    assert len(ranks) == 2
    for size, plain, compressed in ranks:
        assert plain >= 5 * 2 * size
        assert compressed < 0.6 * plain


def find_no_addresses() -> None:
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # As on a machine of its own.
    strategy = tfrep.MultiWorkerStrategy()
    print("FOUND " + json.dumps([strategy.communicator.name, tfrep.all_gather_object(strategy.rank)]))


@needs_mpi4py
@pytest.mark.skipif(HAS_HOROVOD, reason="Horovod has MPI, and comes first")
def test_ranks_that_know_no_addresses_talk_through_mpi(tmp_path: Path) -> None:
    output, _ = mpirun(2, command(find_no_addresses), tmp_path)
    assert found_in(output) == [["mpi", [0, 1]]] * 2


def lose_a_rank() -> None:
    strategy = tfrep.MultiWorkerStrategy("mpi")
    tfrep.barrier()
    if strategy.rank == 1:
        raise ValueError("the data are spoiled")
    import tensorflow as tf

    try:
        strategy.run(tf.function(lambda: strategy.communicator.all_reduce([tf.ones([3])])))
    except tfrep.errors.PeerError as error:
        print("FOUND " + json.dumps(str(error)), flush=True)
        raise


@needs_mpi4py
def test_a_rank_that_fails_ends_the_run(tmp_path: Path) -> None:
    _, said = mpirun(2, command(lose_a_rank), tmp_path, exit_code=1)
    assert "ValueError: the data are spoiled" in said


@needs_mpi4py
def test_a_rank_that_fails_is_named_to_those_that_wait_for_it(tmp_path: Path) -> None:
    """Here `mpirun` leaves the others alone. Their waits inside MPI end, and no rank waits for the others at its end."""
    let_live = ["--mca", "orte_abort_on_non_zero_status", "0"]
    output, said = mpirun(2, [*let_live, *command(lose_a_rank)], tmp_path, exit_code=1)
    (error,) = found_in(output)
    assert "Rank 1" in error
    assert "the data are spoiled" in error
    assert "ValueError: the data are spoiled" in said


@needs_mpi4py
def test_what_mpi_has_not_started_is_refused(tmp_path: Path) -> None:
    _, said = done([*RUN, "-n", "2", "--communicator", "mpi", JOINS], tmp_path, exit_code=2)
    assert "MPI connects only processes that it has started. Received: communicator='mpi'" in said
