"""The private names of Keras that this room uses but does not replace. They are looked up at import."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from tfrep_strategy.core.replacements import private

_BEFORE = {
    "backend.tensorflow.ops.core": "backend.tensorflow.core",
    "backend.tensorflow.ops.nn": "backend.tensorflow.nn",
    "backend.tensorflow.ops.numpy": "backend.tensorflow.numpy",
    "backend.tensorflow.trainer:Trainer": "backend.tensorflow.trainer:TensorFlowTrainer",
    "trainers.trainer:BaseTrainer": "trainers.trainer:Trainer",
}
"""Places before Keras 3.16, by the places that all other code of this room uses."""

misfits: list[str] = []
"""Names that this Keras lacks."""


@functools.cache
def place(target: str) -> str:
    """Returns the place of a name in this Keras.

    Args:
        target: `module` or `module:name` below `keras.src`, as in Keras 3.16. `name` may be `Class.method`.

    Returns:
        The target, or its place before Keras 3.16. If this Keras has neither, the target.

    Example:
        >>> place("trainers.trainer:BaseTrainer.compile")
        'trainers.trainer:Trainer.compile'
        >>> place("losses.loss:Loss")
        'losses.loss:Loss'
    """
    for today, before in _BEFORE.items():
        if re.match(rf"{re.escape(today)}\b", target) and not _is_there(today) and _is_there(before):
            return before + target.removeprefix(today)
    return target


def _is_there(target: str) -> bool:
    module, _, name = target.partition(":")
    try:
        found = importlib.import_module(f"keras.src.{module}")
    except ImportError:
        return False
    return not name or hasattr(found, name)


def _private(module: str, name: str = "") -> Any:
    found, _, path = place(f"{module}:{name}" if name else module).partition(":")
    return private(f"keras.src.{found}", path, misfits=misfits)


# State of a thread, and attributes of tensors that layers and losses set.
global_state = _private("backend.common.global_state")
_private("backend.common.global_state", "GLOBAL_STATE_TRACKER")
get_global_attribute = _private("backend.common.global_state", "get_global_attribute")
masking = _private("backend.common.masking")
get_keras_mask = _private("backend.common.masking", "get_keras_mask")
StatelessScope = _private("backend.common.stateless_scope", "StatelessScope")
in_stateless_scope = _private("backend.common.stateless_scope", "in_stateless_scope")
global_seed_generator = _private("random.seed_generator", "global_seed_generator")
get_random_seed = _private("utils.rng_utils", "get_random_seed")

# Parts of models.
Variable = _private("backend.tensorflow.ops.core", "Variable")
BaseOptimizer = _private("optimizers.base_optimizer", "BaseOptimizer")

# Loops and their data.
tensorflow_trainer = _private("backend.tensorflow.trainer")
TensorFlowTrainer = _private("backend.tensorflow.trainer", "Trainer")
TFEpochIterator = _private("backend.tensorflow.trainer", "TFEpochIterator")
concat = _private("backend.tensorflow.trainer", "concat")
convert_to_np_if_not_ragged = _private("backend.tensorflow.trainer", "convert_to_np_if_not_ragged")
data_adapters = _private("trainers.data_adapters")
array_data_adapter = _private("trainers.data_adapters.array_data_adapter")
DataAdapter = _private("trainers.data_adapters.data_adapter", "DataAdapter")
TFDatasetAdapter = _private("trainers.data_adapters.tf_dataset_adapter", "TFDatasetAdapter")
make_class_weight_map_fn = _private("trainers.data_adapters.tf_dataset_adapter", "make_class_weight_map_fn")
is_default = _private("utils.python_utils", "is_default")
pythonify_logs = _private("utils.python_utils", "pythonify_logs")

# Files.
keras_config = _private("backend.config")
model_metadata = _private("legacy.saving.saving_utils", "model_metadata")
H5IOStore = _private("saving.saving_lib", "H5IOStore")
save_state = _private("saving.saving_lib", "_save_state")
file_utils = _private("utils.file_utils")
is_remote_path = _private("utils.file_utils", "is_remote_path")
ask_to_proceed_with_overwrite = _private("utils.io_utils", "ask_to_proceed_with_overwrite")
