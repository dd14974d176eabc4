"""What is written while training goes on: who waits for it, and who hears that it could not be written."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import keras
import pytest
from file_states import hidden, limit_files
from small_training import fit, make_model, state

from tfrep_strategy.keras_integration.shared.background import BackgroundWrites


def fail() -> None:
    raise OSError(errno.ENOSPC, "full")


def test_one_thing_is_written_at_a_time() -> None:
    writes, goes_on, done = BackgroundWrites(), threading.Event(), list[str]()

    def write_slowly() -> None:
        assert goes_on.wait(60)
        done.append("first")

    writes.start(write_slowly)
    assert (writes.is_writing, writes.has_failed, done) == (True, False, [])
    threading.Timer(0.2, goes_on.set).start()
    writes.start(lambda: done.append("second"))
    assert done[0] == "first"
    writes.wait()
    assert (writes.is_writing, done) == (False, ["first", "second"])


def test_a_failure_is_raised_once_by_whoever_waits() -> None:
    writes = BackgroundWrites()
    writes.start(fail)
    while writes.is_writing:
        time.sleep(0.01)
    assert writes.has_failed
    with pytest.raises(OSError, match="full"):
        writes.start(fail)
    assert not writes.has_failed
    writes.wait()


def test_an_exception_waits_and_stays(capfd: pytest.CaptureFixture[str]) -> None:
    writes = BackgroundWrites()

    def raise_while_writing() -> None:
        with writes.waited_for():
            writes.start(fail)
            raise KeyError

    with pytest.raises(KeyError):
        raise_while_writing()
    assert not writes.has_failed
    assert "tfrep: the last backup could not be written: [Errno 28] full" in capfd.readouterr().err
    with pytest.raises(OSError, match="full"), writes.waited_for():
        writes.start(fail)


class Limits(keras.callbacks.Callback):
    """Lets one rank write no large file in the second epoch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self.epochs = rank, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if epoch == 1 and self.model.distribute_strategy.rank == self._rank:
            limit_files(10_000)


def _without_space(strategy: Any, folder: str) -> dict[str, Any]:
    os.environ |= {"TFREP_BACKUP_DIR": folder, "TFREP_BACKUP_SECONDS": "0"}
    try:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = make_model(1000)
        limits = Limits(rank=0)
        # A backup may be under way when the limit comes.
        text = "(nothing was written|What was there is as it was).*Received: path=.*latest.weights.h5"
        with pytest.raises(OSError, match=text) as error:
            fit(model, 4, limits)
        limit_files(resource.RLIM_INFINITY)
        found = {"error": (error.value.errno, str(error.value)), "epochs": limits.epochs, "weights": state(model)}
        fit(model, 1)  # Nothing of the failure is left.
        return found
    finally:
        limit_files(resource.RLIM_INFINITY)
        del os.environ["TFREP_BACKUP_DIR"], os.environ["TFREP_BACKUP_SECONDS"]


@pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
def test_a_backup_that_cannot_be_written_is_the_same_error_on_all_ranks(
    communicator: str, tmp_path: Path, worker_pool: Any
) -> None:
    first, second = worker_pool(communicator, 2).run(_without_space, str(tmp_path / "backups"))
    assert first == second
    assert (first["error"][0], first["epochs"]) == (errno.EFBIG, 2)
    assert len([path for path in tmp_path.rglob("*.json")]) == 2, "the backup before, and that of the next fit"
    assert not hidden(tmp_path)
