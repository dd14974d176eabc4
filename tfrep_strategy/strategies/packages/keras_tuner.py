"""KerasTuner on several processes: all ranks run a search together, with the chief's choices and files."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras_tuner.src import utils
from keras_tuner.src.backend import io as files
from keras_tuner.src.engine.base_tuner import BaseTuner
from keras_tuner.src.engine.oracle import Oracle

from tfrep_strategy.core.replacements import Replacement, Replacements, Tested
from tfrep_strategy.errors import TfrepError
from tfrep_strategy.strategies.packages.chief import is_chief, of_chief, refuse_different_ends


def _by_chief(original: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(original)
    def asked(path: str) -> Any:
        return of_chief(lambda: original(path))

    return asked


def _of_chief_only(original: Any) -> Callable[..., None]:
    def made(path: str, remove_existing: bool = False) -> None:
        """Makes a folder on the chief. No rank waits here, since a program may ask for a folder on one rank."""
        if not is_chief():
            return
        if remove_existing and tf.io.gfile.exists(path):
            tf.io.gfile.rmtree(path)
        tf.io.gfile.makedirs(path)

    return made


def _file_of_chief(original: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    def opened(filename: str, mode: str) -> Any:
        if "r" not in mode:
            return original(filename, mode) if is_chief() else io.StringIO()

        def content() -> str:
            with original(filename, mode) as file:
                return file.read()

        return io.StringIO(of_chief(content))

    return opened


def _with_seed_of_chief(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.seed, self._seed_state = of_chief(lambda: (self.seed, self._seed_state))

    return made


def _ended_alike(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def tried(self: Any, trial: Any, *fit_args: Any, **fit_kwargs: Any) -> None:
        original(self, trial, *fit_args, **fit_kwargs)
        last_line = (trial.message or "").strip().rpartition("\n")[2]
        try:
            refuse_different_ends(f"Trial {trial.trial_id}", trial.status, last_line)
        except TfrepError as error:  # On this rank the trial may be over while others are still running it.
            error.add_note(trial.message or "")
            raise

    return tried


# fmt: off
TABLE = Replacements(
    Tested("keras-tuner", "1.4", "1.4"),
    "KerasTuner",
    "A search reads and writes its project by functions of a module, and the user chooses the class of the tuner.",
    (
        Replacement(files, "exists", "(path)", _by_chief, "all ranks find the same project"),
        Replacement(files, "glob", "(path)", _by_chief, "the same"),
        Replacement(files, "rmtree", "(path)", _by_chief, "one rank removes an overwritten project"),
        Replacement(files, "File", "(filename, mode)", _file_of_chief, "one rank writes; all ranks read the same content"),
        Replacement(utils, "create_directory", "(path, remove_existing=False)", _of_chief_only, "one rank makes folders"),
        Replacement(
            Oracle, "__init__",
            "(self, objective=None, max_trials=None, hyperparameters=None, allow_new_entries=True, tune_new_entries=True,"
            " seed=None, max_retries_per_trial=0, max_consecutive_failed_trials=3)",
            _with_seed_of_chief,
            "all ranks choose the same trials",
        ),
        Replacement(
            BaseTuner, "_try_run_and_update_trial", "(self, trial, *fit_args, **fit_kwargs)", _ended_alike,
            "a trial that fails on one rank fails on all",
        ),
    ),
)
# fmt: on
