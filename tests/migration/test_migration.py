"""The programs of the migration guides: one of before does what its page says, one of after gives the answer of one device."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from needs import needs_horovod

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("migration")

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = _ROOT / "docs" / "migration"
_PROGRAMS = _PAGES / "programs"
_SCRIPTS = Path(__file__).with_name("scripts")
_LIMIT = 150
_EQUAL = 1e-5
_VERSIONS_DIFFER = 2e-3
"""How far a number of a page may be from what is measured: pages have three decimals, of one machine."""

needs_tf_keras = pytest.mark.skipif(not importlib.util.find_spec("tf_keras"), reason="needs the extra bench (tf_keras)")

Started = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Ended:
    """How processes have ended.

    Attributes:
        codes: Their exit codes.
        output: What they wrote, to standard error too.
    """

    codes: list[int]
    output: str

    @property
    def results(self) -> list[dict[str, Any]]:
        """The JSON that each process has printed. horovodrun may put two into one line."""
        return [json.loads(text) for text in re.findall(r'\{"losses": [^{}]*\}', self.output)]

    def last_error(self, kind: str) -> str:
        """Returns the last line in which an exception of this kind shows its message."""
        return re.findall(rf"{kind}: .*", self.output)[-1]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Gives `run(*started)`, which runs processes at once, in an empty folder."""

    def run_all(*started: Started) -> Ended:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        environ = inherited_environ() | {
            "PYTHONPATH": str(Path(tfrep.__file__).parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1",
        }  # fmt: skip
        processes = [
            subprocess.Popen(command, cwd=folder, env=environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for command, own in started
        ]
        try:
            outputs = [process.communicate(timeout=_LIMIT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Ended([process.returncode for process in processes], "\n".join(outputs))

    return run_all


def alone(program: str, **environ: str) -> Started:
    """Runs a program of the guides by `python`."""
    return [sys.executable, str(_PROGRAMS / f"{program}.py")], environ


def two_ranks(program: str, *options: str) -> Started:
    """Runs a program of the guides by `tfrep run -n 2`, which shows what both ranks print."""
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", *options, str(_PROGRAMS / f"{program}.py")]
    return command, {}


def under_horovodrun(program: Path) -> Started:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    return [str(horovodrun), "-np", "2", sys.executable, str(program)], {}


def workers(program: str, count: int) -> list[Started]:
    """Runs a program of the guides once for each worker of a `TF_CONFIG`."""
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(count)]}
    configs = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(count)]
    return [alone(program, TF_CONFIG=json.dumps(config)) for config in configs]


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    """What plain Keras computes: the program of one device."""
    command, _ = alone("one_gpu_before")
    environ = inherited_environ() | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ["PYTHONPATH"] = str(Path(tfrep.__file__).parents[1])
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_equal(ended: Ended, expected: dict[str, Any], count: int) -> None:
    """Compares what `count` processes have printed with the numbers of one device."""
    assert set(ended.codes) == {0}, ended.output
    assert len(ended.results) == count, ended.output
    for results in ended.results:
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            assert results[name] == pytest.approx(value, rel=_EQUAL, abs=_EQUAL), name


def check_told(page: str, *values: float) -> None:
    """Checks that a page shows these numbers."""
    shown = [float(number) for number in re.findall(r"\b\d\.\d{3}\b", (_PAGES / f"{page}.md").read_text("utf-8"))]
    for value in values:
        assert any(abs(number - value) < _VERSIONS_DIFFER for number in shown), (value, shown)


def check_quoted(page: str, *lines: str) -> None:
    """Checks that a page quotes these lines."""
    text = (_PAGES / f"{page}.md").read_text("utf-8")
    for line in lines:
        assert line in text, line


# From one GPU.


@pytest.mark.parametrize(("program", "options"), [("one_gpu_before", ["--prefix"]), ("one_gpu_after", ["--strategy", "mirrored"])])
def test_from_one_gpu(program: str, options: Sequence[str], run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    check_equal(run(two_ranks(program, *options)), one_device, 2 if "--prefix" in options else 1)
    check_told("one_gpu", *one_device["losses"], one_device["test_loss"])


# From TensorFlow's strategies.


def test_from_mirrored_strategy(run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    ended = run(alone("mirrored_before"), alone("mirrored_after"))
    stock, ours = ended.results
    check_equal(Ended(ended.codes, json.dumps(ours)), one_device, 1)
    assert abs(stock["losses"][1] - one_device["losses"][1]) > 0.1
    check_told("tf_distribute", *stock["losses"], stock["test_loss"], *one_device["losses"], one_device["test_loss"])


def test_stock_multi_worker_strategy_trains_with_one_worker_only(run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    check_equal(run(*workers("multi_worker_before", 1)), one_device, 1)
    ended = run(*workers("multi_worker_before", 2))
    assert ended.codes == [1, 1], ended.output
    assert not ended.results
    error = ended.last_error("ValueError")
    assert error.startswith("ValueError: Attempt to convert a value (PerReplica:{")
    assert "with an unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor." in ended.output
    check_quoted("tf_distribute", "ValueError: Attempt to convert a value (PerReplica:{")


def test_from_multi_worker_strategy(run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    check_equal(run(*workers("multi_worker_after", 2)), one_device, 2)


@pytest.mark.parametrize("program", ["mirrored_before", "multi_worker_before"])
def test_tfrep_run_takes_the_programs_as_they_are(program: str, run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    check_equal(run(two_ranks(program, "--prefix", "--communicator", "tf")), one_device, 2)


# From `keras.distribution`.


@pytest.mark.parametrize("options", [(), ("--strategy", "mirrored")])
def test_from_keras_distribution(options: Sequence[str], run: Callable[..., Ended]) -> None:
    (expected,) = run(alone("keras_distribution")).results
    check_equal(run(two_ranks("keras_distribution", *(options or ["--prefix"]))), expected, 1 if options else 2)


# From Horovod.


@needs_horovod
def test_callbacks_of_horovod_fail(run: Callable[..., Ended]) -> None:
    ended = run(under_horovodrun(_PROGRAMS / "horovod_before.py"))
    assert ended.codes == [1], ended.output
    assert not ended.results
    error = ended.last_error("AttributeError")
    ended = run(under_horovodrun(_SCRIPTS / "horovod_callbacks.py"))
    assert ended.codes == [0], ended.output
    found = [json.loads(text)["found"] for text in re.findall(r'\{"found": \{[^{}]*\}\}', ended.output)]
    assert found[0] == found[1]
    assert set(found[0]) == {
        "BroadcastGlobalVariablesCallback", "MetricAverageCallback", "LearningRateWarmupCallback",
        "LearningRateScheduleCallback", "BestModelCheckpoint",
    }  # fmt: skip
    assert all(outcome.startswith("AttributeError: ") for outcome in found[0].values()), found
    check_quoted("horovod", error, *(outcome.removeprefix("AttributeError: ") for outcome in found[0].values()))


@needs_horovod
def test_each_rank_of_horovods_optimizer_trains_alone(run: Callable[..., Ended]) -> None:
    ended = run(under_horovodrun(_PROGRAMS / "horovod_optimizer_before.py"))
    assert ended.codes == [0], ended.output
    first, second = (results["test_loss"] for results in ended.results)
    assert abs(first - second) > 0.01  # Ranks that have averaged their gradients have one model.
    check_told("horovod", first, second)


def test_from_horovod(run: Callable[..., Ended]) -> None:
    (expected,) = run(alone("horovod_after")).results
    check_equal(run(two_ranks("horovod_after", "--prefix")), expected, 2)
    check_told("horovod", expected["test_loss"])


# From estimators.


def test_there_are_no_estimators(run: Callable[..., Ended]) -> None:
    ended = run(alone("estimator_before"))
    assert ended.codes == [1]
    error = "AttributeError: module 'tensorflow' has no attribute 'estimator'"
    assert ended.last_error("AttributeError") == error
    check_quoted("model_fn", error)


def test_from_estimators(run: Callable[..., Ended], tmp_path: Path) -> None:
    (expected,) = run(alone("estimator_after")).results
    check_equal(run(two_ranks("estimator_after", "--prefix")), expected, 2)
    exported, distributed = (
        sorted(re.sub(r"\d", "", path.name) for path in (folder / "digits").rglob("*") if path.is_file())
        for folder in sorted(tmp_path.iterdir())
    )
    assert "saved_model.pb" in exported
    assert any("tfevents" in name for name in exported)
    assert [name for name in distributed if "tfevents" not in name] == [name for name in exported if "tfevents" not in name]


def test_there_are_no_hooks_of_sessions(run: Callable[..., Ended]) -> None:
    ended = run(alone("estimator_keras_before"))
    assert ended.codes == [1]
    error = "AttributeError: module 'tensorflow._api.v2.train' has no attribute 'SessionRunHook'"
    assert ended.last_error("AttributeError") == error
    check_quoted("estimator", error)


def test_lines_of_estimators_stay() -> None:
    """The page lists each line of the program that has changed, and says how many have not."""
    before, after = ((_PROGRAMS / f"estimator_keras_{name}.py").read_text("utf-8").splitlines() for name in ("before", "after"))
    gone = [line for line in before[before.index("BATCH_SIZE, EPOCHS = 32, 2") :] if line not in after and "print" not in line]
    assert len(gone) == 5
    page = (_PAGES / "estimator.md").read_text("utf-8")
    for line in gone:
        (removed,) = re.findall(r"tf\.train\.\w+|tf\.contrib[\w.]+|tf\.estimator\.\w+|tf\.keras\.estimator\.\w+", line)
        assert f"`{removed}" in page, removed


@pytest.mark.parametrize("options", [None, ["--prefix"], pytest.param(["--communicator", "horovod"], marks=needs_horovod)])
def test_from_estimators_through_the_adapter(options: list[str] | None, run: Callable[..., Ended], tmp_path: Path) -> None:
    """Two replicas with batches of 32 are one device with batches of 64."""
    text = (_PROGRAMS / "estimator_keras_after.py").read_text("utf-8")
    for two, one in (("BATCH_SIZE, EPOCHS = 32", "BATCH_SIZE, EPOCHS = 64"), ('["CPU:0", "CPU:1"]', '["CPU:0"]')):
        assert two in text
        text = text.replace(two, one)
    one_device = tmp_path / "one_device.py"
    one_device.write_text(text, "utf-8")
    (expected,) = run(([sys.executable, str(one_device)], {})).results
    assert expected["steps"] == 45
    started = alone("estimator_keras_after") if options is None else two_ranks("estimator_keras_after", *options)
    check_equal(run(started), expected, 2 if options == ["--prefix"] else 1)
    folder = max((path for path in tmp_path.iterdir() if path.is_dir()), key=lambda path: int(path.name)) / "digits"
    assert {"model.ckpt-0.index", "model.ckpt-45.index", "eval"} <= {path.name for path in folder.iterdir()}
    events = [path.name for path in folder.iterdir() if "tfevents" in path.name]
    assert len(events) == 1


# From parameter servers of tf_keras.


@needs_tf_keras
def test_stock_parameter_servers_train_with_tf_keras(run: Callable[..., Ended]) -> None:
    ended = run(alone("parameter_server_before", TF_USE_LEGACY_KERAS="1"))
    assert ended.codes == [0], ended.output
    (results,) = ended.results
    assert results["iterations"] == 90
    assert results["losses"][1] < results["losses"][0]


def test_stock_parameter_servers_do_not_train_keras_3(run: Callable[..., Ended], tmp_path: Path) -> None:
    command, environ = alone("parameter_server_before", TF_USE_LEGACY_KERAS="0")
    with_data_set = tmp_path / "with_data_set.py"
    text = Path(command[-1]).read_text("utf-8")
    with_data_set.write_text(re.sub("^creator = .*$", "creator = dataset_fn(None)", text, flags=re.MULTILINE), "utf-8")
    ended = run((command, environ), ([sys.executable, str(with_data_set)], environ))
    assert ended.codes == [1, 1], ended.output
    errors = [ended.last_error("AttributeError"), ended.last_error("ValueError")]
    assert errors[0] == "AttributeError: module 'keras.utils' has no attribute 'experimental'"
    assert errors[1].startswith("ValueError: To use this dataset")
    check_quoted("parameter_server", *errors)


def test_from_parameter_servers(run: Callable[..., Ended], one_device: dict[str, Any]) -> None:
    check_equal(run(alone("parameter_server_after")), one_device, 1)


# The pages.


def test_every_program_is_on_a_page_and_run_here() -> None:
    pages = "".join(page.read_text("utf-8") for page in _PAGES.glob("*.md"))
    here = Path(__file__).read_text("utf-8")
    programs = {path.stem for path in _PROGRAMS.glob("*.py")}
    assert {name for name in programs if f"{{literalinclude}} programs/{name}.py" in pages} == programs
    assert {name for name in programs if re.search(rf'"{name}(\.py)?"', here)} == programs


@pytest.mark.parametrize("page", sorted(_PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_names_on_pages_exist(page: Path) -> None:
    text = re.sub(r"^\|[^|]*\|", "", page.read_text("utf-8"), flags=re.MULTILINE)  # Old names stand in the first columns.
    for name in set(re.findall(r"\btfrep\.((?:\w+\.)*\w+)", text)):
        found: Any = tfrep
        for part in name.split("."):
            found = getattr(found, part)
