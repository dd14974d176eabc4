"""Under a parameter-server strategy steps end in no order, and away from here: callbacks of single batches are refused."""

from __future__ import annotations

from typing import Any

import keras

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.parameter_server import server_strategy_of
from tfrep_strategy.keras_integration.patching import keras_internal, replaces

_is_default = keras_internal("utils.python_utils", "is_default")

_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def _accepts_remote_logs(callback: Any) -> bool:
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return callback.save_freq == "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq == "epoch"
    known = (keras.callbacks.ProgbarLogger, keras.callbacks.TerminateOnNaN, keras.callbacks.SwapEMAWeights)
    return isinstance(callback, known) or bool(getattr(callback, "supports_remote_logs", False))


def _refuses(kind: str) -> None:
    @replaces(keras.callbacks.CallbackList, f"on_{kind}_begin")
    def on_begin(original: Any, self: Any, logs: Any = None) -> None:
        """Refuses, before the first step, callbacks that expect to see each batch."""
        if self.model is not None and server_strategy_of(self.model) is not None:
            function = getattr(self.model, f"{kind}_function", None)
            watched = False
            for callback in self.callbacks:
                hooks = [name for name in _HOOKS[kind] if not _is_default(getattr(callback, name))]
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
            if function is not None:
                function.is_watched = watched
        original(self, logs)


for _kind in _HOOKS:
    _refuses(_kind)
