"""How long processes wait for each other."""

from __future__ import annotations

import math
import os

from tfrep_strategy.errors import ConfigurationError, message

_DEFAULT_SECONDS = 600.0


def timeout_seconds() -> float:
    """Returns after how many seconds a collective that not all ranks have called is given up.

    `TFREP_TIMEOUT` sets it, in seconds; the default is 600. Ranks may keep each other waiting for that long, while the
    chief writes a large file, say. A rank that has ended is noticed at once and needs no time limit.

    Raises:
        ConfigurationError: when `TFREP_TIMEOUT` is no positive number.

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
        raise ConfigurationError(message("TFREP_TIMEOUT is no positive number of seconds.", TFREP_TIMEOUT=given))
    return seconds


def is_debugging() -> bool:
    """Returns whether `TFREP_DEBUG` asks for every collective to be checked before it is called.

    Example:
        >>> is_debugging()
        False
    """
    return os.environ.get("TFREP_DEBUG", "0") not in ("", "0")
