"""Systems on which the package cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tfrep_strategy._platform import refuse_other_systems

_WITHOUT = Path(__file__).resolve().parent / "scripts" / "other_system.py"
_SENTENCE = (
    f"tfrep_strategy needs Linux, and Python on {sys.platform} has no fcntl, resource, os.register_at_fork, signal.SIGKILL: "
    "on Windows, use WSL2."
)


def _run(*command: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, _WITHOUT, *command], capture_output=True, text=True, timeout=60, check=False)


def test_an_import_says_in_one_sentence_what_to_use(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import tfrep_strategy\n", "utf-8")
    done = _run(script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {_SENTENCE}"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "train.py"], ["doctor"]])
def test_the_command_says_the_sentence_alone(arguments: list[str]) -> None:
    done = _run(Path(sys.executable).parent / "tfrep", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", _SENTENCE + "\n")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", ["fcntl", "resource", "os.register_at_fork", "signal.SIGKILL"])
def test_each_part_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, attribute = name.partition(".")
    if attribute:
        monkeypatch.delattr({"os": os, "signal": signal}[owner], attribute)
    else:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f" has no {name}: on Windows, use WSL2"):
        refuse_other_systems()


@pytest.mark.lane("quick")
def test_this_system_is_not_refused() -> None:
    refuse_other_systems()
