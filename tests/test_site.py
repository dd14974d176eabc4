"""The documentation site builds without a warning, and holds what it should."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("quick")

_REPOSITORY = Path(__file__).resolve().parent.parent
_DOCS = _REPOSITORY / "docs"
_README = _REPOSITORY / "README.md"
_LINES_OF_A_SCREEN = 25
_USER_PAGES = (
    "index.md", "getting_started.md", "choose_a_strategy.md", "guarantees.md", "glossary.md", "guides/*.md", "callbacks.md",
    "recipes.md", "recipes/*.md", "checkpoints.md", "performance.md", "troubleshooting.md", "debugging.md", "gpus.md",
    "security.md", "support.md", "migration/*.md", "notebooks.md",
)  # fmt: skip
"""Pages of those who use the package. The others are the reference, and pages of those who work on it."""
_SOUGHT = {"Out of memory": "troubleshooting", "Checkpoints and resuming": "checkpoints"}
"""Headings that a search for their words shows first (`docs/scorer.js`), and their pages."""


class _Page(HTMLParser):
    """The ids and links of a page, and what a browser fetches to show it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if values.get("href"):
            (self.links if tag == "a" else self.fetched).append(values["href"] or "")
        if values.get("src"):
            self.fetched.append(values["src"] or "")


@pytest.mark.lane("notebooks")
def test_pages(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="needs the extra docs")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(_DOCS), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"site"}

    pages = {path: _Page(path) for path in site.rglob("*.html")}
    wrong = [(path.name, link) for path, page in pages.items() for link in page.links if not _leads_to(path, link, pages)]
    assert not wrong
    elsewhere = [(path.name, url) for path, page in pages.items() for url in page.fetched if not _leads_to(path, url, {})]
    assert not elsewhere  # The site works without a network.

    for page, code in (("cli", "--hosts"), ("checkpoints", "--max-restarts")):
        text = (site / f"{page}.html").read_text("utf-8")
        assert code in text
        assert "\u2013" not in text, "an option with a dash of print cannot be pasted"
        assert "copybutton.js" in text
    with_paths = {path.stem for path in pages if re.search(r"[^/\w]docs/\w+\.md", path.read_text("utf-8"))}
    assert with_paths <= {"benchmarks", "contributing"}, "only these are for readers who have the repository"

    documented = pages[site / "api.html"].ids
    assert {f"tfrep_strategy.{name}" for name in tfrep.__all__ if name != "__version__"} <= documented
    index = (site / "searchindex.js").read_text("utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    for heading, page in _SOUGHT.items():
        assert [found["docnames"][number] for number, _ in found["alltitles"][heading]] == [page]
    for source in [*_DOCS.rglob("*.md"), *(_REPOSITORY / "notebooks").glob("*.ipynb")]:
        name = source.relative_to(_DOCS if source.suffix == ".md" else _REPOSITORY).with_suffix("").as_posix()
        assert f'"{name}"' in index


def _leads_to(path: Path, link: str, pages: dict[Path, _Page]) -> bool:
    """Returns whether a link of a page leads to a page and a place in it, to a file, or, if that is allowed, elsewhere."""
    if link.startswith("data:"):
        return True
    if re.match(r"[a-z]+:", link):
        return bool(pages)
    file, place = urldefrag(unquote(re.sub(r"\?[^#]*", "", link)))
    target = (path.parent / file).resolve() if file else path
    if target in pages and place:
        return place in pages[target].ids
    return target.is_file()


def test_first_screens_have_both_commands() -> None:
    screens = ["\n".join(path.read_text("utf-8").splitlines()[:_LINES_OF_A_SCREEN]) for path in (_README, _DOCS / "index.md")]
    first, second = (re.findall(r"^pip install .*$", screen, re.MULTILINE) for screen in screens)
    assert first == second
    assert [command.rpartition("&& ")[2] for command in first] == ["tfrep demo", "pytest"]


def test_first_page_says_first_what_readme_says_first() -> None:
    beginnings = [path.read_text("utf-8").splitlines()[:3] for path in (_README, _DOCS / "index.md")]
    assert beginnings[0] == beginnings[1]


# Pages that users read are short, and tell nothing of tests.


def _user_pages() -> list[Path]:
    return sorted({path for pattern in _USER_PAGES for path in _DOCS.glob(pattern)})


def _code(page: str) -> list[str]:
    return re.findall(r"^```(?:python|bash|console|ya?ml|dockerfile)\n(.*?)^```", page, re.DOTALL | re.MULTILINE | re.IGNORECASE)


def test_readme_is_short() -> None:
    assert len(_README.read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("path", _user_pages(), ids=lambda path: path.relative_to(_DOCS).as_posix())
def test_user_pages_are_short(path: Path) -> None:
    """Files to copy are not prose: words in blocks of code do not count."""
    page = path.read_text("utf-8")
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 800
    assert not re.findall(r"\btest_\w+|\bpytest -m.*", prose)
    assert [line for block in _code(page) for line in block.splitlines() if len(line) > 80] == []


def test_programs_of_user_pages_are_narrow() -> None:
    programs = sorted(_DOCS.glob("migration/programs/*.py"))
    assert len(programs) > 10
    assert {path.name: line for path in programs for line in path.read_text("utf-8").splitlines() if len(line) > 80} == {}


# The sidebar: few entries, with short titles.


def _entries(page: Path) -> list[str]:
    """Returns the lines of the lists of pages on a page: `title <page>`, or `page`."""
    lists = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [line for each in lists for line in each.splitlines() if re.fullmatch(r"[^:]+", line)]


def test_sidebar_has_few_entries() -> None:
    entries = _entries(_DOCS / "index.md")
    assert 15 < len(entries) <= 25
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("page", sorted(_DOCS.rglob("*.md")), ids=lambda path: path.relative_to(_DOCS).as_posix())
def test_titles_are_short(page: Path) -> None:
    titles = re.findall(r"\A# (.*)", page.read_text("utf-8"))
    titles += [entry.partition(" <")[0] for entry in _entries(page) if " <" in entry]
    for title in titles:
        assert len(title.split()) <= 5, title
        assert not re.match(r"(What|Who|Which|Whether|How|Why|My)\b|.*[:,]", title), title


# The whole site.


@pytest.mark.parametrize("script", sorted((_DOCS / "figures").glob("*.py")), ids=lambda path: path.stem)
def test_figures_are_as_drawn(script: Path) -> None:
    assert script.with_suffix(".svg").read_text("utf-8") == runpy.run_path(str(script))["drawing"]()
