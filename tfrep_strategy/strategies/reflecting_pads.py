"""Pads that reflect what they pad (`tf.pad(x, widths, "REFLECT")`), on the part of a replica without rows: TensorFlow has none."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.finding import driver_in_scope
from tfrep_strategy.keras_integration.synchronous.empty_parts import EmptyParts


def of_no_rows_too(mirror_pad: Any) -> Any:
    """Returns a pad that takes no rows, too."""

    @functools.wraps(mirror_pad)
    def pad(input: Any, paddings: Any, mode: str, name: str | None = None) -> Any:
        driver, widths = driver_in_scope(), tf.get_static_value(paddings)
        if not isinstance(driver, EmptyParts) or widths is None or not len(widths) or any(widths[0]):
            return mirror_pad(input, paddings, mode, name)
        return driver.on_rows(lambda rows: mirror_pad(rows, paddings, mode, name), input)

    return pad
