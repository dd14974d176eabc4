"""Evaluation of checkpoints in a separate process, while the training that writes them continues."""

from __future__ import annotations

import contextlib
import os
import re
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message
from tfrep_strategy.keras_integration.copied_models import copy_state
from tfrep_strategy.keras_integration.dataset_creator import DatasetCreator

_SUFFIXES = (".weights.h5", ".keras")


class SidecarEvaluator:
    """Waits for checkpoints, and evaluates each new one.

    The training writes them with `keras.callbacks.ModelCheckpoint(..., "ckpt-{epoch}.weights.h5", save_weights_only=True)`,
    or as whole models (`.keras`). If several are new, the latest is evaluated. A file whose name has a number is evaluated
    once. A file without a number is evaluated each time that it was written again. The evaluator stops after the checkpoint
    with number `max_evaluations`, or after that many evaluations if the names have no number. The number is the last
    integer of the name: 5 in "run2-05-0.31.keras".

    Args:
        model: A compiled model of the same architecture, made outside any strategy.
        data: The data: a `tf.data.Dataset`, a `tfrep.DatasetCreator`, arrays, or a tuple (x, y).
        checkpoint_dir: Folder of the checkpoints. It may not exist yet.
        steps: Batches for each evaluation; None for all of the data.
        max_evaluations: The number of the last checkpoint, or of evaluations; None for no limit.
        callbacks: Callbacks for `model.evaluate`, such as `keras.callbacks.TensorBoard`.
        poll_seconds: Seconds between two looks for a new checkpoint.
        timeout: Seconds to wait for a new checkpoint before stopping; None for no limit.

    Raises:
        ConfigurationError: The model is not compiled, or a setting cannot be used.

    Example:
        >>> model = make_model()
        >>> model.save_weights("ckpt-1.weights.h5")
        >>> evaluator = tfrep.SidecarEvaluator(model, (x, y), ".", max_evaluations=1, poll_seconds=0.01)
        >>> history = evaluator.start()
        ckpt-1.weights.h5: loss: ...
        >>> history["checkpoint"]
        [1]
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        poll_seconds: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        if not getattr(model, "compiled", False):
            raise ConfigurationError(message("The model is not compiled.", hint="call model.compile.", model=model.name))
        for name, count in (("steps", steps), ("max_evaluations", max_evaluations)):
            if count is not None:
                check_count(f"{name} must be an integer, at least 1.", **{name: count})
        check_seconds(poll_seconds=poll_seconds)
        if timeout is not None:
            check_seconds(timeout=timeout)
        self.model = model
        self.data = data
        self.checkpoint_dir = Path(checkpoint_dir)
        self.steps = steps
        self.max_evaluations = max_evaluations
        self.callbacks = list(callbacks or ())
        self.poll_seconds = poll_seconds
        self.timeout = timeout
        self._evaluated: set[Any] = set()
        self.history: dict[str, list[float]] = {}
        """The values of each metric, by name. `checkpoint` holds the numbers of the checkpoints."""

    def start(self) -> dict[str, list[float]]:
        """Evaluates checkpoints as they appear, until a limit is reached.

        Returns:
            The history.
        """
        evaluations = 0
        for path, written in self._new_checkpoints():
            if not self._load(path):
                continue
            number = _number(path.name)
            self._evaluated.add(path.name if number is not None else (path.name, written))
            evaluations += 1
            logs = self._evaluate()
            self.history.setdefault("checkpoint", []).append(evaluations if number is None else number)
            for name, value in logs.items():
                self.history.setdefault(name, []).append(value)
            shown = " - ".join(f"{metric}: {_shown(value)}" for metric, value in logs.items())
            print(f"{path.name}: {shown}", flush=True)
            if self.max_evaluations is not None and max(number or 0, evaluations) >= self.max_evaluations:
                break
        return self.history

    def _new_checkpoints(self) -> Iterator[tuple[Path, int]]:
        """Yields each new checkpoint, and the time when it was written."""
        tried: tuple[Path, int] | None = None
        last: tuple[Path, int] | None = None
        last_new = time.monotonic()
        while True:
            newest = self._newest()
            is_new = newest is not None and newest != tried and not {newest[0].name, (newest[0].name, newest[1])} & self._evaluated
            # A file that is still being written changes between two looks.
            if newest is not None and is_new and newest == last:
                tried, last_new = newest, time.monotonic()
                yield newest
            elif not is_new and self.timeout is not None and time.monotonic() - last_new > self.timeout:
                return
            else:
                last = newest
                time.sleep(self.poll_seconds)

    def _newest(self) -> tuple[Path, int] | None:
        found = []
        if self.checkpoint_dir.is_dir():
            for path in self.checkpoint_dir.iterdir():
                if path.name.endswith(_SUFFIXES) and not path.name.startswith("."):
                    # The training may have replaced or removed the file meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        found.append((path, path.stat().st_mtime_ns))
        return max(found, key=lambda each: (each[1], _natural_order(each[0].name)), default=None)

    def _load(self, path: Path) -> bool:
        """Loads a checkpoint; returns whether it was complete. A file that is still being written is tried again."""
        for _ in range(5):
            try:
                if path.name.endswith(".keras"):
                    # The table of contents is written last; without it the file is not a zip file.
                    if not zipfile.is_zipfile(path):
                        raise OSError(f"{path} is not complete.")
                    if copy_state(keras.models.load_model(path, compile=False), self.model):
                        self.model.test_function = None
                else:
                    self.model.load_weights(path)
                return True
            except (OSError, zipfile.BadZipFile):
                time.sleep(self.poll_seconds)
        return False

    def _evaluate(self) -> dict[str, float]:
        data = self.data
        x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        if isinstance(x, DatasetCreator):
            x = x()
        return self.model.evaluate(x, y, steps=self.steps, callbacks=self.callbacks, return_dict=True, verbose=0)


def _number(name: str) -> int | None:
    """Returns the number in a checkpoint's name: the last integer before the suffix."""
    stem = name.removesuffix(".weights.h5").removesuffix(".keras")
    numbers = re.findall(r"\d+", re.sub(r"\d+\.\d+", "", stem))
    return int(numbers[-1]) if numbers else None


def _natural_order(name: str) -> list[Any]:
    """Returns a sort key that orders numbers in names by their values."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _shown(value: Any) -> str:
    return np.array2string(value, precision=4) if np.ndim(value) else f"{value:.4f}"
