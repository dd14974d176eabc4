"""The programs and commands of README and of the guides work as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tfrep_strategy.cli import app

pytestmark = pytest.mark.lane("quick")

_REPOSITORY = Path(__file__).resolve().parent.parent
_README = _REPOSITORY / "README.md"
_DOCS = _REPOSITORY / "docs"
_PAGES = [*_REPOSITORY.glob("*.md"), *_REPOSITORY.glob("docs/**/*.md")]
_GUIDES = [_README, _DOCS / "getting_started.md", _DOCS / "callbacks.md", *sorted(_DOCS.glob("guides/*.md"))]

_RUN_ALL = """
import gc, runpy, sys
import tfrep_strategy

tfrep_strategy.use_logical_cpus(2)  # Before a program uses TensorFlow.
for script in sys.argv[1:]:
    print(">>>", script, flush=True)
    runpy.run_path(script, run_name="__main__")
    gc.collect()  # The next page has another strategy.
print(">>> end")
"""


def _blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def _numbers(output: str) -> list[float]:
    """Returns the accuracy and the loss of each epoch, which `fit` has printed."""
    return [float(number) for number in re.findall(r"(?:accuracy|loss): (\d+\.\d+)", output)]


@pytest.mark.lane("package")
def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    """The blocks of a page are one program. All programs run in one process, to import TensorFlow once."""
    pages = sorted(_GUIDES, key=lambda page: (page.parent / page.stem == _DOCS / "guides" / "parameter_server", page != _README))
    assert pages[0] == _README  # It is for one device, before any strategy.
    assert pages[-1].stem == "parameter_server"  # A coordinator stays connected to its cluster.
    scripts = []
    for page in pages:
        assert (blocks := _blocks(page, "python")), page
        scripts.append(tmp_path / f"{page.stem}.py")
        scripts[-1].write_text("\n".join(blocks), "utf-8")
    output = _run(tmp_path, "-c", _RUN_ALL, *map(str, scripts))
    assert output.splitlines()[-1] == ">>> end"
    for written in ("model.keras", "log.csv", "out"):
        assert (tmp_path / written).exists(), written

    one_device, two_replicas = map(_numbers, _blocks(_README, "console"))
    assert len(one_device) == 6
    assert two_replicas == one_device
    assert _numbers(output)[:6] == pytest.approx(one_device, abs=2e-3)
    replicas = _run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "2", str(scripts[0]))
    assert _numbers(replicas) == pytest.approx(_numbers(output)[:6], abs=2e-4)


def _run(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_lines() -> list[str]:
    blocks = "\n".join(block for page in _GUIDES for block in _blocks(page, "bash")).replace("\\\n", " ")
    return sorted(set(re.findall(r"^tfrep run .*?(?=\s*(?:#|$))", blocks, re.MULTILINE)))


@pytest.mark.parametrize("line", _run_lines())
def test_run_lines_parse(line: str) -> None:
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = command.make_context("run", line.split()[2:])
    assert context.params["script"] == "train.py"
    assert context.params["num_replicas"] in (None, 2, 4, 8)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_REPOSITORY).as_posix())
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[#)]", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
