"""Expecting an error by what it says for programs: its class, its code, the settings that it received, and its hint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tfrep_strategy.errors import CODES, ConfigurationError, code_of, shown


@contextlib.contextmanager
def refuses(
    kind: type[BaseException] | tuple[type[BaseException], ...] = ConfigurationError,
    code: str | None = None,
    *,
    hint: str = "",
    told: Sequence[str] = (),
    **received: Any,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects an error.

    Args:
        kind: Its class.
        code: Its code; None: it has none.
        hint: A part of what it says to do.
        told: What else it has to name, in this order, such as calls, ranks or files.
        **received: The settings that it names, with their values; `...` is any value.

    Yields:
        What `pytest.raises` gives.
    """
    assert code is None or code in CODES
    assert code or hint or told or received, "any error of this class would do"
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert code_of(text) == code, text
    what, *advice = re.split(r"\n *Hint: ", text)
    assert hint in " ".join(advice), text
    place = 0
    for each in told:
        place = text.find(each, place) + len(each)
        assert place >= len(each), f"{each!r} is not told, or too early, in: {text}"
    settings = what.rpartition("Received: ")[2]
    for name, value in received.items():
        written = f"{name}=" if value is ... else f"{name}={shown(value)}"
        assert re.search(rf"(^|, ){re.escape(written)}", settings), f"{written} is not in: {text}"
