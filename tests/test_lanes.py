"""Lanes: which tests are in which, and what CI runs of them, on projects of a few tests."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lanes import LANES, parts

pytestmark = pytest.mark.lane("package")

_ROOT = Path(__file__).parents[1]
_CI = _ROOT / ".ci"
_LIMIT = 60

_PROJECT = {
    "setup.cfg": "[tool:pytest]\ntestpaths = tests\naddopts = --strict-markers\n",
    "tests/conftest.py": """
from lanes import pytest_collection_modifyitems, pytest_configure

def pytest_addoption(parser): parser.addoption("--rooms", action="store_true")
""",
    "tests/test_faults.py": """
import pytest
from lanes import in_lane, others_in_lane

pytestmark = pytest.mark.lane("faults")

def test_of_the_module(): pass

@pytest.mark.lane("quick")
def test_of_its_own(): pass

@pytest.mark.parametrize("n", [1, *in_lane("short", 2), *in_lane("rows_b", 3)])
def test_of_parameters(n): pass

@pytest.mark.parametrize(("n", "m"), [*in_lane("short", (1, 2)), (3, 4)])
def test_of_pairs(n, m): pass

@pytest.mark.parametrize("n", others_in_lane("rows_a", range(3), 1))
def test_of_others(n): pass
""",
    "tests/test_plain.py": "def test_plain(): pass\n",
}

_SKIPS = """
@pytest.fixture(autouse=True)
def network(request):
    if "faults" in request.keywords:
        pytest.skip("no network")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of a few tests with the lanes `faults`, `rows_a` and `rows_b`."""
    table = 'LANES: dict[str, tuple[str, ...]] = {"faults": (), "rows": ("a", "b")}'
    lanes = re.sub(r"^LANES: .*?^}", table, (_ROOT / "tests/lanes.py").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name, text in {**_PROJECT, "tests/lanes.py": lanes}.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TFREP_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False)


def collected(project: Path, *arguments: str) -> set[str]:
    """Returns the names of the tests that pytest would run."""
    listed = run(["pytest", "--collect-only", "-q", *arguments], project).stdout
    return {line.partition("::test_")[2] for line in listed.splitlines() if "::" in line}


def ci(project: Path, commit: str, *arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Returns the exit code of CI, of each lane what the table says it has done and when it last passed, and the last line."""
    done = run([sys.executable, str(_CI / "lanes.py"), commit, *arguments], project)
    rows = re.findall(r"^(quick, short|faults|rows_a|rows_b)  +(\w+(?: \w+)?)  .*?  (\S+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4, done.stdout + done.stderr
    return done.returncode, {lane: (state, passed) for lane, state, passed in rows}, done.stdout.splitlines()[-1]


def test_the_nearest_mark_counts(project: Path) -> None:
    short = {"plain", "of_its_own", "of_parameters[2]", "of_pairs[1-2]"}
    faults = {"of_the_module", "of_parameters[1]", "of_pairs[3-4]", "of_others[1]"}
    rows_a, rows_b = {"of_others[0]", "of_others[2]"}, {"of_parameters[3]"}
    assert collected(project) == short
    assert collected(project, "-m", "quick") == {"of_its_own"}
    assert collected(project, "-m", "faults") == faults
    assert collected(project, "-m", "rows_a") == rows_a
    assert collected(project, "-m", "rows") == rows_a | rows_b
    everything = short | faults | rows_a | rows_b
    assert collected(project, "-m", "full or not full") == everything
    assert collected(project, "tests/test_faults.py") == everything - {"plain"}


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ('@pytest.mark.lane("flaws")', "is in a lane that tests/lanes.py does not have: flaws"),
        ('@pytest.mark.lane("rows")', "is in a lane that tests/lanes.py does not have: rows"),
        ('@pytest.mark.lane("rows_a")\n@pytest.mark.lane("faults")', "is in several lanes: faults, rows_a"),
        ("@pytest.mark.faulst", "'faulst' not found in `markers` configuration option"),
    ],
)
def test_each_test_is_in_one_lane_that_there_is(project: Path, mark: str, said: str) -> None:
    write(project / "tests/test_marked.py", f"import pytest\n\n{mark}\ndef test_marked(): pass\n")
    done = run(["pytest", "-q"], project)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


