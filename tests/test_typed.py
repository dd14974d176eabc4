"""The types that users see: a program of theirs passes `mypy --strict`, and public names have signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tfrep_strategy as tfrep

_PROGRAM = Path(__file__).parent / "scripts" / "typed_program.py"


def _checked(program: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--config-file=", f"--cache-dir={folder}"]
    return subprocess.run([*command, program], capture_output=True, text=True, timeout=250, check=False, cwd=folder).stdout


@pytest.mark.lane("package")
def test_a_program_passes_a_strict_checker(tmp_path: Path) -> None:
    assert "no issues" in _checked(_PROGRAM, tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(_PROGRAM.read_text("utf-8") + "tfrep.MirroredStrategy(bucket_bytes='large')\ntfrep.is_chief(2)\n", "utf-8")
    told = _checked(wrong, tmp_path)
    assert 'Argument "bucket_bytes"' in told
    assert 'Too many arguments for "is_chief"' in told


@pytest.mark.lane("quick")
def test_all_public_functions_have_types() -> None:
    for name in tfrep.__all__:
        found = getattr(tfrep, name)
        if callable(found) and not isinstance(found, type):
            signature = inspect.signature(found)
            untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            assert not untyped, name
            assert signature.return_annotation is not signature.empty, name
