"""The benchmarks run, with tiny settings, and say what they should. What they measure is not judged here."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tfrep_strategy.cluster.identity import horovod_is_installed

pytestmark = pytest.mark.lane("benchmarks")

_REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(_REPOSITORY))  # At the end: where the package is installed, that one is tested.


def _run(tmp_path, module, *arguments):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(path)]
    environ = os.environ | {"TFREP_TEST": str(tmp_path)}  # By which its processes are known.
    done = subprocess.run(command, cwd=_REPOSITORY, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TFREP_TEST") == str(tmp_path)]
    written = json.loads(path.read_text("utf-8"))
    assert written["machine"].keys() >= {"cores", "processor", "load_1min", "commit", "tensorflow", "keras"}
    return written["results"], done.stdout


def test_startup(tmp_path):
    results, text = _run(tmp_path, "startup", "--rounds", "1", "--ranks", "2")
    assert set(results) == {"1 rank", "2 ranks"}
    for name, found in results.items():
        assert name in text
        assert 0 < found["line"] < found["step"]
        assert 0 < found["line, CPU"] < found["step, CPU"]
    assert results["1 rank"]["line, ratio"] == 1


def test_step(tmp_path):
    names = ["Keras", "stock mirrored", "ours, mirrored", "ours, 2 processes"]
    results, text = _run(
        tmp_path, "step", "--nets", "10 ms", "--rounds", "2", "--steps", "2", "--variants", *names
    )  # fmt: skip
    summary = results["10 ms"]
    assert {"Keras", "ours, mirrored", "stock mirrored", "ours, 2 processes, tf"} <= set(summary["median_ms"])
    assert ("ours, 2 processes, horovod" in summary["median_ms"]) == horovod_is_installed()
    for name, samples in summary["samples_ms"].items():
        assert len(samples) == 2
        assert min(samples) > 0
        assert name in text
    compared = {(line["this"], line["other"]) for line in summary["ratios"]}
    assert ("ours, mirrored", "stock mirrored") in compared
    assert "reached" in text

    from benchmarks.step_page import write_page

    page = tmp_path / "page.md"
    page.write_text((_REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8"), "utf-8")
    write_page(page, tmp_path / "result.json")
    written = page.read_text("utf-8")
    assert "The net '10 ms', batches of 256:" in written
    assert f"| ours, mirrored | stock mirrored | {summary['ratios'][0]['ratio']:.2f} |" in written
    assert (tmp_path / "figures" / "steps.svg").is_file()


def test_one_replica_has_more_turns_than_others(tmp_path):
    arguments = ["--nets", "tiny", "--rounds", "1", "--pairs", "3", "--steps", "2", "--variants", "Keras", "1 replica (mirrored)"]
    results, _ = _run(tmp_path, "step", *arguments)
    samples = results["tiny"]["samples_ms"]
    assert len(samples["Keras"]) == len(samples["ours, 1 replica (mirrored)"]) == 3
    assert len(samples["Keras, XLA"]) == 1


def test_all_reduce(tmp_path):
    results, text = _run(tmp_path, "all_reduce", "--rounds", "2", "--times", "2")
    assert set(results) == {"20 x 1 MB", "1 x 20 MB", "10 floats"}
    for summary in results.values():
        assert len(summary["median_ms"]) == (7 if horovod_is_installed() else 4)
        assert all(median > 0 for median in summary["median_ms"].values())
    assert ("times as long as" in text) == horovod_is_installed()


def test_control_plane(tmp_path):
    results, text = _run(tmp_path, "control_plane", "--ranks", "16", "--processes", "2", "--seconds", "1")
    assert all(value > 0 for value in results["16"].values())
    assert "all have heard of a death" in text


def test_memory(tmp_path):
    results, text = _run(tmp_path, "memory", "--rows", "9000", "--processes", "2", "--variants", "Keras", "on the chief")
    assert [len(processes) for processes in results.values()] == [1, 2]
    for processes in results.values():
        assert all(each["first_step_s"] > 0 and 0 < each["memory_mb"] <= 1.1 * each["epoch_mb"] for each in processes)
    [[alone], [chief, other]] = results.values()
    assert (alone["predicted_rows"], chief["predicted_rows"], other["predicted_rows"]) == (9000, 9000, 0)
    assert "predictions held" in text


_PAGES = [
    ("step_page", "benchmarks", "step"),
    ("medians_page", "benchmarks", "all_reduce"),
]


@pytest.mark.parametrize(("module", "page", "measured"), _PAGES)
def test_pages_say_what_was_measured(module, page, measured, tmp_path):
    """What is written into a page comes from the results beside it, which say where and of what they are."""
    results = _REPOSITORY / "benchmarks" / "results" / f"{measured}.json"
    assert json.loads(results.read_text("utf-8"))["machine"].keys() >= {"cores", "commit", "load_1min"}
    committed = _REPOSITORY / "docs" / f"{page}.md"
    copy = tmp_path / committed.name
    shutil.copy(committed, copy)
    importlib.import_module(f"benchmarks.{module}").write_page(copy, results)
    assert copy.read_text("utf-8") == committed.read_text("utf-8")


def test_ratio_is_taken_round_by_round():
    from benchmarks.report import ratio, summarize

    samples = {"a": [1.0, 2.0, 30.0], "b": [2.0, 4.0, 10.0]}
    assert ratio(samples, "a", "b") == 0.5
    summary = summarize(samples, {("a", "b"): 0.75, ("a", "absent"): 1.0})
    assert summary["median_ms"] == {"a": 2000.0, "b": 4000.0}
    assert summary["ratios"] == [{"this": "a", "other": "b", "ratio": 0.5, "interval": (0.5, 3.0), "target": 0.75}]


def test_a_process_that_fails_is_named_and_nothing_stays_behind():
    from benchmarks.crews import Crew, Variant

    with pytest.raises(RuntimeError, match="(?s)a bad one.*KeyError: 'no such strategy'"):
        Crew(Variant("a bad one", {"strategy": "no such strategy"}, 2), "benchmarks.step_worker")
    assert not [p for p in psutil.Process().children() if "benchmarks.step_worker" in p.cmdline()]


def test_own_loop(tmp_path):
    results, text = _run(tmp_path, "own_loop", "--processes", "2", "--rounds", "1", "--steps", "1", "--smaller", "16")
    assert "2 processes" in text
    medians = results["2 processes"]["median_ms"]
    assert set(medians) == {"2 copies of one device", "ours, 2 processes, tf", "ours, 2 processes, shared_memory"}
    assert min(medians.values()) > 0
