"""What is loaded when: nothing of TensorFlow by an import, or by a command that only tells how to use it."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tfrep_strategy as tfrep

HEAVY = {"tensorflow", "keras", "numpy", "horovod", "matplotlib", "h5py"}
NAMES = """
import json, sys
import tfrep_strategy as tfrep
found = {"dir": dir(tfrep), "version": tfrep.__version__}
found |= {"unknown": hasattr(tfrep, "unknown"), "private": hasattr(tfrep, "_unknown")}
from tfrep_strategy import Environment, launch, register_environment
import tfrep_strategy.running.runs
found |= {"callable": callable(tfrep.launch), "room": tfrep.environments.__name__, "modules": list(sys.modules)}
print(json.dumps(found))
"""
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from tfrep_strategy.cli import app
for command in json.loads(sys.argv[1]):
    assert CliRunner().invoke(app, command.split()).exit_code == 0, command
print(json.dumps({"modules": list(sys.modules)}))
"""


def _said(program: str, *arguments: str) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environ["PYTHONPATH"] = str(Path(tfrep.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert not HEAVY & {name.partition(".")[0] for name in said["modules"]}
    return said


def test_an_import_loads_nothing_of_tensorflow():
    said = _said(NAMES)
    assert set(said["dir"]) >= set(tfrep.__all__)
    assert said["version"] == tfrep.__version__
    assert not said["unknown"]
    assert not said["private"]
    assert said["callable"]
    assert said["room"] == "tfrep_strategy.cluster.environments"


def test_help_loads_nothing_of_tensorflow():
    commands = ["--help", "--version", "run --help", "doctor --help", "demo --help", "horovod --help", "horovod install --help"]
    _said(COMMANDS, json.dumps(commands))


def test_type_checkers_and_python_find_a_name_in_the_same_module():
    tree = ast.parse(Path(tfrep.__file__).read_text("utf-8"))
    (switch,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in switch.body if isinstance(node, ast.ImportFrom)]
    declared = {a.name: node.module for node in imports for a in node.names if not a.asname}  # What has one is a module.
    (table,) = (node for statement in switch.orelse for node in ast.walk(statement) if isinstance(node, ast.Dict))
    loaded = {name: f"tfrep_strategy.{module}" for module, names in ast.literal_eval(table).items() for name in names}
    assert loaded == declared
    assert sorted([*declared, "__version__"]) == tfrep.__all__


def test_names_are_what_they_were():
    from tfrep_strategy.strategies.mirrored import MirroredStrategy

    star: dict[str, object] = {}
    exec("from tfrep_strategy import *", star)
    assert set(tfrep.__all__) - {"__version__"} <= set(star)
    assert star["MirroredStrategy"] is tfrep.MirroredStrategy is MirroredStrategy
    assert pickle.loads(pickle.dumps(tfrep.MirroredStrategy)) is MirroredStrategy
    assert tfrep.launch is sys.modules["tfrep_strategy.running.function"].launch
    assert tfrep.collectives is sys.modules["tfrep_strategy.training.collectives"]


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'tfrep_strategy' has no attribute 'MirorredStrategy'"):
        _ = tfrep.MirorredStrategy  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'unknown' from 'tfrep_strategy'"):
        exec("from tfrep_strategy import unknown")
