"""What belongs to a backup of a run besides weights, and how often one is made."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.notices import answer_requests_to_end, end_as_asked, is_asked_to_end, keeping_requests
from tfrep_strategy.keras_integration.saving.model_files import weights_in_memory
from tfrep_strategy.keras_integration.saving.training_state import (
    OF_KERAS,
    read_beside_weights,
    restore_states,
    states_of,
    write_beside_weights,
)
from tfrep_strategy.keras_integration.synchronous import run_backups

pytestmark = pytest.mark.lane("callbacks")


class Remembers(keras.callbacks.Callback):
    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen, self.file = seen, object()


class Asks(keras.callbacks.Callback):
    """Asks this process to end after some batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._left = itertools.count(1 - batches)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if next(self._left) == 0:
            signal.raise_signal(signal.SIGTERM)


def test_what_callbacks_remember_travels_in_the_file_of_the_weights(tmp_path: Path) -> None:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])

    stop = keras.callbacks.EarlyStopping("loss")
    of_two_bytes = keras.ops.convert_to_numpy(keras.ops.ones((2,), "bfloat16"))
    stop.best, stop.wait = np.float32(0.25), 2
    stop.best_weights = [np.arange(6.0).reshape(2, 3), np.float16([1, -0.0]), of_two_bytes]
    given = [Remembers({"a": [1, None, "x"], "b": float("inf")}), stop, Remembers([True]), keras.callbacks.TensorBoard("logs")]
    path, written = str(tmp_path / "own.weights.h5"), model()
    weights = weights_in_memory(written)
    write_beside_weights(weights, {"callbacks": states_of(given)})
    Path(path).write_bytes(weights.getvalue())

    (read := model()).load_weights(path)
    np.testing.assert_array_equal(read.get_weights()[0], written.get_weights()[0])
    anew = [keras.callbacks.EarlyStopping("loss"), Remembers(None), Remembers([])]
    content = read_beside_weights(path)
    assert content is not None
    restore_states(anew, content["callbacks"])
    assert (anew[1].seen, anew[2].seen) == ({"a": [1, None, "x"], "b": float("inf")}, [True])
    assert (anew[0].best, anew[0].wait, anew[0].monitor) == (0.25, 2, "loss")
    for found, expected in zip(anew[0].best_weights, stop.best_weights, strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


_REMEMBER_NOTHING = (
    "BackupAndRestore", "CSVLogger", "History", "LambdaCallback", "LearningRateScheduler", "ProgbarLogger", "RemoteMonitor",
    "TensorBoard", "TerminateOnNaN",
)  # fmt: skip
"""Those of Keras's callbacks that decide without a memory, or whose memory is restored otherwise: files, and the history."""


def test_each_callback_of_keras_is_known() -> None:
    exported = {kind for kind in vars(keras.callbacks).values() if isinstance(kind, type)}
    known = {*OF_KERAS, *(getattr(keras.callbacks, name) for name in _REMEMBER_NOTHING)}
    assert exported - {keras.callbacks.Callback, keras.callbacks.CallbackList} == known


def test_a_threshold_of_keras_has_its_sign_after_a_restart() -> None:
    stop, anew = (keras.callbacks.EarlyStopping("loss", min_delta=0.5) for _ in range(2))
    stop._set_monitor_op()
    restore_states([anew], states_of([stop]))
    anew._set_monitor_op()
    assert anew.min_delta == stop.min_delta == -0.5


@pytest.mark.parametrize("batches", [3, 4])
def test_weights_that_were_swapped_at_the_end_of_an_epoch(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run is asked to end inside an epoch, and after one."""
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")

    def trained(ends_after: int) -> list[Any]:
        monkeypatch.setattr(run_backups, "_fits", itertools.count())
        monkeypatch.setattr(run_backups, "_places_taken", set())
        keras.utils.set_random_seed(1)
        with tfrep.MirroredStrategy(["CPU:0"]).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
            callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), Asks(ends_after)]
            model.fit(x, x[:, :1], batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    undisturbed = trained(100)
    monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path))
    with pytest.raises(SystemExit):
        trained(batches)
    np.testing.assert_allclose(trained(100)[0], undisturbed[0], rtol=1e-6)
    assert f"fit resumes from its backup: epoch {batches // 2}, batch {batches % 2}." in capfd.readouterr().err


class Dies(keras.callbacks.Callback):
    """Has no backup made after some place, and ends training two epochs later."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._place = epoch, batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if epoch == self._place[0] + 2:
            raise KeyError

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._place:
            os.environ["TFREP_BACKUP_SECONDS"] = "1000"


@pytest.mark.parametrize("place", [(0, 1), (1, 1)])
def test_rows_of_a_csv_file_are_those_of_the_undisturbed_run(
    place: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")

    def rows(*callbacks: Any) -> str:
        monkeypatch.setattr(run_backups, "_fits", itertools.count())
        monkeypatch.setattr(run_backups, "_places_taken", set())
        keras.utils.set_random_seed(1)
        with tfrep.MirroredStrategy(["CPU:0"]).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            logger = keras.callbacks.CSVLogger("log.csv")
            model.fit(x, x[:, :1], batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[logger, *callbacks])
        return Path("log.csv").read_text()

    undisturbed = rows()
    monkeypatch.setenv("TFREP_BACKUP_DIR", "backups")
    with pytest.raises(KeyError):
        rows(Dies(*place))
    assert len(Path("log.csv").read_text().splitlines()) == place[0] + 3
    assert rows() == undisturbed
    epoch, batch = place
    assert f"fit resumes from its backup: epoch {epoch}, batch {batch}." in capfd.readouterr().err


def test_a_file_of_weights_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "own.weights.h5")
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]).save_weights(path)
    assert read_beside_weights(path) is None


