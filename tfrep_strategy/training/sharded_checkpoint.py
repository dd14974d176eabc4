"""Checkpoints that all ranks write together while training goes on, and the callback that makes them."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.cluster.notices import answer_requests_to_end, end_as_asked
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.keras_integration.finding import driver_of_model
from tfrep_strategy.keras_integration.saving.model_files import is_local
from tfrep_strategy.keras_integration.saving.training_state import (
    OWN_SEED,
    DeclaredCallback,
    build_others,
    make_own_seed,
    variables_of_training,
)
from tfrep_strategy.keras_integration.synchronous.saving import failing_together
from tfrep_strategy.training.checkpoint_files import Index, Write, description, held_by, new_folder, whole_ones
from tfrep_strategy.training.ending import Requests


class CheckpointProgress(NamedTuple):
    """How far training was when a checkpoint was made.

    Attributes:
        epoch: Number of the epoch that comes next, or was interrupted.
        batch: Number of batches of this epoch that were done.
    """

    epoch: int
    batch: int


class ShardedCheckpoint(DeclaredCallback):
    """Saves training in the background: each rank writes the parts that it holds.

    No rank gathers a variable that is sharded (`shard_weights`, `shard_optimizer_state`, layouts of `keras.distribution`). Any
    number of replicas restores the checkpoint, sharded or not. Training waits while values are copied to the memory of the host,
    and for the previous checkpoint if it is still written. A checkpoint is there as a whole or not at all: if a run is killed, the
    previous one stays.

    Give the callback to all ranks, as the last one. All ranks need the same folder, on a shared disk. A checkpoint holds weights,
    optimizers, random seeds, and the states of stateful recurrent layers, but not the state of callbacks and metrics.

    Args:
        folder: The folder of the checkpoints.
        save_freq: "epoch", or a number of batches.
        max_to_keep: The number of checkpoints to keep.
        restore: Whether `fit` continues from the newest checkpoint, if there is one. In the middle of an epoch it continues with
            the next batch. After SIGTERM all ranks then save before the next step, and end with exit code 143.

    Raises:
        ConfigurationError: A setting cannot be used. When training begins: the model is not built, it trains on parameter servers,
            or the checkpoint is of another model.
        OSError: A checkpoint is damaged, or was not written. The latter is raised at the next save, or when training ends.

    Example:
        >>> model = make_model()
        >>> checkpoint = tfrep.callbacks.ShardedCheckpoint("checkpoints", save_freq="epoch", restore=True)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[checkpoint])
        >>> tfrep.callbacks.ShardedCheckpoint.load(model, "checkpoints")
        CheckpointProgress(epoch=2, batch=0)
    """

    looks_at_batches = False
    needs_all_ranks = True

    def __init__(
        self, folder: str | os.PathLike[str], *, save_freq: str | int = "epoch", max_to_keep: int = 2, restore: bool = False
    ) -> None:
        super().__init__()
        if save_freq != "epoch":
            check_count('A checkpoint is made each "epoch", or after a number of batches.', save_freq=save_freq)
        check_count("The newest checkpoint is kept.", max_to_keep=max_to_keep)
        self.folder, self.save_freq, self.max_to_keep = _local(folder), save_freq, max_to_keep
        self.saves_training = restore
        self._epoch = self._done = self._since = 0
        self._saved: CheckpointProgress | None = None
        self._requests: Requests | None = None

    @staticmethod
    def load(model: Any, folder: str | os.PathLike[str]) -> CheckpointProgress:
        """Loads the newest checkpoint. All ranks call it.

        Args:
            model: A model that is built. If it has no optimizer, the weights are loaded alone.
            folder: The folder of the checkpoints.

        Returns:
            How far training was.

        Raises:
            ConfigurationError: The checkpoint is of another model.
            OSError: There is no checkpoint, it is damaged, or a write that was not over has failed. The values of the model are
                unchanged.
        """
        group = _Group(model)
        _settle(group)
        progress = _load_newest(group, model, _local(folder))
        if progress is None:
            hint = "check that the path is right, and that this machine sees it."
            raise FileNotFoundError(message("There is no checkpoint.", hint, folder=os.fspath(folder)))
        return progress

    def on_train_begin(self, logs: Any = None) -> None:
        self._group = _Group(self.model)
        folders = self._group.gather(self.folder)
        if len(set(folders)) > 1:
            hint = "give all ranks the same folder, on a shared disk."
            raise ConfigurationError(message("Ranks save to different folders.", hint, folders=folders))
        _settle(self._group)
        self._epoch = self._done = self._since = 0
        self._saved = self._requests = None
        self.model._initial_epoch = None  # It may belong to an earlier `fit`.
        progress = _load_newest(self._group, self.model, self.folder) if self.saves_training else None
        if progress is not None:
            self.model._initial_epoch = progress.epoch
            if progress.epoch < self.params["epochs"]:
                self._group.resume(progress)
                self._epoch, self._done = progress
        if self.saves_training and self._group.strategy is not None:
            self._requests = Requests(self._group.gather)
            answer_requests_to_end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch != self._epoch:
            self._epoch, self._done = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._requests is not None and self._requests.ask():
            self._save(CheckpointProgress(self._epoch, batch))
            _settle(self._group)
            end_as_asked()
        # The end of the last batch is that of the epoch, so a checkpoint is made where the next batch begins.
        if self.save_freq != "epoch" and self._since >= int(self.save_freq):
            self._save(CheckpointProgress(self._epoch, batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._since += batch + 1 - self._done
        self._done = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Where the data does not tell its length, Keras begins a batch after the last one.
        is_again = self._saved == (epoch, self._done)
        if self.save_freq == "epoch" or self._since >= int(self.save_freq) or is_again:
            self._save(CheckpointProgress(epoch + 1, 0))

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None
        _settle(self._group)

    def _save(self, progress: CheckpointProgress) -> None:
        global _write
        group, self._since, self._saved = self._group, 0, progress
        _settle(group)
        group.merge()
        name = ""
        with group.together():
            if group.rank == 0:
                name = new_folder(self.folder)
        folder = os.path.join(self.folder, group.gather(name)[0])
        variables = [v for of_kind in variables_of_training(self.model).values() for v in of_kind]
        index = description(self.model) | progress._asdict()
        _write = Write(folder, group, held_by(variables, group), index, self.max_to_keep)


# The ranks of a model.


class _Group:
    """The processes that train a model together, or this one alone.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        strategy = getattr(model, "distribute_strategy", None)
        is_ours = driver_of_model(model) is not None
        of_tensorflow = not is_ours and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if of_tensorflow or isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
            hint = "use keras.callbacks.ModelCheckpoint, or a MirroredStrategy or MultiWorkerStrategy of this package."
            raise ConfigurationError(
                message("A checkpoint of all ranks needs a strategy that knows them.", hint, strategy=strategy)
            )
        if not model.built:
            hint = "begin it with keras.Input, or call it on a batch first."
            raise ConfigurationError(message("The model has no weights yet.", hint, model=model.name))
        self.strategy: Any = strategy if is_ours else None
        self.rank, self.size = 0, 1
        if self.strategy is not None:
            local = self.strategy.extended.num_local_replicas
            self.rank, self.size = self.strategy.extended.first_local_replica // local, self.strategy.num_replicas_in_sync // local

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks. All ranks call it."""
        return [value] if self.strategy is None else self.strategy.extended.all_gather_object(value)

    def together(self) -> Any:
        """Returns a context that raises the error of any rank on all."""
        return contextlib.nullcontext() if self.strategy is None else failing_together(self.strategy)

    def scope(self) -> Any:
        """Returns the scope of the strategy."""
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def merge(self) -> None:
        """Makes values that replicas keep for themselves equal on all."""
        if self.strategy is not None:
            self.strategy.extended.synchronize_new_variables()
            self.strategy.extended.merge_replica_state()

    def resume(self, progress: CheckpointProgress) -> None:
        """Has the `fit` that begins pass over the data that was read."""
        if self.strategy is not None:
            self.strategy.extended.resumes_at = tuple(progress)
        elif progress.batch:
            hint = "make the model in the scope of tfrep.MirroredStrategy(), which also serves one device."
            text = "Keras alone cannot continue in the middle of an epoch."
            raise ConfigurationError(message(text, hint, epoch=progress.epoch, batch=progress.batch))


def _local(folder: str | os.PathLike[str]) -> str:
    if not is_local(folder):
        hint = "use a folder of a shared disk."
        raise ConfigurationError(message("Ranks write their parts to files, not to an address.", hint, folder=folder))
    return os.path.abspath(os.fspath(folder))


def _load_newest(group: _Group, model: Any, folder: str) -> CheckpointProgress | None:
    """Loads the newest checkpoint, if there is one. All ranks call it."""
    path = ""
    with group.together():
        if group.rank == 0:
            path = next(reversed(whole_ones(folder)), "")
    path = group.gather(path)[0]
    if not path:
        return None
    optimizer = getattr(model, "optimizer", None)
    with group.together():
        index = Index(path)
    with group.scope():  # All ranks make these variables.
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        build_others(model, index.content["optimizers"])
        if index.content["variables"].get(OWN_SEED):
            make_own_seed()
    group.merge()
    with group.together():
        chosen = index.chosen(model)
        index.check(group.rank, group.size)
    with group.together():  # Nothing is assigned before all ranks have all.
        values = [(variable, index.read(number, variable)) for number, variable in chosen]
    with group.scope():
        for variable, parts in values:
            if getattr(variable.value, "cut", None) is None:
                variable.assign(parts[0])
                continue
            for copy, part in zip(variable.value.values, parts, strict=True):
                with tf.device(copy.device):
                    copy.assign(part)
    return CheckpointProgress(index.content["epoch"], index.content["batch"])


_write: Write | None = None
"""The last write of this process."""


def _settle(group: _Group) -> None:
    """Waits for the last write of all ranks, and raises the error of any on all."""
    global _write
    last, _write = _write, None
    try:
        with group.together():
            if last is not None:
                last.wait_for_part()
    except Exception:
        if last is not None:
            last.give_up()
        raise
    with group.together():
        if last is not None:
            last.wait()
