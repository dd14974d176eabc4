"""The notebook runs from top to bottom, and leaves no process behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

_REPOSITORY = Path(__file__).resolve().parent.parent


def _marked(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TFREP_TEST") == mark]


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TEST", str(tmp_path))  # By which its processes are known.
    paths = [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    notebook = nbformat.read(_REPOSITORY / "notebooks" / "parameter_server.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [cell.outputs[-1].data["text/plain"] for cell in notebook.cells if cell.source.endswith("accuracy")]
    assert 0.8 < float(results[-1]) <= 1.0  # The notebook itself compares it with one device.
    deadline = time.monotonic() + 20
    while _marked(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _marked(str(tmp_path))