def test_contributing_has_the_lanes() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (_ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(LANES)
    sessions = runpy.run_path(str(_ROOT / "noxfile.py"))
    assert set(LANES["versions"]) <= {*sessions, *sessions["VERSIONS"]}


def test_each_lane_but_that_of_nox_has_tests() -> None:
    """A lane without tests could not pass."""
    marked = " ".join(path.read_text("utf-8") for path in (_ROOT / "tests").rglob("test_*.py"))
    for lane in LANES:
        assert lane == "versions" or re.search(rf'lane\(f?"{lane}["_]', marked), lane


def test_each_commit_begins_with_another_lane() -> None:
    in_order = runpy.run_path(str(_CI / "lanes.py"))["in_order"]
    orders = [in_order(parts(), f"{commit:040x}") for commit in range(1000)]
    assert {order[0] for order in orders} == set(parts())
    assert all(sorted(order) == sorted(parts()) for order in orders)
    assert in_order(parts(), "0" * 40) == orders[0]


def test_a_run_passes_and_the_next_has_no_time_for_all(project: Path) -> None:
    code, lanes, last = ci(project, "first")
    assert (code, last) == (0, "11 passed, 0 failed")
    assert lanes == dict.fromkeys(lanes, ("passed", "first"))

    code, lanes, last = ci(project, "second", "--minutes", "5")  # A lane is begun if it can have its 10 minutes.
    assert (code, last) == (0, "4 passed, 0 failed")
    assert lanes.pop("quick, short") == ("passed", "second")
    assert lanes == dict.fromkeys(lanes, ("not reached", "first"))


def test_a_lane_that_fails_fails_the_run(project: Path) -> None:
    write(project / "cache/lanes.json", json.dumps({"rows_b": "before", "rows_a": "now"}))
    write(project / "tests/test_bad.py", "import pytest\n\n@pytest.mark.lane('rows_a')\ndef test_bad(): assert False\n")
    code, lanes, last = ci(project, "now", "--changed")
    assert (code, last) == (1, "9 passed, 1 failed")
    assert lanes["rows_a"] == ("failed", "now")
    assert lanes["rows_b"] == ("passed", "before")  # What differs from the commit is not recorded.

    code, lanes, last = ci(project, "now")
    assert (code, last) == (1, "9 passed, 1 failed")
    assert lanes == {**dict.fromkeys(lanes, ("passed", "now")), "rows_a": ("failed", "unknown")}


@pytest.mark.parametrize("lane", ["short", "faults"])
def test_only_the_short_lane_must_end_in_time(project: Path, lane: str) -> None:
    write(project / "cache/lanes.json", "[broken")
    slow = f"import time, pytest\n\n@pytest.mark.lane('{lane}')\ndef test_slow(): time.sleep(60)\n"
    write(project / "tests/test_slow.py", slow)
    code, lanes, last = ci(project, "now", "--minutes" if lane == "short" else "--lane-minutes", "0.05")
    if lane == "short":
        assert (code, last.partition(", ")[2]) == (1, "1 failed")
        assert lanes == {**dict.fromkeys(lanes, ("not reached", "unknown")), "quick, short": ("timed out", "unknown")}
    else:
        assert (code, last.partition(", ")[2]) == (0, "0 failed")
        assert lanes["faults"] == ("timed out", "unknown")
        assert lanes["quick, short"] == ("passed", "now")


def test_a_release_needs_every_lane(project: Path) -> None:
    """A lane of which each test was skipped has shown nothing. Lanes that have passed on the commit are not run again."""
    file = project / "tests/test_faults.py"
    whole = file.read_text("utf-8")
    write(file, whole + _SKIPS)
    code, lanes, last = ci(project, "now")
    assert (code, last) == (0, "7 passed, 0 failed")
    code, lanes, last = ci(project, "now", "--release")
    assert (code, last) == (1, "4 passed, 1 failed")
    assert lanes.pop("quick, short") == ("passed", "now")
    assert lanes.pop("faults") == ("skipped", "unknown")
    assert lanes == dict.fromkeys(["rows_a", "rows_b"], ("passed before", "now"))

    write(file, whole)
    code, lanes, last = ci(project, "now", "--release")
    assert (code, last) == (0, "8 passed, 0 failed")
    assert lanes["faults"] == ("passed", "now")


def test_a_release_is_a_commit(tmp_path: Path) -> None:
    write(tmp_path / ".ci/run", (_CI / "run").read_text("utf-8"))
    git: list[Any] = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
        assert run([*git, *arguments], tmp_path).returncode == 0
    write(tmp_path / "new.py", "")
    refused = run(["bash", ".ci/run", "--release"], tmp_path)
    assert refused.returncode == 1
    assert "new.py" in refused.stderr
    unknown = run(["bash", ".ci/run", "--relaese"], tmp_path)
    assert (unknown.returncode, unknown.stderr) == (2, "Usage: .ci/run [--release]\n")
