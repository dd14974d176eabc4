"""`launch`: a function goes out, its results or its error come back."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tensorflow as tf
from needs import needs_horovod
from raising import refuses

from tfrep_strategy.cluster import identity
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.errors import ConfigurationError, PeerError
from tfrep_strategy.running import launch
from tfrep_strategy.running.ranks import GRACE_SECONDS

pytestmark = pytest.mark.lane("launchers")

LIMIT = 100.0
both = pytest.mark.parametrize("communicator", [pytest.param("horovod", marks=needs_horovod), "tf"])


@pytest.fixture
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where this test, and only this test, makes temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def place() -> tuple[int, int, int, int, int, int]:
    found = detect_environment()
    return found.rank, found.size, found.local_rank, found.local_size, os.getpid(), hash("word")


@both
def test_every_rank_knows_its_place(communicator, monkeypatch, temporary_files):
    monkeypatch.setenv("TF_CONFIG", "left over from another run")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    places = launch(place, num_replicas=2, communicator=communicator, strategy=None, timeout=LIMIT)
    assert [each[:4] for each in places] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert len({os.getpid(), *(each[4] for each in places)}) == 3
    assert len({each[5] for each in places}) == 1
    assert places[0][5] != hash("word")  # Python's own habit: every run hashes in another way.
    assert not list(temporary_files.iterdir())


def test_a_closure_and_its_arguments_travel(temporary_files, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    factor = 10
    found = launch(
        lambda value, *, plus: (value * factor + plus, os.environ["PYTHONHASHSEED"]),
        (4,),
        1,
        kwargs={"plus": 2},
        communicator="tf",
        strategy=None,
        timeout=LIMIT,
    )
    assert found == [(42, "12")]


def test_the_log_of_a_start_is_left_out(temporary_files, capfd, monkeypatch):
    """The function names Keras, so that it is imported as the function arrives."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    import keras

    assert launch(lambda: keras.__version__, (), 1, communicator="tf", strategy=None, timeout=LIMIT) == [keras.__version__]
    assert capfd.readouterr().err == ""


def test_an_error_comes_back_with_its_rank(temporary_files):
    def fail() -> None:
        if detect_environment().rank == 1:
            raise ValueError("seven is not allowed")
        time.sleep(60)

    start = time.monotonic()
    with refuses(PeerError, told=["Rank 1", "ValueError: seven is not allowed"]):
        launch(fail, num_replicas=2, communicator="tf", strategy=None, timeout=LIMIT)
    assert time.monotonic() - start < 30 + GRACE_SECONDS


def test_a_death_comes_back_with_its_rank_and_last_lines(temporary_files):
    def die() -> None:
        if detect_environment().rank == 1:
            print("my last words", flush=True)
            os._exit(7)
        time.sleep(60)

    with refuses(PeerError, told=["Rank 1", "exit code 7", "my last words"]) as caught:
        launch(die, num_replicas=2, communicator="tf", strategy=None, timeout=LIMIT)
    logs = Path(str(caught.value).rpartition("Logs: ")[2])
    assert (logs / "rank1.log").read_text().endswith("my last words\n")


@both
def test_a_death_in_the_middle_of_steps_is_blamed_on_the_one_who_died(communicator, temporary_files):
    def step_for_ever() -> None:
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        rank = detect_environment().rank

        @tf.function
        def step() -> tf.Tensor:
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([100_000])))

        for number in range(1_000_000):
            step()
            if (rank, number) == (1, 20):
                os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with refuses(PeerError, told=["Rank 1", "exit code 137", "SIGKILL"]):
        launch(step_for_ever, num_replicas=2, communicator=communicator, timeout=LIMIT)
    assert time.monotonic() - start < 60


def test_a_result_that_cannot_travel_is_an_error(temporary_files):
    with refuses(PeerError, told=["Rank 0", "pickle"]):
        launch(
            lambda: sys._getframe(),
            num_replicas=1,
            communicator="tf",
            strategy=None,
            timeout=LIMIT,
        )


def test_a_function_that_ends_its_process(temporary_files):
    with refuses(PeerError, hint="let it return", told=["[0, 1]"]):
        launch(lambda: sys.exit(0), num_replicas=2, timeout=LIMIT)


def test_time_limit(temporary_files):
    with refuses(PeerError, told=["0.5 seconds"]):
        launch(time.sleep, (60,), communicator="tf", strategy=None, timeout=0.5)


@needs_horovod
def test_bare_horovod_works(temporary_files):
    def total() -> float:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        return float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum))

    assert launch(total, num_replicas=2, communicator="horovod", strategy=None, timeout=LIMIT) == [3.0, 3.0]


@both
def test_the_function_runs_in_the_scope_of_the_runs_strategy(communicator, temporary_files):
    def look() -> tuple[int, bool]:
        import tensorflow as tf

        import tfrep_strategy as tfrep

        strategy = tf.distribute.get_strategy()
        same = (
            tf.distribute.MirroredStrategy() is strategy,
            tfrep.auto_strategy() is strategy,
        )
        return strategy.num_replicas_in_sync, all(same)

    assert launch(look, num_replicas=2, communicator=communicator, timeout=LIMIT) == [(2, True)] * 2


def test_mirrored_is_one_process(temporary_files):
    def look() -> tuple[int, int]:
        import tensorflow as tf

        return (
            tf.distribute.get_strategy().num_replicas_in_sync,
            detect_environment().size,
        )

    assert launch(look, num_replicas=3, strategy="mirrored", timeout=LIMIT) == [(3, 1)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"num_replicas": -1}, "num_replicas=-1"),
        ({"num_replicas": 1.5}, "num_replicas=1.5"),
        ({"communicator": "mpi"}, "communicator='mpi'"),
        ({"strategy": "mirorred"}, "strategy='mirorred'"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_bad_input(options, named):
    with pytest.raises(ConfigurationError, match="Received: ") as caught:
        launch(place, **options)
    assert named in str(caught.value)


def test_horovod_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(identity, "horovod_is_installed", lambda: False)
    with refuses(code="TFREP-E005", hint="tfrep horovod install", communicator="horovod"):
        launch(place, communicator="horovod", strategy=None)


def stop_while_others_wait(folder: Path) -> None:
    communicator = tf.distribute.get_strategy().communicator
    communicator.barrier()
    if communicator.rank == 1:
        (folder / "stopped").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP)
    step = tf.function(lambda: communicator.all_reduce([tf.ones([3])]))
    step()


@pytest.mark.parametrize("communicator", [pytest.param("horovod", marks=needs_horovod), "tf", "shared_memory"])
def test_a_stopped_rank_is_named_and_ended_soon(communicator, monkeypatch, temporary_files, tmp_path):
    monkeypatch.setenv("TFREP_TIMEOUT", "10")
    with refuses(PeerError, told=["Rank 1", "(state T)", "seconds"]):
        launch(stop_while_others_wait, (tmp_path,), communicator=communicator, timeout=LIMIT)
    assert time.monotonic() - float((tmp_path / "stopped").read_text()) < 20.0
