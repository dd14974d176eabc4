"""The benchmarks run, with tiny settings, and say what they should. What they measure is not judged here."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tfrep_strategy.processes.identity import horovod_is_installed

pytestmark = pytest.mark.lane("benchmarks")

_REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(_REPOSITORY))  # At the end: where the package is installed, that one is tested.


def _run(tmp_path, module, *arguments):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(path)]
    environ = os.environ | {"TFREP_TEST": str(tmp_path)}  # By which its processes are known.
    done = subprocess.run(
        command, cwd=_REPOSITORY, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [
        p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TFREP_TEST") == str(tmp_path)
    ]
    written = json.loads(path.read_text("utf-8"))
    assert written["machine"].keys() >= {"cores", "processor", "load_1min", "commit", "tensorflow", "keras"}
    return written["results"], done.stdout


def test_startup(tmp_path):
    results, text = _run(tmp_path, "startup", "--rounds", "1", "--ranks", "2")
    assert set(results) == {"1 rank", "2 ranks, forked", "2 ranks, started anew"}
    for name, found in results.items():
        assert name in text
        assert 0 < found["line"] < found["step"]
        assert 0 < found["line, CPU"] < found["step, CPU"]
    assert results["1 rank"]["line, ratio"] == 1
    assert results["2 ranks, forked"]["line, CPU"] < results["2 ranks, started anew"]["line, CPU"]


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


def test_input(tmp_path):
    results, text = _run(
        tmp_path, "input", "--rounds", "2", "--images", "40", "--pixels", "64", "--processes", "1", "2"
    )  # fmt: skip
    summary = results["40 JPEG files"]
    assert summary["samples_ms"].keys() == {"one device", "1 process", "2 processes"}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in summary["samples_ms"].values())
    _, line = summary["ratios"]
    assert (line["this"], line["other"], line["target"]) == ("2 processes", "one device", 1.15)
    assert "2 processes takes" in text


def test_throughput():
    from benchmarks.throughput import added_seconds

    assert 0 < abs(added_seconds(repeats=5)) < 0.01  # On a busy machine one may seem to take something away.


def test_calls(tmp_path):
    """One replica adds nothing to a step of plain Keras in Python, and next to nothing in the compiled step."""
    results, text = _run(tmp_path, "calls")
    keras = results["Keras"]
    assert keras["python"] > 500
    assert keras["nodes"] > 50
    assert "MultiWorkerStrategy, 2 processes, tf" in text
    assert keras["nodes"] < results["MultiWorkerStrategy, 2 processes, tf"]["nodes"]
    for name in ("MirroredStrategy, 1 replica", "MultiWorkerStrategy, 1 replica"):
        assert name in text
        assert results[name]["python"] <= keras["python"]
        assert results[name]["nodes"] <= keras["nodes"] + 3


def test_tracing(tmp_path):
    results, text = _run(tmp_path, "tracing", "--nets", "dense", "--replicas", "2", "--rounds", "1")
    assert set(results) == {"dense, batches of one size", "dense, batches of any size"}
    for net, found in results.items():
        assert net in text
        for each in (found["Keras"], found["2"]):
            assert 0 < each["seconds"][0] < each["step_seconds"][0]


def test_demo(tmp_path):
    results, text = _run(tmp_path, "demo", "--rounds", "1", "--epochs", "2", "--examples", "128")
    summary = results["demo"]
    assert {"one device", "mirrored, 2 replicas", "2 processes, tf"} <= set(summary["median_ms"])
    assert {line["this"] for line in summary["ratios"]} == set(summary["median_ms"]) - {"one device"}
    for name, samples in summary["samples_ms"].items():
        assert name in text
        assert len(samples) == 1
        assert samples[0] > 0


def test_switching(tmp_path):
    results, text = _run(tmp_path, "switching", "--processes", "2", "--times", "20")
    assert set(results) == {"2"}
    assert set(results["2"]) == {"messages", "call", "messages and call", "sum"}
    for kind, costs in results["2"].items():
        assert kind in text
        assert costs["cpu_us"] > 0


def test_waiting(tmp_path):
    results, text = _run(tmp_path, "waiting", "--nets", "tiny", "--steps", "20", "--rounds", "1")
    assert "tiny" in text
    assert "2 processes, each alone (Keras)" in results["tiny"]
    for found in results["tiny"].values():
        assert found["slower_ms"] >= found["mean_ms"] > 0
        assert found["reachable"] == pytest.approx(found["mean_ms"] / found["slower_ms"])


def test_overlap(tmp_path):
    page = tmp_path / "page.md"
    results, text = _run(tmp_path, "overlap", "--communicators", "tf", "--page", str(page))
    assert {name: len(steps) for name, steps in results.items()} == {"tf, 4 MiB": 5, "tf, found": 5}
    for step in [*results["tf, 4 MiB"], *results["tf, found"]]:
        assert 0 < step["backward_ms"] < step["step_ms"]
        assert 0 <= step["hidden_ms"] <= step["collectives_ms"]
        assert step["timeline_ms"]["collectives"]
    assert "backward" in text
    assert (tmp_path / "figures" / "overlap.svg").is_file()


def test_traffic(tmp_path):
    results, text = _run(tmp_path, "traffic", "--nets", "tiny", "--settings", "float32", "bf16")
    assert set(results["tiny"]) >= {"tf", "shared_memory"}
    assert ("Horovod's milliseconds" in text) == horovod_is_installed()
    for communicator, settings in results["tiny"].items():
        plain, compressed = settings.values()
        if communicator == "shared_memory":  # Other programs use the loopback interface, too.
            assert plain["bytes"] > 2 * 4 * 2762, "two ranks bring their gradients"
            assert compressed["bytes"] < 0.6 * plain["bytes"]
        assert compressed["collectives"] > plain["collectives"] > 0, "parts are exchanged, and their sums gathered"
        for each in settings.values():
            assert 0 < each["collectives_ms"] < each["step_ms"]
            if communicator == "horovod":
                assert 0 < each["horovod_ms"]["sending"] < each["horovod_ms"]["all"]


def test_growth(tmp_path):
    results, text = _run(tmp_path, "growth", "--rounds", "1", "--processes", "1", "2")
    alone, together = results["1"], results["2"]
    assert "MB that the chief writes" in text
    assert alone["arrays_mb"] == pytest.approx(2 * together["arrays_mb"]), "a rank reads its own rows"
    assert together["checkpoint_others_mb"] < 0.1 < together["checkpoint_chief_mb"]
    # What takes no time may seem to take less: two runs are compared, of which either may be the slower on a busy machine.
    assert math.isfinite(together["arrays_cpu_s"])
    assert together["checkpoint_s"] > 0


def test_all_reduce(tmp_path):
    results, text = _run(tmp_path, "all_reduce", "--rounds", "2", "--times", "2")
    assert set(results) == {"20 x 1 MB", "1 x 20 MB", "10 floats"}
    for summary in results.values():
        assert len(summary["median_ms"]) == (7 if horovod_is_installed() else 4)
        assert all(median > 0 for median in summary["median_ms"].values())
    assert ("times as long as" in text) == horovod_is_installed()


def test_collectives(tmp_path):
    results, text = _run(
        tmp_path, "collectives", "--rounds", "2", "--times", "2", "--sizes", "40 bytes", "--primitives", "all_reduce max", "barrier"
    )  # fmt: skip
    assert set(results) == {"all_reduce max of 40 bytes", "barrier of 40 bytes"}
    for summary in results.values():
        assert {"ours, tf", "TensorFlow, bare"} <= set(summary["median_ms"])
        assert len(summary["ratios"]) == (3 if horovod_is_installed() else 1)
        assert all(median > 0 for median in summary["median_ms"].values())
    assert "barrier of 40 bytes" in text


def test_control_plane(tmp_path):
    results, text = _run(tmp_path, "control_plane", "--ranks", "16", "--processes", "2", "--seconds", "1")
    assert all(value > 0 for value in results["16"].values())
    assert "all have heard of a death" in text


def test_scale(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((_REPOSITORY / "docs" / "speed.md").read_text("utf-8"), "utf-8")
    results, text = _run(
        tmp_path, "scale", "--communicators", "tf", "--rounds", "1", "--processes", "2", "3", "--floats", "24", "30000",
        "--primitives", "all_reduce sum", "all_to_all", "--control", "4", "8", "--few", "2", "3", "--seconds", "1",
        "--page", str(page),
    )  # fmt: skip
    assert set(results["collectives"]["tf"]) == {"all_reduce sum", "all_to_all"}
    for result in results["collectives"]["tf"].values():
        assert [(each["processes"], each["bytes"]) for each in result["points"]] == [
            (n, size) for size in (96.0, 120_000.0) for n in (2, 3)
        ]
        assert all(each["measured_ms"] > 0 and each["predicted_ms"] > 0 for each in result["points"])
        assert min(result["costs"].values()) >= 0
    assert set(results["control"]["measured"]) == {"4", "8"}
    assert set(results["control of few"]["measured"]) == {"2", "3"}
    assert results["control"]["predicted"]["agree_ms"] > 0
    assert "predicted ms" in text
    written = page.read_text("utf-8")
    assert written.count("| all_to_all |") == 1
    assert written.count("figures/scale_") == 2
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"scale_collectives.svg", "scale_ranks.svg"}


def test_memory(tmp_path):
    results, text = _run(tmp_path, "memory", "--rows", "9000", "--processes", "2", "--variants", "Keras", "on the chief")
    assert [len(processes) for processes in results.values()] == [1, 2]
    for processes in results.values():
        assert all(each["first_step_s"] > 0 and 0 < each["memory_mb"] <= 1.1 * each["epoch_mb"] for each in processes)
    [[alone], [chief, other]] = results.values()
    assert (alone["predicted_rows"], chief["predicted_rows"], other["predicted_rows"]) == (9000, 9000, 0)
    assert "predictions held" in text


_PAGES = [
    ("speed_page", "speed", "scale"),
    ("step_page", "benchmarks", "step"),
    ("medians_page", "benchmarks", "all_reduce"),
    ("medians_page", "collectives", "collectives"),
    ("traffic_page", "benchmarks", "traffic"),
    ("growth_page", "speed", "growth"),
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


def test_costs_are_found_again():
    from benchmarks.costs import ETHERNET, H200, PRIMITIVES, Costs, fit

    made = Costs(1e-3, 1e-5, 2e-5, 1e-9)
    for name, primitive in (each for primitives in PRIMITIVES.values() for each in primitives.items()):
        points = {(n, size): made.seconds(primitive, n, size, 2) for n in (2, 3, 4) for size in (4.0, 1e5, 1e6)}
        found = fit(primitive, points, 2)
        assert found.seconds(primitive, 8, 1e6, 2) == pytest.approx(made.seconds(primitive, 8, 1e6, 2)), name
    # Of 4 bytes only one piece travels, from one process to the next; of 1 MB, 8 pieces at once, which share two cores.
    barrier = PRIMITIVES["tf"]["barrier"]
    assert made.seconds(barrier, 8, 4.0, 2) == pytest.approx(1e-3 + 14 * 3e-5 + 2 * 7 / 8 * 4 * 4e-9)
    assert made.seconds(barrier, 8, 1e6, 2) == pytest.approx(1e-3 + 14 * (1e-5 + 4 * 2e-5) + 2 * 7 / 8 * 1e6 * 4e-9)
    # A ring of 64: 126 messages, and nearly twice the bytes of each.
    assert ETHERNET.ring_s(64, 1e8) == pytest.approx(126 * 50e-6 + 126 / 64 * 1e8 / 3.125e9)
    # Of the 126 messages, 14 are between the 8 machines.
    assert H200.ring_s(64, 0.0) == pytest.approx(112 * 3.4e-6 + 14 * 9.6e-6)
    # An all-to-all: 7 messages within the machine, and 56 to others.
    assert H200.exchange_s(64, 6.4e7) == pytest.approx(7 * 3.4e-6 + 56 * 9.6e-6 + 6.3e7 / 4e11)


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
