"""What is written while training goes on: who waits for it, and what is said if it could not be written."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import keras
import pytest
from file_states import hidden, limit_files
from small_training import fit, make_model, state

from tfrep_strategy.keras_integration.synchronous import run_backups
from tfrep_strategy.keras_integration.synchronous.run_backups import BackgroundWrites

pytestmark = pytest.mark.lane("callbacks")


def fail() -> None:
    raise OSError(errno.ENOSPC, "full")


def test_one_thing_is_written_at_a_time() -> None:
    writes, goes_on, done = BackgroundWrites(), threading.Event(), list[str]()

    def write_slowly() -> None:
        assert goes_on.wait(60)
        done.append("first")

    writes.start("One", write_slowly)
    assert (writes.is_writing, done) == (True, [])
    threading.Timer(0.2, goes_on.set).start()
    writes.start("Another", lambda: done.append("second"))
    assert done[0] == "first"
    assert writes.wait()
    assert (writes.is_writing, done) == (False, ["first", "second"])


def test_a_failure_is_told_once_until_something_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    writes = BackgroundWrites()
    for number, write in enumerate([fail, fail, lambda: None, fail]):
        writes.start(f"Backup {number}", write)
        assert writes.wait() == (write is not fail)
    said = capfd.readouterr().err
    assert re.findall(r"tfrep: Backup (\d) was not written: \[Errno 28\] full\nThe backup before it is kept", said) == ["0", "3"]


def test_an_exception_waits_and_stays(capfd: pytest.CaptureFixture[str]) -> None:
    writes = BackgroundWrites()

    def raise_while_writing() -> None:
        with writes.waited_for():
            writes.start("It", fail)
            raise KeyError

    with pytest.raises(KeyError):
        raise_while_writing()
    assert not writes.is_writing
    assert "tfrep: It was not written: [Errno 28] full" in capfd.readouterr().err


class Limits(keras.callbacks.Callback):
    """Lets one rank write no large file from the second epoch to the end of the third."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__()
        self._rank, self._folder = rank, folder
        self.kept = list[bool]()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.model.distribute_strategy.rank == self._rank and epoch in (1, 3):
            run_backups.writes.wait()
            backup = [path.read_bytes() for path in self._folder.rglob("*.json")]
            if epoch == 1:
                self._before = backup
                limit_files(10_000)
            else:
                self.kept.append(backup == self._before)
                limit_files(resource.RLIM_INFINITY)


def _without_space(strategy: Any, folder: str) -> dict[str, Any]:
    os.environ |= {"TFREP_BACKUP_DIR": folder, "TFREP_BACKUP_SECONDS": "0"}
    try:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = make_model(1000)
        limits = Limits(0, Path(folder))
        fit(model, 5, limits)
        return {"weights": state(model), "kept": limits.kept}
    finally:
        limit_files(resource.RLIM_INFINITY)
        del os.environ["TFREP_BACKUP_DIR"], os.environ["TFREP_BACKUP_SECONDS"]


@pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
def test_training_goes_on_without_a_backup_that_cannot_be_written(communicator: str, tmp_path: Path, worker_pool: Any) -> None:
    """The backup before is kept meanwhile. When there is space, the next is written."""
    first, second = worker_pool(communicator, 2).run(_without_space, str(tmp_path))
    assert first["weights"] == second["weights"]
    assert (first["kept"], second["kept"]) == ([True], [])
    (metadata,) = tmp_path.rglob("*.json")
    assert json.loads(metadata.read_text())["is_finished"]
    assert not hidden(tmp_path)
