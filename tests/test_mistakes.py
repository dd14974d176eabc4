"""What newcomers get wrong: each mistake is answered by what to write."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.core.out_of_memory import note_out_of_memory

_SCRIPT = Path(__file__).with_name("scripts") / "mistakes.py"
_ROOT = str(Path(tfrep.__file__).parents[1])
_X = np.arange(32.0, dtype="float32").reshape(8, 4)

_AT_THE_COMMAND_LINE = {
    "--epochs 3 train.py": ["no option --epochs", "`tfrep run train.py --epochs 3`"],
    "-n 2 --lr=0.1 train.py --more": ["no option --lr", "`tfrep run -n 2 train.py --lr=0.1 --more`"],
    "--num_replica 2 train.py": ["did you mean --num-replicas?"],
    "-np 2 train.py": ["-n takes a whole number. Received: num_replicas='p'", "write -n 2; -np is an option of mpirun."],
    "--nproc_per_node=2 train.py": ["use -n;"],
    "-H a:2 train.py": ["use --hosts;"],
    "-n two train.py": ["-n takes a whole number. Received: num_replicas='two'", "write -n 2."],
    "--max-restarts often train.py": ["--max-restarts takes a whole number."],
    "-n 0 train.py": ["num_replicas=0", "from 1 to 1000"],
    "-n -1 train.py": ["num_replicas=-1", "from 1 to 1000"],
    "-n 2": ["No script is named.", "`tfrep run -n 2 train.py`"],
    "-n 2 missing.py": ["There is no such script.", "check the path"],
    "-n 2 train": ["did you mean train.py?"],
    "folder": ["The script is a folder", f"such as folder{os.sep}train.py"],
    "-m missing": ["There is no such module. Received: module='missing'"],
    "-m train.py": ["leave -m out"],
    "--communicator nccl train.py": ["use auto, horovod, tf, mpi, shared_memory.", '"tf" uses NCCL'],
    "--strategy mirorred train.py": ["Unknown strategy.", "use auto, "],
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives a function that calls the command in a folder with a script, and returns what it says when it refuses."""
    (tmp_path / "folder").mkdir()
    for folder in (tmp_path, tmp_path / "folder"):
        (folder / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, code: int = 2) -> str:
        from tfrep_strategy.cli import main

        monkeypatch.setattr(sys, "argv", ["tfrep", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == code
        return capsys.readouterr().err

    return call


@pytest.mark.lane("quick")
@pytest.mark.parametrize("options", _AT_THE_COMMAND_LINE)
def test_at_the_command_line(options: str, said: Callable[..., str]) -> None:
    error = said("run", *options.split())
    for text in [*_AT_THE_COMMAND_LINE[options], "Received: ", "\nHint: "]:
        assert text in error
    assert len(error.splitlines()) == 2


@pytest.mark.lane("quick")
def test_a_script_without_a_command(said: Callable[..., str]) -> None:
    assert "`tfrep run train.py --epochs 3` runs a script." in said("train.py", "--epochs", "3")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("command", ["run train.py", "verify train.py", "doctor", "demo"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_is_refused_at_once_in_two_lines(
    command: str, backend: str, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    what = f"Only Keras's TensorFlow backend works here. Received: KERAS_BACKEND='{backend}'"
    assert said(*command.split()) == f"tfrep: {what}\nHint: set KERAS_BACKEND=tensorflow. [TFREP-E001]\n"


def _model(layers: Any = ()) -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])


def _fit(model: Any, y: Any = _X[:, :1], **settings: Any) -> None:
    model.fit(_X, y, verbose=0, **settings)


def _compiled(strategy: Any, model: Any, optimizer: Any = "sgd") -> Any:
    with strategy.scope():
        model.compile(optimizer, "mse")
    return model


def _made_in(strategy: Any, *layers: Any) -> Any:
    with strategy.scope():
        return _model(layers)


def _of_keras_2(strategy: Any) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    with strategy.scope():
        tf_keras.Sequential([tf_keras.layers.Dense(1)]).compile("sgd", "mse")


def _too_large(strategy: Any) -> None:
    def repeated(x: Any) -> Any:
        return keras.ops.max(keras.ops.tile(keras.ops.tile(x, (2**20, 1)), (2**20, 1)), 0, keepdims=True)

    _fit(_compiled(strategy, _made_in(strategy, keras.layers.Lambda(repeated))), batch_size=8)


_IN_A_PROGRAM: dict[str, tuple[Callable[[Any], Any], type[Exception], list[str]]] = {
    "logical CPUs, late": (
        lambda strategy: tfrep.use_logical_cpus(7), ValueError,
        ["TensorFlow is already initialized", "call use_logical_cpus before TensorFlow is used; in a notebook, restart"],
    ),
    "the scope forgotten": (
        lambda strategy: _fit(_compiled(tf.distribute.get_strategy(), _model())), UserWarning,
        ["a model made outside the strategy's scope, so only one device works.", "inside `with strategy.scope():`"],
    ),
    "model outside, compile inside": (
        lambda strategy: _fit(_compiled(strategy, _model())), ValueError,
        ["made outside the strategy's scope.", "make it inside `with strategy.scope():`."],
    ),
    "compile outside": (
        lambda strategy: _made_in(strategy).compile(keras.optimizers.SGD(), "mse"), ValueError,
        ["`compile` got an optimizer made outside", "make it inside `with strategy.scope():`."],
    ),
    "no compile": (lambda strategy: _fit(_made_in(strategy)), ValueError, ["You must call `compile()`"]),
    "arrays of other lengths": (
        lambda strategy: _fit(_compiled(strategy, _made_in(strategy)), _X[:5, :1]), ValueError, ["'x' sizes: 8", "'y' sizes: 5"],
    ),
    "nccl": (lambda strategy: tfrep.MultiWorkerStrategy("nccl"), ValueError, ["use auto, horovod, tf", '"tf" uses NCCL']),
    "a GPU that is not there": (
        lambda strategy: tfrep.MirroredStrategy(["GPU:0"]), ValueError,
        ["There is no device 'GPU:0'.", "this process has CPU:0"],
    ),
    "a name that is misspelt": (lambda strategy: tfrep.MirorredStrategy, AttributeError, ["no attribute 'MirorredStrategy'"]),
    "a model of Keras 2": (_of_keras_2, ValueError, ["tf_keras model (Keras 2) does not work", "`import keras`"]),
    "a batch that is too large": (
        _too_large, tf.errors.ResourceExhaustedError,
        ["use a smaller batch_size;", "gradient_accumulation_steps=N", "shard_optimizer_state=True", "Not allocated: a tensor [",
         "Largest variables: ", "/kernel [4, 1] float32, 16 bytes"],
    ),
}  # fmt: skip


@pytest.mark.lane("quick")
@pytest.mark.parametrize("mistake", _IN_A_PROGRAM)
def test_in_a_program(mistake: str) -> None:
    make, kind, texts = _IN_A_PROGRAM[mistake]
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    if issubclass(kind, Warning):
        with pytest.warns(kind) as seen:
            make(strategy)
        told = str(seen[0].message)
    else:
        with pytest.raises(kind) as raised:
            make(strategy)
        told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    for text in texts:
        assert text in told


@pytest.mark.lane("quick")
@pytest.mark.parametrize("rows", [0, 1])
def test_batches_of_fewer_rows_than_replicas_train_as_on_one_device(rows: int) -> None:
    weights = []
    for strategy in (tfrep.MirroredStrategy(["CPU:0", "CPU:1"], allow_plain_models=True), tf.distribute.get_strategy()):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = _model()
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        _fit(model, batch_size=rows)
        weights.append(model.get_weights())
    np.testing.assert_allclose(weights[0][0], weights[1][0], atol=1e-6)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            tf.errors.InternalError(None, None, "Failed to allocate memory on device GPU:0: CUDA_ERROR_OUT_OF_MEMORY"),
            ["Hint: use a smaller batch_size"],
        ),
        (
            tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate 8589934592 bytes."),
            ["Hint: use a smaller batch_size", "Not allocated: 8.0 GiB."],
        ),
        (
            MemoryError("Unable to allocate 2.00 MiB for an array with shape (512, 512) and data type float64"),
            ["Hint: use a smaller batch_size", "Not allocated: a tensor [512, 512] float64, 2 MiB."],
        ),
        (tf.errors.ResourceExhaustedError(None, None, "weights.h5; No space left on device"), []),
        (ValueError("out of memory"), []),
    ],
    ids=["CUDA", "XLA", "NumPy", "a full disk", "a value"],
)
def test_memory_that_is_full(error: Exception, told: list[str]) -> None:
    for _ in range(2):  # An error may pass several places that would tell.
        note_out_of_memory(error)
    notes = [note for note in getattr(error, "__notes__", []) if not note.startswith("Largest variables")]
    assert len(notes) == len(told)
    assert all(note.startswith(text) for note, text in zip(notes, told, strict=True))


