"""`tf.train.Checkpoint` on several processes: one writes, and the others write nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

FLOATS = 2_000_000


def _written() -> int:
    """Returns how many bytes this process has passed to `write` so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def save(strategy: Any, folder: str, own_path: bool) -> dict[str, Any]:
    kinds = tf.VariableAggregation
    with strategy.scope():
        weights = tf.Variable(tf.range(FLOATS, dtype=tf.float32))
        own = {
            kind.name: tf.Variable(5.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=kind)
            for kind in (kinds.SUM, kinds.MEAN, kinds.ONLY_FIRST_REPLICA)
        }
        untouched = tf.Variable(7.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=kinds.SUM)

    def step() -> None:
        for variable in own.values():
            variable.assign_add(float(strategy.rank + 1))

    strategy.run(step)
    strategy.extended.mark_state_changed()
    checkpoint = tf.train.Checkpoint(weights=weights, untouched=untouched, **own)
    path = os.path.join(folder, f"of_{strategy.rank}" if own_path else "shared")
    before = _written()
    path = checkpoint.save(path)
    written = _written() - before
    again = [checkpoint.save(path) for _ in range(2)][-1]
    read = {name: float(variable.read_value()) for name, variable in own.items()}
    return {"path": path, "again": again, "written": written, "read": read}


def restored(path: str) -> dict[str, Any]:
    plain = {name: tf.Variable(0.0) for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "untouched")}
    weights = tf.Variable(tf.zeros([FLOATS]))
    tf.train.Checkpoint(weights=weights, **plain).read(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(weights, np.arange(FLOATS, dtype=np.float32))
    return {name: float(variable) for name, variable in plain.items()}


@pytest.mark.parametrize("own_path", [False, True], ids=["one path", "a path each"])
def test_who_writes_how_much(own_path: bool, worker_pool: Any, tmp_path: Path) -> None:
    first, second = worker_pool("tf", 2).run(save, str(tmp_path), own_path)
    assert (first["path"] != second["path"]) == own_path
    assert first["written"] > 4 * FLOATS
    assert second["written"] > 4 * FLOATS if own_path else second["written"] < 100_000
    # 5 is the sum; then 1 is added on the one rank, 2 on the other.
    expected = {"SUM": 8.0, "MEAN": 6.5, "ONLY_FIRST_REPLICA": 6.0}
    for rank in (first, second):
        assert rank["read"] == expected
        for path in (rank["path"], rank["again"]):
            assert restored(path) == expected | {"untouched": 7.0}
    assert not list(Path(tmp_path).rglob("*temp*"))


def test_files_are_on_the_disk_before_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager names a checkpoint, and deletes the one before."""
    synchronized: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synchronized.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted)
    with tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), str(tmp_path), max_to_keep=1)
    named: list[set[str]] = []
    options = tf.train.CheckpointOptions(experimental_write_callbacks=[lambda: named.append(set(synchronized))])
    path = manager.save(options=options)
    assert named == [{str(tmp_path), f"{path}.data-00000-of-00001", f"{path}.index"}]
    assert tf.train.latest_checkpoint(tmp_path) == path
