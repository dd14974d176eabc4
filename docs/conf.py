"""The documentation site: `python -m sphinx -W docs build`, with the packages of the extra `docs`."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from tfrep_strategy._version import __version__

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

project = "tfrep_strategy"
author = "The tfrep_strategy authors"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"tfrep_strategy {version}"
toc_object_entries_show_parents = "hide"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_show_copyright = html_show_sphinx = html_copy_source = html_show_sourcelink = False

# The address of the repository stands in one place, and may be missing.
_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
_REPOSITORY = _PROJECT.get("urls", {}).get("Repository", "")
_ICON = '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2"><path d="M8 6 2 12l6 6M16 6l6 6-6 6"/></svg>'
html_theme_options: dict[str, Any] = {}
if _REPOSITORY:
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": _REPOSITORY, "html": _ICON, "class": ""}]
if "github.com" in _REPOSITORY:  # Each page has a link to its source.
    html_theme_options |= {"source_repository": _REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

# Notebooks are shown with the outputs that they were committed with.
nb_execution_mode = "off"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # An option is printed with its two dashes.
copybutton_prompt_text = "$ "

# In docstrings, single backquotes hold names and code, as in Markdown.
default_role = "py:obj"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

_PAGE_OF = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK_FROM_PAGE = re.compile(r"(?<=\]\()(?:\.\./)+(?=[A-Z]+\.md)")
_LINK_FROM_ROOT = re.compile(r"(?<=\]\()(?:docs/|(?=[A-Z]+\.md))")
_LINK_TO_NOTEBOOK = re.compile(r"\[([^]]*)\]\((?:\.\./)*notebooks/(\w+)\.ipynb\)")
_NAMED_PAGE = re.compile(r"\[`?docs/[\w/]+\.md`?\](?=\()")
_PAGE_OF_DOCS = re.compile(r"(?:``)?\bdocs/([\w/]+)\.md\b(?:``)?")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"[\w.]+")


def _link_pages(text: str, links: re.Pattern[str]) -> str:
    """Makes links, which lead to files where the repository is read, lead to the pages of the site."""
    text = re.sub(r"(?<=\]\(/)[A-Z]+\.md", lambda file: _PAGE_OF[file[0]], links.sub("/", text))
    text = _NAMED_PAGE.sub("[]", text)  # A link without words is shown with the title of its page.
    return _LINK_TO_NOTEBOOK.sub(r"{doc}`\1 </notebooks/\2>`", text)  # Their folder is a symbolic link.


def _page_was_read(app: Sphinx, name: str, source: list[str]) -> None:
    if not name.startswith("notebooks/"):
        source[0] = _link_pages(source[0], _LINK_FROM_PAGE)


def _file_was_included(app: Sphinx, path: Path, page: Path, content: list[str]) -> None:
    content[0] = _link_pages(content[0], _LINK_FROM_ROOT)


def _docstring_was_read(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _PAGE_OF_DOCS.sub(r":doc:`/\1`", _CODE.sub(_name_or_code, "\n".join(lines))).splitlines()


def _name_or_code(code: re.Match[str]) -> str:
    """Leaves names to Sphinx, which looks for them, and makes literal text of all other code."""
    if not _NAME.fullmatch(code[1]):
        return f"`{code[0]}`"
    return re.sub("`(tfrep)(.+)`", r"`\1\2 <tfrep_strategy\2>`", code[0]) if code[1].startswith("tfrep.") else code[0]


def _keep_files_together(app: Sphinx) -> None:
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(app.doctreedir / "notebooks"))


def setup(app: Sphinx) -> None:
    """Connects this file to Sphinx."""
    app.connect("builder-inited", _keep_files_together)
    app.connect("source-read", _page_was_read)
    app.connect("include-read", _file_was_included)
    app.connect("autodoc-process-docstring", _docstring_was_read, priority=400)  # Before napoleon.
