"""How the result of a step that a worker has done is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np


class StepLayout:
    """How the numbers of a step's result are laid out: metrics, counters, logs."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.counters: list[Any] = []
        self.is_numbered = False
        self.log_shapes: dict[str, tuple[int, ...]] = {}
        self.size = 0

    def describe(self, logs: dict[str, Any]) -> None:
        """Notes which logs follow the sums."""
        self.log_shapes = {name: tuple(value.shape) for name, value in logs.items()}
        self.size = sum(int(np.prod(v.shape)) for v in self.metrics + self.counters)

    def read_logs(self, values: np.ndarray) -> dict[str, Any]:
        """Reads the logs of a step from its result."""
        logs, start = {}, self.size
        for name, shape in self.log_shapes.items():
            size = int(np.prod(shape))
            logs[name] = values[start : start + size].reshape(shape) if shape else float(values[start])
            start += size
        return logs

    def split(self, totals: np.ndarray) -> list[np.ndarray]:
        """Cuts the sums into the values of the single variables."""
        values, start = [], 0
        for variable in self.metrics + self.counters:
            size = int(np.prod(variable.shape))
            values.append(totals[start : start + size].reshape(tuple(variable.shape)))
            start += size
        return values
