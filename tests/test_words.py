"""Texts keep to the words of `docs/glossary.md`: some words and turns of phrase are not used, since each has a plainer one."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfrep_strategy

pytestmark = pytest.mark.lane("quick")

_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGE = Path(tfrep_strategy.__file__).parent

BANNED = {
    r"nobody": "no process, no user, or a passive sentence",
    r"strangers?": "an unauthenticated client",
    r"whoever": "any process that, anyone who",
    r"what(?: \w+){0,4} brings?": "the thing itself: the packages of the extra",
    r"of (?:its|one's) own": "its own file, a separate process",
    r"common memory": "shared memory",
    r"(?:that|those) of which": "a second sentence",
}
"""Patterns of what is not written, and what is written instead."""

_PATTERNS = {re.compile(rf"\b{each}\b", re.IGNORECASE): instead for each, instead in BANNED.items()}


def _found(text: str) -> list[str]:
    """Returns what should be written otherwise, with what to write."""
    text = re.sub(r"\s+", " ", text)
    return [f"{match[0]!r}: write {instead}" for pattern, instead in _PATTERNS.items() for match in pattern.finditer(text)]


def _prose(page: str) -> str:
    """Returns a page of Markdown without its code."""
    return re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the strings and the comments of a module, with their lines."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"^ *//.*", "", node.value, flags=re.MULTILINE)  # C++, by which a build is known.
    begin, block = 0, ""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                begin, block = begin or token.start[0], f"{block} {token.string[1:]}"
            elif block and token.type != tokenize.NL:
                yield begin, block
                begin, block = 0, ""


_PAGES = [_REPOSITORY / "README.md", _REPOSITORY / "CONTRIBUTING.md", *sorted((_REPOSITORY / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_REPOSITORY).as_posix())
def test_pages(page: Path) -> None:
    assert _found(_prose(page.read_text("utf-8"))) == []


def test_the_newest_changes() -> None:
    _, newest, *_ = re.split(r"^## ", (_REPOSITORY / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    assert _found(_prose(newest)) == []


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(_PACKAGE).as_posix() for path in _PACKAGE.rglob("*.py")}))
def test_docstrings_messages_and_comments(folder: str) -> None:
    found = [(path.name, line, _found(text)) for path in (_PACKAGE / folder).glob("*.py") for line, text in _texts(path)]
    assert [each for each in found if each[2]] == []


def test_each_banned_word_is_found() -> None:
    text = "Nobody knows a stranger. Whoever takes what it\nbrings has a file of its own in common memory, that of which we tell."
    assert len(_found(text)) == len(BANNED)
    assert _found("It is its own file: `test_nobody_else_is_named`.") == []
