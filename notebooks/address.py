"""Puts the address of the repository into the notebooks: `python notebooks/address.py https://github.com/OWNER/tfrep_strategy`.

The first code cell of a notebook has it, and the badge that opens the notebook in Colab is built from it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat

_VARIABLE = re.compile(r'(?<=^REPOSITORY = ")[^"]*')
_BADGE = re.compile(r"\[!\[Open in Colab]\(colab\.svg\)]\([^)]*\)")


def badge(repository: str, name: str) -> str:
    """Returns the Markdown of the badge that opens a notebook in Colab.

    Args:
        repository: Its address on GitHub.
        name: The name of the notebook, without its ending.
    """
    place = repository.removesuffix("/").removesuffix(".git").removeprefix("https://github.com/")
    address = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab](colab.svg)]({address})"


def address_of(notebook: nbformat.NotebookNode) -> str:
    """Returns the address that the first code cell of a notebook has."""
    (found,) = [found[0] for cell in notebook.cells if cell.cell_type == "code" and (found := _VARIABLE.search(cell.source))]
    return found


def put(repository: str, path: Path) -> None:
    """Writes an address, and the badge for it, into a notebook."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = _VARIABLE.sub(lambda _: repository, cell.source)
        else:
            cell.source = _BADGE.sub(lambda _: badge(repository, path.stem), cell.source)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for each in sorted(Path(__file__).parent.glob("*.ipynb")):
        put(sys.argv[1], each)
