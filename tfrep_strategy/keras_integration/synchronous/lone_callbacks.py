"""Callbacks that one process runs by itself: a `ModelCheckpoint` under `if rank == 0:`, a tracker of experiments."""

from __future__ import annotations

import contextlib
import random
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfrep_strategy._tensorflow import random_state, set_random_state
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.internals import is_default
from tfrep_strategy.keras_integration.protocol import KerasStrategy
from tfrep_strategy.keras_integration.synchronous.assigned_values import before_changes
from tfrep_strategy.keras_integration.synchronous.saving import is_coordinated

_CHANGE_TRAINING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)

_TRACKERS = ("mlflow", "wandb")
"""Packages whose callbacks report to a server of their own. One report is enough."""


class Given(NamedTuple):
    """What a process tells the others of a callback that it was given.

    Attributes:
        kind: Module and name of its class.
        changes_training: Whether weights or the learning rate depend on it.
        tracks: Whether it reports to a tracker of experiments.
        settings: Its numbers, texts and functions, which tell it from others of its class.
    """

    kind: str
    changes_training: bool
    tracks: bool = False
    settings: str = ""

    @classmethod
    def of(cls, callback: Any) -> Given:
        """Describes a callback."""
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        restores = isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        tracks = any(base.__module__.partition(".")[0] in _TRACKERS for base in type(callback).__mro__)
        settings = repr([(name, _described(value)) for name, value in sorted(vars(callback).items())])
        return cls(kind, restores or isinstance(callback, _CHANGE_TRAINING), tracks, settings)


def _described(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__module__, value.__qualname__, value.__code__.co_firstlineno
    return value if isinstance(value, (bool, int, float, str)) else type(value).__qualname__


def find_lone(ranks: Sequence[Sequence[Given]]) -> dict[Given, list[int]]:
    """Finds callbacks that a process runs by itself: not every process was given them, or one report of theirs is enough.

    Args:
        ranks: The callbacks of each rank.

    Returns:
        Those of which some rank has fewer than another, and trackers; and the ranks that have the most of their kind. Callbacks
        of one kind need no equal settings, as long as all ranks have as many: a path may hold the rank.

    Raises:
        ConfigurationError: for one that changes how the model trains: it would not stay one model.
    """
    counts = [Counter(rank) for rank in ranks]
    of_all = {given for given in counts[0] if len({count[given] for count in counts}) == 1}
    kinds = [Counter(given.kind for given in rank if given not in of_all) for rank in ranks]
    found = {}
    for given in {given: None for rank in ranks for given in rank}:
        of_ranks = [count[given.kind] for count in kinds]
        is_alike = given in of_all or len(set(of_ranks)) == 1
        if is_alike and not (given.tracks and len(ranks) > 1):
            continue
        found[given] = [rank for rank, count in enumerate(of_ranks) if count == max(of_ranks)]
        if given.changes_training:
            raise ConfigurationError(
                message(
                    f"Only some ranks were given a {given.kind.rpartition('.')[2]}, which changes how the model trains.",
                    hint="give it to all ranks; what it writes is written once all the same.",
                    ranks_with_it=found[given],
                )
            )
    return found


class LoneCallback(keras.callbacks.Callback):
    """Runs a callback of this process without asking the others, which do not run it.

    The random numbers that it draws from Python, NumPy and TensorFlow are its own, so that all ranks go on drawing alike. It must
    not change the learning rate, weights, or the optimizer's state.

    Args:
        callback: The callback.
        strategy: Whose state it reads as this process has it; it was merged before.
    """

    def __init__(self, callback: Any, strategy: KerasStrategy) -> None:
        super().__init__()
        self.callback, self._strategy = callback, strategy

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_default(getattr(self.callback, hook)):
            return  # It does nothing. To look at the learning rate would wait for the step.
        before = _learning_rate(self.model)
        changes: dict[int, tuple[Any, Any]] = {}
        with (
            self._strategy.extended.acting_alone(), is_coordinated.to(True), _own_random_numbers(), before_changes.to(changes)
        ):  # fmt: skip
            getattr(self.callback, hook)(*args, **kwargs)
        if repr(rate := _learning_rate(self.model)) != repr(before):  # A rate that is no number equals itself here.
            raise ConfigurationError(
                message(
                    f"A {type(self.callback).__name__} that not all ranks were given has changed the learning rate.",
                    hint="give it to all ranks; what it writes is written once all the same.",
                    hook=hook,
                    before=before,
                    learning_rate=rate,
                )
            )
        if changed := _changed(self.model, changes):
            raise ConfigurationError(
                message(
                    f"A {type(self.callback).__name__} that not all ranks were given has changed the model or its optimizer.",
                    hint="give it to all ranks; what it writes is written once all the same.",
                    hook=hook,
                    variables=changed,
                )
            )

    return forward


def _changed(model: Any, before: Mapping[int, tuple[Any, Any]]) -> list[str]:
    """Returns the paths of variables that have other values now, if the training goes on with them."""
    optimizer = getattr(model, "optimizer", None)
    variables = {id(each._value): each.path for each in [*model.variables, *getattr(optimizer, "variables", ())]} if before else {}
    return [
        variables[each]
        for each, (variable, value) in before.items()
        if each in variables and not np.array_equal(variable.numpy(), value, equal_nan=True)
    ]


def _learning_rate(model: Any) -> float | None:
    """Returns the learning rate, if a callback may set it: a schedule sets it by the number of steps."""
    optimizer = getattr(model, "optimizer", None)
    found = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return float(keras.ops.convert_to_numpy(found)) if isinstance(found, keras.Variable) else None


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    of_python, of_numpy, (seed, of_tensorflow) = random.getstate(), np.random.get_state(), random_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if seed is not None:
            set_random_state(seed, of_tensorflow)


for _hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(LoneCallback, _hook, _forwarding(_hook))
