"""What is sent for Python objects: a byte for a byte, and a digest only where all ranks have the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import tensorflow as tf

from tfrep_strategy.communicators.ring import RingCommunicator

DIGEST_BYTES = 24
_groups = itertools.count(2**30 + 910)


class Counting(RingCommunicator):
    """Counts the bytes that this member has to send."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[tuple[str, int]] = []

    def _run(self, operation: Any, kind: str, tensor: tf.Tensor, *args: Any, **options: Any) -> tf.Tensor:
        times = {"all_gather": self.size - 1, "all_reduce": 2 * (self.size - 1) / self.size}[kind]
        self.sent.append((kind, round(times * int(tf.size(tensor)) * tensor.dtype.size)))
        return super()._run(operation, kind, tensor, *args, **options)


def together(size: int, call: Callable[[Counting], Any]) -> list[tuple[Any, list[tuple[str, int]]]]:
    """Calls a function for each member of a group, in a thread; returns what it returned, and what the member sent."""
    key = next(_groups)
    members = [Counting(rank, size, f"CPU:{rank}", key, f"objects{key}/") for rank in range(size)]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = call(members[rank])

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [(result, member.sent) for result, member in zip(results, members, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_objects_that_are_alike_are_not_sent(size: int) -> None:
    value = {"large": bytes(100_000), "settings": (1, None, "a")}
    for found, sent in together(size, lambda c: c.all_gather_object(value)):
        assert found == [value] * size
        assert found[0] is not found[1]
        assert sent == [("all_gather", (size - 1) * DIGEST_BYTES)]


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [([0, 1], "all_gather"), ([70_000, 0], "all_gather"), ([9, 7, 8], "all_gather"), ([4, 0, 90_000], "all_reduce")],
)
def test_objects_of_any_length(lengths: list[int], kind: str) -> None:
    size = len(lengths)
    values = [bytes(range(256)) * (length // 256 + 1) for length in lengths]
    values = [value[:length] for value, length in zip(values, lengths, strict=True)]
    total = sum(len(cloudpickle.dumps(value)) for value in values)
    for found, sent in together(size, lambda c: c.all_gather_object(values[c.rank])):
        assert found == values
        (digest, _), (found_kind, sent_bytes) = sent
        assert (digest, found_kind) == ("all_gather", kind)
        assert sent_bytes <= 2 * (size - 1) / size * (total + 4 * size) + 1


@pytest.mark.parametrize("size", [2, 3])
def test_an_object_of_one_rank_is_broadcast(size: int) -> None:
    value = {"words": ["a"] * 10, "bytes": b"123"}
    length = len(cloudpickle.dumps(value))
    for root in range(size):
        for found, sent in together(size, lambda c, r=root: c.broadcast_object(value if c.rank == r else object(), r)):
            assert found == value
            assert [kind for kind, _ in sent] == ["all_reduce", "all_reduce"]
            assert sum(each for _, each in sent) <= 2 * (size - 1) / size * (length + 4 + 8) + 1
