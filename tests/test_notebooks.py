"""The notebooks run from top to bottom in their small setting, and are committed with the outputs of a full run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.lane("notebooks")

_REPOSITORY = Path(__file__).resolve().parent.parent
_NOTEBOOKS = sorted((_REPOSITORY / "notebooks").glob("*.ipynb"))
_SECONDS = 280.0
"""For a whole notebook. It takes about a minute on two cores that are free."""

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
    assert notebook.cells[0].source.startswith("# ")
    assert cells[0].source == _code(_NOTEBOOKS[0])[1][0].source  # All begin alike.
    assert "assert " in cells[-1].source
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "SIZE='full'" in cells[0].outputs[-1].text
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert str(Path.home()) not in path.read_text("utf-8")
