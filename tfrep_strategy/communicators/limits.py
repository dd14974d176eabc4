"""Settings from the environment: how long processes wait for each other, and whether every call is checked."""

from __future__ import annotations

import math
import os

from tfrep_strategy.errors import ConfigurationError, message

_DEFAULT_SECONDS = 600.0


def timeout_seconds() -> float:
    """Returns how many seconds a collective may wait for ranks that have not called it.

    `TFREP_TIMEOUT` sets it, in seconds; the default is 600. A rank may keep the others waiting for that long, for example
    while the chief writes a large file. A rank that has ended is noticed at once, without this limit.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` is not a positive number.

    Example:
        >>> timeout_seconds()
        600.0
    """
    given = os.environ.get("TFREP_TIMEOUT", "")
    try:
        seconds = float(given) if given else _DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            message(
                "TFREP_TIMEOUT is not a positive number of seconds.",
                hint="set it to a number such as 600, or unset it.",
                TFREP_TIMEOUT=given,
            )
        )
    return seconds


def is_debugging() -> bool:
    """Returns whether `TFREP_DEBUG` is set, so that every collective is checked before it runs.

    Example:
        >>> is_debugging()
        False
    """
    return os.environ.get("TFREP_DEBUG", "0") not in ("", "0")
