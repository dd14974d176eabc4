"""Optuna on several processes: all ranks run the same trials, which the chief chooses and stores.

The chief has the user's storage. Other ranks have a copy of it in memory, so reading a study needs no other rank.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

import optuna
from optuna.storages import InMemoryStorage, RDBStorage

from tfrep_strategy.core.replacements import Replacement, Replacements, Tested
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.strategies.packages.chief import is_chief, is_deciding, of_chief, refuse_different_ends

_DECIDE = ("infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial", "prune")


class _OfChief:
    """A sampler or a pruner whose decisions are made on rank 0. Its other attributes are those of the user's object."""

    def __init__(self, own: Any) -> None:
        self._own = own

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._own)

    def __getattr__(self, name: str) -> Any:
        found = getattr(object.__getattribute__(self, "_own"), name)
        return (lambda *args: of_chief(lambda: found(*args))) if name in _DECIDE else found


def _decided_by_chief(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def made(self: Any, study_name: str, storage: Any, sampler: Any = None, pruner: Any = None) -> None:
        original(self, study_name, storage, sampler, pruner)
        self.sampler, self.pruner = _OfChief(self.sampler), _OfChief(self.pruner)

    return made


def _opened_by_chief_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        of_chief(lambda: original(self, *args, **kwargs))
        if not is_chief():  # The tables exist now.
            original(self, *args, **kwargs)

    return made


def _by_chief(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if is_deciding() or isinstance(given.get("storage"), InMemoryStorage | None):
            return original(*args, **kwargs)
        own: list[Any] = []

        def copied() -> tuple[str, InMemoryStorage] | None:
            own.append(stored := original(*args, **kwargs))
            if stored is None:  # The call was a deletion.
                return None
            copy, name = InMemoryStorage(), stored.study_name
            optuna.copy_study(from_study_name=name, from_storage=stored._storage, to_storage=copy)
            return name, copy

        name_and_copy = of_chief(copied)
        return own[0] if own else name_and_copy and optuna.Study(*name_and_copy, given.get("sampler"), given.get("pruner"))

    return made


def _with_one_end(func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an objective that gives all ranks rank 0's value, and raises an error if ranks end differently."""

    def objective(trial: Any) -> Any:
        try:
            value = func(trial)
        except Exception as error:
            refuse_different_ends(f"Trial {trial.number}", type(error).__name__, str(error))
            raise
        refuse_different_ends(f"Trial {trial.number}", "completed")
        return of_chief(lambda: value)

    return objective


def _stopped_by_chief(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def optimize(self: Any, func: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, _with_one_end(func), *args, **kwargs)
        if (n_jobs := call.arguments.get("n_jobs", 1)) != 1:
            text = "Processes that train together take one trial after the other."
            raise ConfigurationError(message(text, hint="leave n_jobs out.", n_jobs=n_jobs))
        timeout = call.arguments.pop("timeout", None)
        end = float("inf") if timeout is None else time.monotonic() + timeout

        def stops(study: Any, trial: Any) -> None:
            if of_chief(lambda: study._stop_flag or time.monotonic() >= end):
                study.stop()

        call.arguments["callbacks"] = [*(call.arguments.get("callbacks") or ()), stops]
        original(*call.args, **call.kwargs)

    return optimize


study = importlib.import_module("optuna.study.study")  # The package has a module and a function of one name.
_also = (optuna, optuna.study)

# fmt: off
TABLE = Replacements(
    Tested("optuna", "5.0", "5.0"),
    "Optuna",
    "Users create studies by functions of Optuna, which create the storage and an unseeded sampler themselves.",
    (
        Replacement(
            optuna.Study, "__init__", "(self, study_name, storage, sampler=None, pruner=None)", _decided_by_chief,
            "all ranks train the trials that rank 0 chooses, and stop early together",
        ),
        Replacement(
            optuna.Study, "optimize", "(self, func, n_trials=None, timeout=None, n_jobs=1, catch=(), callbacks=None,"
            " gc_after_trial=False, show_progress_bar=False)",
            _stopped_by_chief, "rank 0's clock ends a search; a trial that fails on one rank fails on all",
        ),
        Replacement(
            study, "create_study", "(*, storage=None, sampler=None, pruner=None, study_name=None, direction=None,"
            " load_if_exists=False, directions=None)",
            _by_chief, "one rank writes the stored study", _also,
        ),
        Replacement(study, "load_study", "(*, study_name, storage, sampler=None, pruner=None)", _by_chief, "the same", _also),
        Replacement(study, "delete_study", "(*, study_name, storage)", _by_chief, "the same", _also),
        Replacement(
            RDBStorage, "__init__", "(self, url, engine_kwargs=None, skip_compatibility_check=False, *, heartbeat_interval=None,"
            " grace_period=None, heartbeat_stale_trial_callback=None, failed_trial_callback=None, skip_table_creation=False)",
            _opened_by_chief_first, "ranks must not create the tables of a new database at the same time",
        ),
    ),
)
# fmt: on
