"""Whole scripts, as people write them, give under `tfrep run` what `python` gives."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from needs import needs_horovod
from running import Outcome, Running

from tfrep_strategy.contrib.digits import load_digits

_SCRIPTS = Path(__file__).with_name("scripts")
_EXAMPLES = Path(__file__).parents[2] / "examples"
_TESTED_ELSEWHERE = {"gpt2_lora", "own_transport", "parameter_servers"}
"""Examples that need a package, or start their processes themselves."""
_LIMIT = 150.0
_KINDS = {
    "tf": ("--communicator", "tf"),
    "mirrored": ("--strategy", "mirrored"),
    "horovod": ("--communicator", "horovod"),
}


@dataclass(frozen=True)
class Program:
    """How a script is run, and how much its results may differ from those of one device.

    Attributes:
        arguments: Its command line. `{downloads}` is the address of a server of files.
        tolerance: Relative to the larger of a number and 1. Training adds up the rounding of sums in another order.
        falls: Losses of epochs, which must fall at least half as far as on one device.
        refused: What the message says by which processes refuse it. Replicas in one process run it.
        always: Whether it is run without TFREP_PROGRAMS_TESTS=all too.
        steps: Whether it takes steps that `tfrep verify` compares.
        full: Whether it needs all steps of each epoch.
    """

    arguments: tuple[str, ...] = ()
    tolerance: float = 1e-4
    falls: tuple[str, ...] = ()
    refused: str = ""
    always: bool = True
    steps: bool = True
    full: bool = False


_DRAWS = 0.5
"""For scripts in which replicas draw numbers of their own: as good as on one device, and not the same. A model that is not trained
may be within it; the others that draw say which losses fall."""

PROGRAMS = {
    "accumulate_and_average": Program(always=False),
    "char_lstm": Program(tolerance=0.03, falls=("losses",)),
    "custom_train_step": Program(always=False),
    "custom_training_tutorial": Program(steps=False),
    "denoising_autoencoder": Program(always=False),
    "digits_cnn": Program(("--epochs", "2")),
    "distillation": Program(always=False),
    "download_archive": Program(("{downloads}/digits_by_class.zip",)),
    "dqn_grid": Program(tolerance=_DRAWS),
    "forecast": Program(("--url", "{downloads}/weather.csv", "--epochs", "3")),
    "fraud_class_weight": Program(always=False),
    "gan_loop": Program(("--epochs", "2")),
    "gan_train_step": Program(tolerance=_DRAWS),
    "gradcam": Program(),
    "grid_search": Program(),
    "horovod_style": Program(),
    "interrupted_training": Program(),
    "kfold": Program(),
    "layers_from_scratch": Program(always=False),
    "lora_finetune": Program(always=False),
    "many_callbacks": Program(),
    "mirrored_tutorial": Program(),
    "mixed_precision": Program(tolerance=2e-2, always=False),
    "mixup": Program(tolerance=0.2, falls=("loss", "val_loss"), always=False),
    "mobilenet_from_scratch": Program(tolerance=_DRAWS, always=False),
    "notebook_export": Program(),
    "old_spellings": Program(tolerance=_DRAWS, falls=("loss", "val_loss")),
    "one_device_strategy": Program(("--distribution_strategy", "one_device")),
    "own_callbacks": Program(),
    "own_metric_and_loss": Program(always=False),
    "pinn_oscillator": Program(),
    "prepared_once": Program(),
    "reinforce_pole": Program(steps=False),
    "resnet_jpegs": Program(("--epochs", "2", "--per-class", "30", "--size", "24", "--widths", "8", "16"), tolerance=1e-2),
    "save_and_serve": Program(),
    "seq2seq_addition": Program(),
    "siamese_contrastive": Program(always=False),
    "structured_features": Program(),
    "text_from_folders": Program(("{downloads}/reviews.tar.gz",)),
    "text_transformer": Program(("--epochs", "2", "--reviews", "600")),
    "tfrecords": Program(),
    "ticket_routing": Program(),
    "train_on_batch_loop": Program(),
    "two_towers": Program(("--epochs", "2", "--views", "2000"), always=False),
    "unet_sequence": Program(),
    "unseeded_data": Program(tolerance=_DRAWS, refused="were given other data than rank 0"),
    "vae_digits": Program(tolerance=0.15, falls=("loss",)),
    "vgg_finetune": Program(("--weights", "none", "--epochs", "1", "--examples", "64"), always=False),
    "vision_transformer": Program(always=False),
    "wgan_gp": Program(always=False),
    "worker_tutorial": Program(),
}


def _chosen(lane: Callable[[str], pytest.MarkDecorator], kinds: Sequence[str], every: int = 1) -> Iterator[Any]:
    """Gives programs one kind of run each, in turn; with TFREP_PROGRAMS_TESTS=all gives every program every kind.

    Args:
        lane: Returns the mark of the lane of a kind.
        kinds: Names of `_KINDS`.
        every: By default one of so many programs is taken.
    """
    everything = os.environ.get("TFREP_PROGRAMS_TESTS") == "all"
    names = sorted(name for name, program in PROGRAMS.items() if everything or program.always)
    for i, name in enumerate(names if everything else names[::every]):
        for kind in kinds if everything else [kinds[i % len(kinds)]]:
            marks = [lane(kind), *([needs_horovod] if kind == "horovod" else [])]
            yield pytest.param(name, kind, id=f"{name}-{kind}", marks=marks)


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of data files."""
    folder = tmp_path_factory.mktemp("downloads")
    _write_downloads(folder)
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _write_downloads(folder: Path) -> None:
    train, _ = load_digits()
    with ZipFile(folder / "digits_by_class.zip", "w") as zipped:
        for digit in range(3):
            rows = train.images[train.labels == digit].reshape(-1, 64) * 16
            zipped.writestr(f"digits/{digit}.csv", "\n".join(",".join(f"{v:g}" for v in row) for row in rows))
    rng = np.random.default_rng(4)
    with tarfile.open(folder / "reviews.tar.gz", "w:gz") as archive:
        for label, words in (("neg", "a dull weak cold silly grey film"), ("pos", "a fine clever warm bright film")):
            for i in range(60):
                text = " ".join([*rng.choice(words.split(), 9), "<br />The END!"]).encode()
                member = tarfile.TarInfo(f"reviews/{label}/{i}.txt")
                member.size = len(text)
                archive.addfile(member, BytesIO(text))
    time = np.arange(500)
    columns = [np.sin(time / 12) * 10, 1000 + 5 * np.cos(time / 40), time % 24]
    rows = [f"{i},{a:.2f},{b:.1f},{c}" for i, (a, b, c) in enumerate(zip(*columns, strict=True))]
    (folder / "weather.csv").write_text("\n".join(["Date Time,T (degC),p (mbar),h", *rows]))


