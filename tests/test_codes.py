"""Codes of errors: each is explained in `docs/troubleshooting.md`, and some error has it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import tensorflow as tf

import tfrep_strategy
from tfrep_strategy.errors import CODES, ConfigurationError, DesyncError, code_of, message

pytestmark = pytest.mark.lane("quick")

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
_MOST = 25
"""More than a page can explain."""


def test_the_page_on_troubleshooting_explains_each_code() -> None:
    page = re.sub(r"\s+", " ", _PAGE.read_text("utf-8"))
    explained = dict(re.findall(r"\* `(TFREP-E\d{3})`: (.*?)(?= \* `TFREP| ##|$)", page))
    assert sorted(explained) == sorted(CODES)
    for code, what in CODES.items():
        assert explained[code].startswith(what.rstrip(".")), code
        assert len(explained[code]) > len(what) + 20, f"{code}: the page does not say what to do"
    assert len(CODES) <= _MOST


def test_each_code_belongs_to_an_error() -> None:
    paths = [path for path in Path(tfrep_strategy.__file__).parent.rglob("*.py") if path.name != "errors.py"]
    assert {code for path in paths for code in re.findall(r'"(TFREP-E\d{3})"', path.read_text("utf-8"))} == set(CODES)


def test_an_error_keeps_its_code() -> None:
    error = ConfigurationError(message("There is no device.", "use another.", code="TFREP-E010", device="GPU:7"))
    assert str(error) == "There is no device. Received: device='GPU:7'\nHint: use another. [TFREP-E010]"
    assert error.code == pickle.loads(pickle.dumps(error)).code == code_of(str(error)) == "TFREP-E010"
    assert ConfigurationError("Without a code.").code is None

    @tf.function
    def step() -> None:
        raise DesyncError(message("It differs.", "look.", code="TFREP-E022"))

    with pytest.raises(DesyncError) as caught:
        step()  # AutoGraph makes another error of it.
    assert caught.value.code == "TFREP-E022"
