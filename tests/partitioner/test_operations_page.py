"""docs/operations.md tells of each type of operation what the rules say."""

from __future__ import annotations

import pytest
import tensorflow as tf
from partitioner.operations_page import rows_of_page, says

from tfrep_strategy.partitioner.planner import ON_PURPOSE, RULES

pytestmark = pytest.mark.lane("quick")

_HINT = "python tests/partitioner/operations_page.py writes the page anew"


def test_the_page_is_current() -> None:
    page = {type_: does for type_, (_, does) in rows_of_page().items()}
    assert page == {type_: says(type_) for type_ in page}, _HINT


def test_every_rule_is_on_the_page() -> None:
    assert {type_ for type_ in {**RULES, **ON_PURPOSE} if hasattr(tf.raw_ops, type_)} <= rows_of_page().keys(), _HINT


def test_keras_emits_nothing_without_a_rule_or_a_reason() -> None:
    assert [type_ for type_, (_, does) in rows_of_page().items() if does == "no rule"] == []
