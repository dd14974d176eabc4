"""The documentation site: `python -m sphinx -W docs build`, with the packages of the extra `docs`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from tfrep_strategy._version import __version__

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

project = "tfrep_strategy"
author = "The tfrep_strategy authors"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"tfrep_strategy {version}"
toc_object_entries_show_parents = "hide"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = html_copy_source = html_show_sourcelink = False

# Notebooks are shown with the outputs that they were committed with.
nb_execution_mode = "off"
myst_heading_anchors = 4

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
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"[\w.]+")


def _link_pages(text: str, links: re.Pattern[str]) -> str:
    """Makes links, which lead to files where the repository is read, lead to the pages of the site."""
    text = re.sub(r"(?<=\]\(/)[A-Z]+\.md", lambda file: _PAGE_OF[file[0]], links.sub("/", text))
    return _LINK_TO_NOTEBOOK.sub(r"{doc}`\1 </notebooks/\2>`", text)  # Their folder is a symbolic link.


def _page_was_read(app: Sphinx, name: str, source: list[str]) -> None:
    if not name.startswith("notebooks/"):
        source[0] = _link_pages(source[0], _LINK_FROM_PAGE)


def _file_was_included(app: Sphinx, path: Path, page: Path, content: list[str]) -> None:
    content[0] = _link_pages(content[0], _LINK_FROM_ROOT)


def _docstring_was_read(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _CODE.sub(_name_or_code, "\n".join(lines)).splitlines()


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