@pytest.mark.parametrize(("name", "kind"), [*_chosen(lambda kind: pytest.mark.lane(f"programs_{kind}"), list(_KINDS))])
def test_program(name: str, kind: str, downloads: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    script = _script(name)
    arguments = [argument.format(downloads=downloads) for argument in program.arguments]
    # Both at once: each of them has parts that use one core only.
    run = Running(script, arguments, tmp_path / kind, _KINDS[kind])
    one_device = Running(script, arguments, tmp_path / "one_device", None).end(_LIMIT)
    found = run.end(_LIMIT)

    assert one_device.code == 0, one_device.output
    assert not found.left, found.left
    if program.refused and kind != "mirrored":
        assert found.code not in (0, None), found.output
        assert program.refused in found.output
        return
    assert found.code == 0, _story(found)
    assert found.files == one_device.files
    (expected,) = one_device.results
    assert len(found.results) == (1 if kind == "mirrored" else 2), "each process prints its results"
    for rank, results in enumerate(found.results):
        _compare(results, expected, program.tolerance, f"rank {rank}: ")
        for name in program.falls:
            assert _fall(results, name) >= 0.5 * _fall(expected, name) > 0, f"rank {rank}, {name}: {results}, one device {expected}"
    assert all(results == found.results[0] for results in found.results), f"The ranks differ: {found.results}"


@pytest.mark.parametrize(
    ("name", "kind"), [*_chosen(lambda kind: pytest.mark.lane(f"verified_{kind}"), ["mirrored", "tf"], every=3)]
)
def test_verified_program(name: str, kind: str, downloads: str, tmp_path: Path) -> None:
    """Its steps, and what comes of them, differ nowhere from one device."""
    program = PROGRAMS[name]
    arguments = [argument.format(downloads=downloads) for argument in program.arguments]
    options = (*_KINDS[kind], *(["--full"] if program.full else []))
    found = Running(_script(name), arguments, tmp_path, options, "verify").end(4 * _LIMIT)
    if program.refused and kind != "mirrored":
        assert found.code not in (0, None), _story(found)
        assert program.refused in _story(found)
        return
    # In processes, calls of loops for replicas can be compared. Of steps that draw numbers only the steps are.
    nothing_compared = not re.search("Results and weights|Results are not compared: steps draw", found.output)
    assert found.code == (0 if program.steps or not nothing_compared else 2), _story(found)
    assert program.steps != ("Compared: 0 steps" in found.output or nothing_compared), _story(found)
    assert not found.left, found.left


def _script(name: str) -> Path:
    example = _EXAMPLES / f"{name}.py"
    return example if example.exists() else _SCRIPTS / f"{name}.py"


def _story(outcome: Outcome) -> str:
    return "\n\n".join(["Time was over." if outcome.code is None else "", outcome.output, *outcome.logs])


def _fall(results: dict[str, Any], name: str) -> float:
    losses = results.get("history", results)[name]
    return losses[0] - losses[-1]


def _compare(found: Any, expected: Any, tolerance: float, path: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            _compare(found[key], expected[key], tolerance, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            _compare(f, e, tolerance, f"{path}[{i}]")
    elif isinstance(expected, str):
        assert found == expected, path
    else:
        assert np.isfinite(found), path
        assert np.isfinite(expected), path
        assert abs(found - expected) <= tolerance * max(1.0, abs(expected)), f"{path}: {found}, one device {expected}"


@pytest.mark.lane("programs_mirrored")
def test_every_script_is_run() -> None:
    scripts, examples = ({path.stem for path in folder.glob("*.py")} for folder in (_SCRIPTS, _EXAMPLES))
    assert not scripts & examples
    assert scripts | (examples - _TESTED_ELSEWHERE) == set(PROGRAMS)
