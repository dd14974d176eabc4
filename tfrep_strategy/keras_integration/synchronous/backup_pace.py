"""When a backup of a run is due, and the thread that writes backups."""

from __future__ import annotations

import math
import time
from typing import Any

from tfrep_strategy.keras_integration.shared.background import BackgroundWrites
from tfrep_strategy.limits import backup_seconds

_SHARE_OF_TIME = 0.02
_SECONDS_BETWEEN_LOOKS = 1.0
_BYTES_PER_SECOND, _LEAST_COST = 300e6, 0.1
"""For how long training is taken to wait for a first backup, before one was made."""

writes = BackgroundWrites()
"""Of all `fit`s of this process."""


class Pace:
    """Decides when a backup is due: so that all take a fiftieth of the time, or after the seconds that the user has set.

    Args:
        model: The model.
    """

    last_saved = time.monotonic()
    """Of all `fit`s: a program may call it many times."""

    def __init__(self, model: Any) -> None:
        size = sum(variable.value.dtype.size * variable.value.shape.num_elements() for variable in model.variables)
        self._cost = _LEAST_COST + 3 * size / _BYTES_PER_SECOND  # Weights, and two slots of an optimizer.
        self._looked = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether it is time. Without the user's wish, training never waits for the disk."""
        seconds = backup_seconds()
        if seconds is None:
            seconds = math.inf if writes.is_writing else self._cost / _SHARE_OF_TIME
        return time.monotonic() - Pace.last_saved >= seconds

    def steps_until_next(self, steps_done: int) -> int:
        """Returns after how many steps to look again, given how many were done since the last look."""
        if backup_seconds() == 0:
            return 1
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        # The first steps are slow, since they are traced; so the number grows by degrees.
        return min(max(1, round(_SECONDS_BETWEEN_LOOKS * steps_done / max(seconds, 1e-6))), 10 * steps_done + 1)

    def note_cost(self, seconds: float) -> None:
        """Hears for how long training has waited for a backup."""
        self._cost = seconds
        self._looked = Pace.last_saved = time.monotonic()
