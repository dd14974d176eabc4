"""The documentation site builds without a warning, and holds what it should."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import tfrep_strategy as tfrep

_REPOSITORY = Path(__file__).resolve().parent.parent
_DOCS = _REPOSITORY / "docs"


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

    documented = pages[site / "api.html"].ids
    assert {f"tfrep_strategy.{name}" for name in tfrep.__all__ if name != "__version__"} <= documented
    index = (site / "searchindex.js").read_text("utf-8")
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


def test_first_page_has_the_commands_of_readme() -> None:
    commands = [re.findall(r"^pip install .*$", path.read_text("utf-8"), re.MULTILINE) for path in _first_pages()]
    assert len(commands[0]) == 2
    assert commands[0] == commands[1]


def test_first_page_says_first_what_readme_says_first() -> None:
    beginnings = [path.read_text("utf-8").splitlines()[:3] for path in _first_pages()]
    assert beginnings[0] == beginnings[1]


def _first_pages() -> list[Path]:
    return [_REPOSITORY / "README.md", _DOCS / "index.md"]


@pytest.mark.parametrize("script", sorted((_DOCS / "figures").glob("*.py")), ids=lambda path: path.stem)
def test_figures_are_as_drawn(script: Path) -> None:
    assert script.with_suffix(".svg").read_text("utf-8") == runpy.run_path(str(script))["drawing"]()
