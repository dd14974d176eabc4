"""The share of each room's statements that the quick tests run, at the end of a run with `--rooms`.

Only the quick tests are measured, in their own process: the others start processes, and would take a third more of their time.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfrep_strategy

_PACKAGE = Path(tfrep_strategy.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rooms", action="store_true", help="show the coverage of each room by the quick tests")


def measure_if_wanted(config: pytest.Config) -> None:
    """Registers what measures, if it is asked for."""
    if config.getoption("--rooms"):
        config.pluginmanager.register(_Measured())


class _Measured:
    def __init__(self) -> None:
        from coverage import Coverage

        self._coverage = Coverage(data_file=None, source=[str(_PACKAGE)], messages=False)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if "quick" not in item.keywords:
            yield
            return
        self._coverage.start()
        yield
        self._coverage.stop()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        statements, run = collections.Counter[str](), collections.Counter[str]()
        for file in _PACKAGE.rglob("*.py"):
            room = file.relative_to(_PACKAGE).parts[0]
            room = room if (_PACKAGE / room).is_dir() else "(root)"
            _, lines, _, missing, _ = self._coverage.analysis2(str(file))
            in_functions = set(lines) & _lines_of_functions(file)
            statements[room] += len(in_functions)
            run[room] += len(in_functions - set(missing))
        terminalreporter.section("statements of functions that quick tests run")
        for room, number in sorted(statements.items()):
            terminalreporter.write_line(f"{room:20} {run[room]:6} of {number:6}  {run[room] / max(number, 1):4.0%}")


def _lines_of_functions(file: Path) -> set[int]:
    """Returns the lines inside of functions. Others have run before, when the package was imported."""
    functions = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)}
