"""Each error of this package says what the user can do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfrep_strategy
from tfrep_strategy import errors

_PACKAGE = Path(tfrep_strategy.__file__).parent
_KINDS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.TfrepError)}
_OF_ANOTHER = ("{error}", "{failure}", "{description}", "{type(error).__name__}: {error}")
"""A text that quotes another error leaves the hint to that one."""


def _raised(tree: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls that make errors whose text is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name) and node.func.id in _KINDS:
            text = node.args[0]
            is_message = isinstance(text, ast.Call) and getattr(text.func, "id", "").startswith("message")
            if is_message or isinstance(text, (ast.Constant, ast.JoinedStr)):
                yield node


def _has_hint(call: ast.Call) -> bool:
    text = call.args[0]
    if isinstance(text, ast.Call):
        return len(text.args) > 1 or any(keyword.arg == "hint" for keyword in text.keywords)
    written = ast.unparse(text)
    return "Hint: " in written or any(each in written for each in _OF_ANOTHER)


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(_PACKAGE).as_posix() for path in _PACKAGE.rglob("*.py")}))
def test_errors_have_hints(folder: str) -> None:
    without = [
        f"{path.name}:{call.lineno}"
        for path in (_PACKAGE / folder).glob("*.py")
        for call in _raised(ast.parse(path.read_text("utf-8")))
        if not _has_hint(call)
    ]
    assert without == []


def test_an_error_without_a_hint_is_found() -> None:
    texts = ['message("No.", rank=1)', '"No."', 'f"No {rank}."', 'message("No.", hint="go.")', 'f"No: {error}"', "text"]
    found = [_has_hint(call) for call in _raised(ast.parse("\n".join(f"PeerError({text})" for text in texts)))]
    assert found == [False, False, False, True, True]


def test_warnings_name_the_line_of_the_users_program() -> None:
    paths = [path for path in _PACKAGE.rglob("*.py") if "warnings.warn(" in path.read_text("utf-8")]
    assert [path.name for path in paths] == ["tables.py"]
