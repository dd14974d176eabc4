"""A script that is started again goes on from the backups that belong to its `fit`s, whichever it calls first."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.keras_integration.synchronous import run_backups
from tfrep_strategy.keras_integration.synchronous.fit_descriptions import description, differences, is_backup_of

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def make(rate: float = 0.01, loss: Any = "mse", activation: str = "relu") -> keras.Model:
    hidden = [keras.layers.Dense(3, activation=activation), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["mae"])
    return model


class Died(Exception):  # noqa: N818
    """Stands for the end of the process."""


class Watch(keras.callbacks.Callback):
    """Calls a function with the number of each epoch. A callback's lists and numbers would be restored from the backup."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._note(epoch)


class Starts:
    """Starts a program again and again, each time as a new process does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.epochs: list[int] = []

    def start(self, program: Callable[..., Any], dies_after: int | None = None) -> Any:
        """Returns what the program does, unless it dies after some epochs. `epochs` are those of this start."""

        def note(epoch: int) -> None:
            if len(self.epochs) == dies_after:
                raise Died
            self.epochs.append(epoch)

        self._monkeypatch.setattr(run_backups, "_fits", itertools.count())
        self._monkeypatch.setattr(run_backups, "_places_taken", set())
        keras.utils.clear_session()
        self.epochs = []
        ends = contextlib.nullcontext() if dies_after is None else pytest.raises(Died)
        with tfrep.MirroredStrategy(["CPU:0"]).scope(), ends:
            return program(lambda: Watch(note))
        return None


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFREP_BACKUP_DIR", str(tmp_path / "backups"))
    monkeypatch.setenv("TFREP_BACKUP_SECONDS", "0")
    yield Starts(monkeypatch)
    run_backups.writes.wait()


def weights(model: keras.Model) -> list[float]:
    return [float(value) for weight in model.get_weights() for value in weight.ravel()]


def goes_on_with_more_epochs(watch: Callable[[], Any]) -> list[float]:
    keras.utils.set_random_seed(1)
    model = make()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[watch()])
    model.fit(X, Y, epochs=4, initial_epoch=2, verbose=0, callbacks=[watch()])
    return weights(model)


def calls_the_same_twice(watch: Callable[[], Any]) -> list[float]:
    keras.utils.set_random_seed(1)
    model = make()
    for _ in range(2):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[watch()])
    return weights(model)


def changes_the_learning_rate(watch: Callable[[], Any]) -> list[float]:
    """The same callbacks see both fits."""
    keras.utils.set_random_seed(1)
    model = make()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=0.01, patience=5)
    for epochs in (2, 2):
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[schedule, plateau, stop, watch()])
    return weights(model)


def makes_models_in_a_loop(watch: Callable[[], Any]) -> list[float]:
    keras.utils.set_random_seed(1)
    models = []
    for rate in (0.01, 0.1):
        model = make(rate, keras.losses.Huber())
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[watch()])
        models.append(model)
    return [value for model in models for value in weights(model)]


def unfreezes(watch: Callable[[], Any]) -> list[float]:
    keras.utils.set_random_seed(1)
    model = make()
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        model.compile("adam", "mse")
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[watch()])
    return weights(model)


class Subclassed(keras.Model):
    """Has no config."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.layer = layer

    def call(self, inputs: Any) -> Any:
        return self.layer(inputs)


def has_a_model_without_a_config(watch: Callable[[], Any]) -> list[float]:
    keras.utils.set_random_seed(1)
    model = Subclassed(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)), lambda y, p: (y - p) ** 2)
    model(X)
    for epochs in (2, 2):
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[watch()])
    return weights(model)


def has_no_seed(watch: Callable[[], Any]) -> list[float]:
    layers = [keras.layers.GaussianNoise(0.1), keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    for epochs in (2, 2):
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[watch()])
    return weights(model)


PROGRAMS = [
    goes_on_with_more_epochs, calls_the_same_twice, changes_the_learning_rate, makes_models_in_a_loop, unfreezes,
    has_a_model_without_a_config, has_no_seed,
]  # fmt: skip


