"""The page of the command line names every command, and every option with its help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from tfrep_strategy.cli import app

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def commands(command: Any, name: str = "tfrep") -> Iterator[tuple[str, Any]]:
    yield name, command
    for each, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {each}")


def test_all_options_are_listed() -> None:
    sections = _PAGE.read_text("utf-8").split("\n#")
    found = dict(commands(typer.main.get_command(app)))
    assert {"tfrep", "tfrep run", "tfrep horovod install"} <= set(found)
    for name, command in found.items():
        (section,) = [each for each in sections if f"$ {name} [OPTIONS]" in each]
        assert command.help.partition("\n")[0] in section, name
        for parameter in command.params:
            assert parameter.help in section, (name, parameter.name)
            for option in parameter.opts if parameter.param_type_name == "option" else []:
                assert option in section, (name, option)