def assert_true(value: object) -> None:
    assert value


def test_backups_take_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = run_backups.Pace(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]))
    for cost in (0.5, 4.0):
        pace.note_cost(cost)
        monkeypatch.setattr(run_backups.Pace, "last_saved", run_backups.Pace.last_saved - 49 * cost)
        assert not pace.is_due()
        monkeypatch.setattr(run_backups.Pace, "last_saved", run_backups.Pace.last_saved - 2 * cost)
        assert pace.is_due()
    written = threading.Event()
    run_backups.writes.start("It", lambda: assert_true(written.wait(60)))
    assert not pace.is_due(), "training would wait for the disk"
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "1")
    assert pace.is_due(), "the user wants it"
    written.set()
    run_backups.writes.wait()
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "1000")
    assert not pace.is_due()
    monkeypatch.setattr(run_backups.Pace, "last_saved", run_backups.Pace.last_saved - 1000)
    assert pace.is_due()


class StopsAfter(keras.callbacks.Callback):
    """Stops training after some backups, or when it takes too long."""

    def __init__(self, costs: list[float], number: int) -> None:
        super().__init__()
        self._costs, self._number = costs, number
        self._end = time.monotonic() + 200.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = len(self._costs) >= self._number or time.monotonic() > self._end


def test_a_fit_waits_a_fiftieth_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until the next backup pays for each; the last one, at the end of the fit, has none after it."""
    monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path))
    monkeypatch.delenv("TFREP_BACKUP_SECONDS", raising=False)
    costs, note_cost = list[float](), run_backups.Pace.note_cost

    def note(pace: Any, seconds: float) -> None:
        costs.append(seconds)
        note_cost(pace, seconds)

    monkeypatch.setattr(run_backups.Pace, "note_cost", note)
    with tfrep.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(1000), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        x = np.ones((64, 100), "float32")
        model.fit(x, x[:, :1], batch_size=16, verbose=0)
        monkeypatch.setattr(run_backups.Pace, "last_saved", 0.0)  # The first is due at once.
        costs.clear()
        began = time.monotonic()
        model.fit(x, x[:, :1], batch_size=16, epochs=10_000, verbose=0, callbacks=[StopsAfter(costs, 3)])
        seconds = time.monotonic() - began
    assert len(costs) >= 3
    assert min(costs) > 0
    assert sum(costs[:-2]) < 0.02 * seconds


def test_a_request_to_end_is_kept_until_it_is_answered() -> None:
    with keeping_requests():
        answer_requests_to_end()
        assert not is_asked_to_end()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # The launcher passes it on, too.
        assert is_asked_to_end()
        with pytest.raises(SystemExit) as ended:
            end_as_asked()
    assert ended.value.code == 143
    assert not is_asked_to_end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_programs_own_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with keeping_requests():
            answer_requests_to_end()
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


class OwnStep(keras.Sequential):
    """A model that is built when its first step is traced."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def train(folder: Path, kind: type[keras.Model], callbacks: list[Any]) -> list[str]:
    """Calls fit in a run that is backed up, and returns the names of the files of its backups and of the run's progress."""
    model = kind([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=callbacks)
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("number", [1, 2])
def test_who_is_backed_up(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")
    own = [keras.callbacks.BackupAndRestore(str(tmp_path / "own"))]
    strategy = tfrep.MirroredStrategy([f"CPU:{i}" for i in range(number)])
    with strategy.scope():
        assert train(tmp_path, keras.Sequential, []) == []  # Nobody wants it.
        monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path / "run"))
        assert train(tmp_path, keras.Sequential, own) == []  # The program does so itself, and removes it at the end.
        assert train(tmp_path, OwnStep, []) == []
        assert "the model is not built before fit, so this fit has no backup" in capfd.readouterr().err
        assert train(tmp_path, keras.Sequential, []) == ["latest.weights.h5", "progress", "training_metadata.json"]
        assert tf.distribute.get_strategy() is strategy