_ON_TWO_RANKS = {
    "raises": ["ValueError: seven", "Both ranks raised ValueError, and the run was ended. The output of rank 0 is above.\nLogs: "],
    "reads its own rows": ["DesyncError", "rank_data=\"own\"", "Both ranks raised DesyncError"],
    "needs too much": ["OOM when allocating", "use a smaller batch_size", "Not allocated: a tensor [", "Largest variables: "],
}  # fmt: skip


@pytest.mark.lane("launchers")
@pytest.mark.parametrize("mistake", _ON_TWO_RANKS)
def test_on_two_ranks(mistake: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "logs", str(_SCRIPT), mistake]
    environ = os.environ | {"PYTHONPATH": _ROOT, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    for text in _ON_TWO_RANKS[mistake]:
        assert text in done.stderr
    first, *_ = done.stderr.splitlines()
    assert first == f"tfrep: 2 replicas on this machine (CPU), shared_memory; logs in {tmp_path / 'logs'}"
    # Of what lies between the script and the error, only the script is shown.
    assert f'File "{_SCRIPT}"' in done.stderr
    shown, _, _ = done.stderr.partition("Detected at node")  # TensorFlow tells where that was made.
    assert f"{_ROOT}{os.sep}tfrep_strategy{os.sep}" not in shown


@pytest.mark.lane("launchers")
def test_on_several_machines(said: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        error = said("run", "--nnodes", "2", "--node-rank", "0", "--rendezvous", place, "train.py")
    assert "Node 0 cannot listen at the rendezvous (Address already in use)." in error
    assert "Hint: use a free port" in error
    error = said("run", "--hosts", "no.such.host.invalid:2", "train.py")
    assert "no.such.host.invalid cannot be reached through ssh (" in error
    assert "\nHint: " in error
