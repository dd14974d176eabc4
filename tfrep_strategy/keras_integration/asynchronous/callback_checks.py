"""Under a parameter-server strategy steps end in no order, and away from here: callbacks of single batches are refused."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.internals import is_default
from tfrep_strategy.keras_integration.shared.callback_states import CHECKPOINTS
from tfrep_strategy.keras_integration.shared.old_objects import refuse_old_callbacks

_SAVE: Any = (*CHECKPOINTS, keras.callbacks.BackupAndRestore)

_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def check_callbacks(phase: str, method: Any, model: Any, args: Any, kwargs: Any) -> bool:
    """Refuses, before the first step, callbacks that expect to see each batch.

    Args:
        phase: "train", "test" or "predict".
        method: Keras's `fit`, `evaluate` or `predict`.
        model: The model.
        args: What the method was given.
        kwargs: What it was given by name.

    Returns:
        Whether somebody looks at the logs while an epoch runs.

    Raises:
        ConfigurationError: for a callback that does.
    """
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    refuse_old_callbacks(given.get("callbacks"))
    callbacks, shows_bar = given.get("callbacks"), given.get("verbose", "auto") != 0
    if isinstance(callbacks, keras.callbacks.CallbackList):  # Whose bar is one of them.
        callbacks, shows_bar = callbacks.callbacks, False
    watched = shows_bar
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        hooks = [name for name in _HOOKS[phase] if not is_default(getattr(callback, name))]
        watched |= bool(hooks) and getattr(callback, "verbose", 1) != 0
        if hooks and not _accepts_remote_logs(callback):
            raise ConfigurationError(
                message(
                    f"{type(callback).__name__} looks at single batches ({', '.join(hooks)}), which end on the"
                    " workers, in no order.",
                    hint="use on_epoch_end (save_freq or update_freq 'epoch'), or set"
                    " `supports_remote_logs = True` on the callback: its batch hooks are then called when a step"
                    " is handed out, with the logs of the steps that are done.",
                    callback=callback,
                )
            )
    return watched


def _accepts_remote_logs(callback: Any) -> bool:
    if isinstance(callback, _SAVE):
        return callback.save_freq == "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq == "epoch"
    known = (keras.callbacks.ProgbarLogger, keras.callbacks.TerminateOnNaN, keras.callbacks.SwapEMAWeights)
    return isinstance(callback, known) or bool(getattr(callback, "supports_remote_logs", False))