@pytest.mark.lane("resumed")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_ordinary_program_repeats_nothing(program: Any, starts: Starts, capfd: pytest.CaptureFixture[str]) -> None:
    """It dies in its second fit. Two starts later it has trained each epoch once, and has the undisturbed weights."""
    undisturbed = None
    if program is not has_no_seed:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("TFREP_BACKUP_DIR")
            undisturbed = starts.start(program)
    starts.start(program, dies_after=3)
    assert starts.epochs in ([0, 1, 2], [0, 1, 0])
    found = starts.start(program)
    assert starts.epochs in ([3], [1])
    assert starts.start(program) == found
    assert starts.epochs == []
    if undisturbed is not None:
        np.testing.assert_allclose(found, undisturbed, rtol=1e-6)
    said = capfd.readouterr().err
    assert "starts from the beginning" not in said
    assert said.count("is not repeated") == 3


def leaves_out_what_is_done(watch: Callable[[], Any]) -> None:
    for rate in (0.001, 0.1, 0.2):
        done = Path(f"{rate}.txt")
        if not done.exists():
            keras.utils.set_random_seed(1)
            model = make(rate)
            model.fit(X, Y, epochs=2, verbose=0, callbacks=[watch()])
            done.write_text(str(weights(model)))


def results() -> list[str]:
    found = [path.read_text() for path in sorted(Path().glob("*.txt"))]
    for path in Path().glob("*.txt"):
        path.unlink()
    return found


def test_a_program_that_leaves_out_what_is_done(starts: Starts, capfd: pytest.CaptureFixture[str]) -> None:
    """The first `fit` of the second start is the second of the first start, and so on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("TFREP_BACKUP_DIR")
        starts.start(leaves_out_what_is_done)
    undisturbed = results()
    starts.start(leaves_out_what_is_done, dies_after=3)
    starts.start(leaves_out_what_is_done, dies_after=1)
    assert starts.epochs == [1]
    starts.start(leaves_out_what_is_done)
    assert starts.epochs == [0, 1], "the third fit had no backup"
    assert results() == undisturbed
    said = capfd.readouterr().err
    assert said.count("fit resumes from its backup") == 1
    assert said.count("fit 0 starts from the beginning: its backup belongs to another fit (optimizer differ).") == 1
    assert "is not repeated" not in said


def described(
    number: int = 0, seed: int | None = 1, x: Any = X, batch_size: int = 8, callbacks: Any = (), **of_model: Any
) -> dict[str, Any]:
    if seed is not None:
        keras.utils.set_random_seed(seed)
    given = {"x": x, "y": Y, "epochs": 2, "batch_size": batch_size}
    return description(number, make(**of_model), given, len(X) // batch_size, callbacks)


C = keras.callbacks
OTHERS = {
    "model": {"activation": "tanh"},
    "optimizer": {"rate": 0.02},
    "loss or metrics": {"loss": "mae"},
    "arguments of fit": {"batch_size": 4},
    "callbacks": {"callbacks": [C.EarlyStopping(patience=2)]},
    "data": {"x": X[::-1]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_another_fit(what: str) -> None:
    given = {"callbacks": [C.EarlyStopping(patience=3)]}
    own, other = described(**given), described(**given | OTHERS[what])
    assert differences(own, other) == [what]
    assert not is_backup_of(own, other, is_finished=False)


def test_another_seed_is_another_fit() -> None:
    assert differences(described(seed=1), described(seed=2)) == ["seed", "initial weights"]


def test_functions_differ_in_their_numbers() -> None:
    def scheduled(share: float) -> Any:
        return described(callbacks=[C.LearningRateScheduler(lambda epoch: share**epoch), C.TensorBoard(f"logs/{share}")])

    assert differences(scheduled(0.5), scheduled(0.5)) == []
    assert differences(scheduled(0.5), scheduled(0.6)) == ["callbacks"]


def test_a_function_may_use_what_is_assigned_later() -> None:
    schedule = C.LearningRateScheduler(lambda epoch: later)
    assert described(callbacks=[schedule])["settings"]["callbacks"]
    later = 0.5


def test_names_that_keras_numbers_and_roundings_are_no_difference() -> None:
    keras.utils.set_random_seed(1)
    assert differences(described(), described(x=X * (1 + 1e-7))) == []
    assert differences(described(), described(x=X * (1 + 1e-3))) == ["data"]


def test_without_a_seed_a_finished_fit_needs_the_same_data() -> None:
    keras.utils.clear_session()
    keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)
    own = described(seed=None)
    assert is_backup_of(own, described(seed=None), is_finished=True)
    other = described(seed=None, x=X + 1)
    assert re.search("data", " ".join(differences(own, other)))
    assert is_backup_of(own, other, is_finished=False)
    assert not is_backup_of(own, other, is_finished=True)
    assert not is_backup_of(own, described(number=1, seed=None, x=X + 1), is_finished=False)
