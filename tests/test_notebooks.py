"""The notebooks run from top to bottom in their small setting, and are committed with the outputs of a full run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbformat import v4

pytestmark = pytest.mark.lane("notebooks")

_REPOSITORY = Path(__file__).resolve().parent.parent
_NOTEBOOKS = sorted((_REPOSITORY / "notebooks").glob("*.ipynb"))
_SECONDS = 280.0
"""For a whole notebook. It takes less than a minute on two cores that are free."""
_PUBLISHED = "https://github.com/somebody/a_copy"

each_notebook = pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)


def _code(path: Path) -> tuple[nbformat.NotebookNode, list[Any]]:
    notebook = nbformat.read(path, as_version=4)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def _started_by(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TFREP_TEST") == mark]


@each_notebook
def test_it_runs_and_leaves_no_process(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_NOTEBOOK_SIZE", "small")
    monkeypatch.setenv("TFREP_TEST", str(tmp_path))  # By which its processes are known.
    paths = [str(_REPOSITORY), str(_REPOSITORY / "notebooks"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    notebook, cells = _code(path)
    for cell in cells:
        cell.execution_count, cell.outputs = None, []
    deadline = time.monotonic() + _SECONDS
    left = lambda cell: max(1, int(deadline - time.monotonic()))  # noqa: E731
    NotebookClient(notebook, timeout_func=left, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "SIZE='small'" in cells[0].outputs[-1].text
    assert cells[-1].execution_count == len(cells)  # An assertion that fails would have raised.
    deadline = time.monotonic() + 20
    while _started_by(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _started_by(str(tmp_path))


@pytest.mark.lane("quick")
@each_notebook
def test_as_committed(path: Path) -> None:
    notebook, cells = _code(path)
    first = notebook.cells[0].source
    assert first.startswith("# ")
    assert re.search(r"It takes about \d minutes? on two CPU cores", first)
    assert cells[0].source == _code(_NOTEBOOKS[0])[1][0].source  # All begin alike.
    assert "assert " in cells[-1].source
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "SIZE='full'" in cells[0].outputs[-1].text
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert str(Path.home()) not in path.read_text("utf-8")


@each_notebook
def test_no_throughput_of_replicas_that_share_cores(path: Path) -> None:
    assert not re.search(r"examples_per_second|examples per second|examples/s|EpochClock", path.read_text("utf-8"))


def _badges(path: Path) -> list[tuple[str, str]]:
    text = path.read_text("utf-8")
    return re.findall(r"https://colab\.research\.google\.com/github/(\S+)/blob/main/notebooks/(\w+)\.ipynb", text)


def _repository(path: Path) -> str:
    found = re.match(r'REPOSITORY = "https://github\.com/([\w/-]+)"', _code(path)[1][0].source)
    assert found
    return found[1]


@pytest.mark.lane("quick")
@each_notebook
def test_variable_and_badge_have_the_address_of_the_project(path: Path) -> None:
    """`nox -s address` writes another one into all of them."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    place = project["urls"]["Repository"].removeprefix("https://github.com/")
    assert _repository(path) == place
    assert _badges(path) == [(place, path.stem)]


@pytest.mark.parametrize("beside", [True, False], ids=["a clone", "an address"])
def test_the_first_cell_finds_the_helpers(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_REPOSITORY))  # The package is installed, and the helpers are not.
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (repository / "notebooks").mkdir(parents=True)
    for name in ("helpers.py", "pictures.py"):
        shutil.copy(_REPOSITORY / "notebooks" / name, repository / "notebooks")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "Helpers"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    source = re.sub(r'(?<=REPOSITORY = ")[^"]+', repository.as_uri(), _code(_NOTEBOOKS[0])[1][0].source)
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source), v4.new_code_cell("import helpers\nprint(helpers.__file__)")])
    folder = repository / "notebooks" if beside else elsewhere
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    found = repository if beside else elsewhere / "tfrep_source"
    assert notebook.cells[1].outputs[-1].text.strip() == str(found / "notebooks" / "helpers.py")
