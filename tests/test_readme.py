"""What README shows works, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tfrep_strategy.cli import app

_REPOSITORY = Path(__file__).resolve().parent.parent
_README = (_REPOSITORY / "README.md").read_text("utf-8")


def test_python_blocks_run_in_order(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", _README, re.DOTALL))
    script = tmp_path / "readme.py"
    script.write_text(code + '\nprint("all of README ran")\n', "utf-8")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all of README ran"
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("line", re.findall(r"^tfrep run .*?(?=\s*(?:#|$))", _README, re.MULTILINE))
def test_run_lines_parse(line):
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = command.make_context("run", line.split()[2:])
    assert context.params["script"] == "train.py"
    assert context.params["num_replicas"] in (2, 8)


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", _README):
        assert (_REPOSITORY / target).exists(), target
