"""State that training resumes from and files of weights lack.

* The state of callbacks.
* The slots of other optimizers of a model, such as those of a GAN. Keras makes them in the first step, which is too late: a backup
  is read before.
* The generators of layers that draw random numbers, Keras's own generator, and the states of recurrent layers with `stateful=True`.
"""

from __future__ import annotations

import copy
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.keras_integration.driver import KerasDriver
from tfrep_strategy.keras_integration.internals import get_global_attribute, global_seed_generator
from tfrep_strategy.keras_integration.saving.model_files import is_local


class DeclaredCallback(keras.callbacks.Callback):
    """Base class of callbacks that declare their needs.

    Attributes:
        looks_at_batches: Whether it needs the logs of each batch, or may stop training at one. Otherwise it adds no cost to a step.
        saves_training: Whether it saves the training itself, so that a run need not back it up.
        needs_all_ranks: Whether it works only where all ranks have it.
    """

    looks_at_batches = True
    saves_training = False
    needs_all_ranks = False


class CsvFiles(KerasDriver):
    """Adds a callback that repairs the files of `CSVLogger`s to each list of callbacks."""

    def init_callbacks(self, original: Any, callback_list: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        """Puts a callback that cuts off an incomplete row before the given callbacks."""
        callbacks = list(keras.tree.flatten(callbacks)) if callbacks else []
        original(callback_list, [*beginning_whole(callbacks), *callbacks], *args, **kwargs)


def beginning_whole(callbacks: Iterable[Any]) -> list[keras.callbacks.Callback]:
    """Makes callbacks to put before others, so that each `CSVLogger` among these continues after a complete row."""
    return [_BeginsWhole(callback) for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def lengths_of(callbacks: Iterable[Any]) -> dict[str, int]:
    """Returns the lengths of the local files of `CSVLogger`s, by their paths, while they are open."""
    return {logger.filename: os.path.getsize(logger.filename) for logger in _with_files(callbacks)}


def cut_to(lengths: Mapping[str, int], callbacks: Iterable[Any]) -> None:
    """Removes rows that were written later from files that are open to be continued.

    Args:
        lengths: From `lengths_of`.
        callbacks: The callbacks of a `fit` that resumes.
    """
    for logger in _with_files(callbacks):
        length = lengths.get(logger.filename)
        if length is not None and length < os.path.getsize(logger.filename):
            os.truncate(logger.filename, length)
            logger.append_header = length == 0


def _with_files(callbacks: Iterable[Any]) -> list[keras.callbacks.CSVLogger]:
    loggers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]
    return [logger for logger in loggers if is_local(logger.filename) and os.path.isfile(logger.filename)]


class _BeginsWhole(keras.callbacks.Callback):
    """Removes an incomplete row, left by a full disk or a kill, from a file that is to be continued."""

    def __init__(self, logger: keras.callbacks.CSVLogger) -> None:
        super().__init__()
        self._logger = logger

    def on_train_begin(self, logs: Any = None) -> None:
        if self._logger.append and _with_files([self._logger]):
            with open(self._logger.filename, "rb+") as file:
                _cut_unfinished_line(file)


def _cut_unfinished_line(file: BinaryIO, block: int = 4096) -> None:
    """Cuts off the text after the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)


ORBAX = (keras.callbacks.OrbaxCheckpoint,) if hasattr(keras.callbacks, "OrbaxCheckpoint") else ()
"""Part of Keras since 3.14."""

CHECKPOINTS: tuple[Any, ...] = (keras.callbacks.ModelCheckpoint, *ORBAX)

OF_KERAS = (
    *CHECKPOINTS,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
"""Keras's callbacks whose decisions depend on their state. The state of others belongs to the process."""

_GROUP = "tfrep_run"
_ARRAY = "numpy array"


def states_of(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Collects the state of callbacks: attributes that are numbers, texts, arrays, and lists and dictionaries of these.

    Args:
        callbacks: The callbacks of a `fit`.

    Returns:
        The attributes, by the class of the callback and its number among those of that class.
    """
    return {
        name: {key: value for key, value in vars(callback).items() if _is_state(callback, key) and _is_plain(value)}
        for name, callback in _named(callbacks)
    }


def restore_states(callbacks: Sequence[Any], states: dict[str, dict[str, Any]]) -> None:
    """Restores the state of callbacks.

    Args:
        callbacks: The callbacks of a `fit`.
        states: From `states_of`.
    """
    for name, callback in _named(callbacks):
        for key, value in states.get(name, {}).items():
            if key in vars(callback):
                setattr(callback, key, copy.deepcopy(value))


def write_beside_weights(weights: io.BytesIO, content: dict[str, Any]) -> None:
    """Adds plain data to a file of weights. Keras can still read it.

    Args:
        weights: The content of a file in Keras's HDF5 format.
        content: Numbers, texts, arrays, and lists and dictionaries of these.
    """
    arrays: list[np.ndarray] = []

    def number_of(array: Any) -> dict[str, int]:
        arrays.append(np.asarray(array))
        return {_ARRAY: len(arrays) - 1}

    text = json.dumps(content, default=number_of)
    with h5py.File(weights, "a") as file:
        group = file.create_group(_GROUP)
        group["content"] = text
        for i, array in enumerate(arrays):
            group[str(i)] = array
            group[str(i)].attrs["dtype"] = array.dtype.name


def read_beside_weights(path: str) -> dict[str, Any] | None:
    """Reads the data of `write_beside_weights`; None if there is none.

    Args:
        path: The path of the file.
    """
    with h5py.File(path, "r") as file:
        if _GROUP not in file:
            return None
        group = file[_GROUP]

        def array_of(found: dict[str, Any]) -> Any:
            if list(found) != [_ARRAY]:
                return found
            data = group[str(found[_ARRAY])]
            array = data[()]
            # HDF5 stores bfloat16 and float8 as bytes.
            if data.dtype.kind == "V" and data.dtype.names is None and "dtype" in data.attrs:
                array = array.view(tf.as_dtype(data.attrs["dtype"]).as_numpy_dtype)
            return array

        return json.loads(group["content"].asstr()[()], object_hook=array_of)


def _named(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns the callbacks that have state, each with a name that is equal in every start of the program."""
    seen: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        kind = type(callback)
        name = f"{kind.__module__}.{kind.__qualname__}"
        seen[name] += 1
        first_of_keras = next(base for base in kind.__mro__ if base.__module__.startswith("keras."))
        if first_of_keras in (keras.callbacks.Callback, *OF_KERAS):
            named.append((f"{name} {seen[name]}", callback))
    return named


def _is_state(callback: Any, key: str) -> bool:
    # Keras's callbacks that compare change the sign of `min_delta` in their first epoch, and would change it again.
    return key not in ("params", "_params") and not (key == "min_delta" and hasattr(callback, "monitor_op"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, np.generic, np.ndarray))


_SEEDS, OWN_SEED, _RECURRENT = "seeds", "seed of Keras", "recurrent states"


def values_beside_files(model: Any) -> dict[str, list[np.ndarray]]:
    """Reads the state; called where sums over replicas can be read.

    Args:
        model: The model.

    Returns:
        The values by kind.
    """
    return {kind: list(map(keras.ops.convert_to_numpy, variables)) for kind, variables in _variables(model).items()}


def assign_beside_files(model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Assigns the state to the model. Every process calls it with equal values, in the scope of the model's strategy.

    Args:
        model: The model, which is built.
        values: From `values_beside_files`.
    """
    if values[OWN_SEED]:
        global_seed_generator()  # Makes the generator, if it was not used yet.
    for kind in values:
        _assign(kind, model, values)


def assign_recurrent_states(model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Assigns the states of recurrent layers. Every process calls it with equal values.

    Args:
        model: The model, which is built.
        values: From `values_beside_files`.
    """
    _assign(_RECURRENT, model, values)


def _assign(kind: str, model: Any, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    for variable, value in zip(_variables(model)[kind], values[kind], strict=False):  # A layer may make its variables later.
        variable.assign(value)


def _variables(model: Any) -> dict[str, list[Any]]:
    in_files = {id(variable) for variable in model.weights + model.metrics_variables}
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    generator = get_global_attribute("global_seed_generator")
    return {
        _SEEDS: [variable for variable in model.variables if id(variable) not in in_files],
        OWN_SEED: [] if generator is None else [generator.state],
        _RECURRENT: [state for layer in layers for state in keras.tree.flatten(getattr(layer, "states", None) or [])],
    }


def variables_of_training(model: Any) -> dict[str, list[Any]]:
    """Returns the Keras variables that training resumes from, by kind and each once.

    Args:
        model: The model, which is built.
    """
    compiled = getattr(model, "optimizer", None)
    optimizers = [*([] if compiled is None else [compiled]), *other_optimizers(model).values()]
    kinds = {"weights": model.weights, "optimizers": [v for each in optimizers for v in each.variables]} | _variables(model)
    seen = set[int]()
    found: dict[str, list[Any]] = {}
    for kind, variables in kinds.items():
        found[kind] = [v for v in variables if not (id(v) in seen or seen.add(id(v)))]  # type: ignore[func-returns-value]
    return found


def make_own_seed() -> None:
    """Makes Keras's own generator of seeds, if it was not used yet."""
    global_seed_generator()


Places = dict[str, list[int]]
"""For each optimizer, by its place in the model, the indices of the weights that it updates."""


def other_optimizers(model: Any) -> dict[str, Any]:
    """Returns the optimizers beside the compiled one, by their places in the model."""
    found: dict[str, Any] = {}
    seen = {id(model.optimizer)}
    for number, layer in enumerate(model._flatten_layers()):
        for name, value in vars(layer).items():
            for place, optimizer in _optimizers_in(value):
                if id(optimizer) not in seen:
                    seen.add(id(optimizer))
                    found[f"{number}.{name}{place}"] = optimizer
    return found


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yields a Keras optimizer, and those inside it (`LossScaleOptimizer`, `MultiOptimizer`)."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        yield optimizer
        for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
            yield from with_inner(inner)


def places_of(model: Any) -> Places:
    """Describes the built optimizers in a form that JSON can hold."""
    numbers = {id(weight): number for number, weight in enumerate(model.weights)}
    built = {place: each for place, each in other_optimizers(model).items() if each.built}
    updated = {place: [numbers.get(id(weight)) for weight in _updated(each)] for place, each in built.items()}
    return {place: found for place, found in updated.items() if None not in found}  # type: ignore[misc]


def build_others(model: Any, places: Places) -> None:
    """Builds the unbuilt optimizers as they were described, in the scope of their strategy."""
    weights = model.weights
    for place, optimizer in other_optimizers(model).items():
        numbers = places.get(place, [])
        if numbers and not optimizer.built and max(numbers) < len(weights):
            optimizer.build([weights[number] for number in numbers])


def _updated(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def _optimizers_in(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _optimizers_in(each, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _optimizers_in(each, f"{place}.{number}")
