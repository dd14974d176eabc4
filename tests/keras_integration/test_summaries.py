"""Ranks that print the summary of a model print it once, as one device does."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import keras


def shown(strategy: Any) -> tuple[str, list[str]]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="small")
    lines: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.summary(line_length=60)
    model.summary(line_length=60, print_fn=lines.append)
    return said.getvalue(), lines


def test_rank_0_prints_a_summary(worker_pool: Any) -> None:
    (first, lines), (second, others) = worker_pool("tf", 2).run(shown)
    assert "Total params" in first
    assert second == ""
    assert lines == others
    assert "Total params" in "".join(lines)
