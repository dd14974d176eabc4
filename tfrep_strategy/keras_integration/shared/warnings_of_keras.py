"""Warnings of Keras, which counts frames to blame the right line: frames of this package do not count."""

from __future__ import annotations

import sys
import warnings
from typing import Any


class WarningsOfKeras:
    """The module `warnings`, as modules of Keras see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    @staticmethod
    def warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **kwargs: Any) -> None:
        """Does what `warnings.warn` does, as if no function of Keras had been replaced."""
        frame: Any = sys._getframe(1)
        level = 1
        while frame is not None and stacklevel > 0:
            level += 1
            stacklevel -= frame.f_globals.get("__name__", "").partition(".")[0] != "tfrep_strategy"
            frame = frame.f_back
        warnings.warn(message, category, level, source, **kwargs)
