"""The examples in the package's docstrings, and a program that runs them: `python tests/docstrings.py RESULTS NAME...`.

All run in one process with two logical CPUs, each in an empty folder. Every example can use `tf`, `keras`, `np`, `tfrep`, some
modules of Python, the arrays `x` and `y`, and `make_model()`, which compiles a small model.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted((_REPOSITORY / "tfrep_strategy").rglob("*.py"))
STARTS_PROCESSES = {
    "ForkServer", "ParameterServerStrategy", "exit_on_server_loss", "launch", "local_cluster", "results", "run_coordinator",
    "run_demo", "run_script",
}  # fmt: skip
"""The examples that start processes with TensorFlow; they take seconds each."""


def examples() -> dict[str, doctest.DocTest]:
    """Returns the examples of each docstring that has some, by the full name of the function or class."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(_REPOSITORY).with_suffix("").parts
        module = ".".join(parts if parts[-1] != "__init__" else parts[:-1])
        for name, text, line in _docstrings(ast.parse(path.read_text("utf-8")), module):
            test = doctest.DocTestParser().get_doctest(text, {"__name__": module}, name, str(path), line)
            if test.examples:
                found[name] = test
    return found


def _docstrings(node: Any, name: str) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}"
            yield inner, ast.get_docstring(child, clean=False) or "", child.lineno
            yield from _docstrings(child, inner)


def _usual_names() -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfrep_strategy as tfrep

    def make_model() -> keras.Model:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    names = {"tf": tf, "keras": keras, "np": np, "tfrep": tfrep, "make_model": make_model}
    names |= {"contextlib": contextlib, "itertools": itertools, "math": math, "os": os, "sys": sys, "Path": Path}
    return names | {"x": np.ones([8, 2], "float32"), "y": np.ones([8, 1], "float32")}


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Runs the body in an empty folder, and undoes its changes of variables, arguments and the search path."""
    before, arguments, search_path = dict(os.environ), list(sys.argv), list(sys.path)
    folder = os.getcwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(before)
            sys.argv[:], sys.path[:] = arguments, search_path


def main(results: str, *names: str) -> None:
    """Runs examples, and writes what differs from the docstrings to a JSON file, by name."""
    import tfrep_strategy as tfrep

    tfrep.use_logical_cpus(2)
    usual, tests, differences = _usual_names(), examples(), {}
    for name in names:
        test, said = tests[name], []
        test.globs = vars(importlib.import_module(test.globs["__name__"])) | usual
        with _restored():
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(test, out=said.append)
        differences[name] = "".join(said)
    Path(results).write_text(json.dumps(differences), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
