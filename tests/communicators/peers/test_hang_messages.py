"""The messages that tell where ranks are: each fits its schema, however much a rank has to say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tfrep_strategy.cluster.flight_recorder import MOST_LINES, Collective, Hang, Whereabouts
from tfrep_strategy.cluster.rendezvous.channel import LONGEST, UnreadableError, write
from tfrep_strategy.communicators.peers.reports import TO_HUB, TO_RANKS

pytestmark = pytest.mark.lane("quick")

CALL = Collective(
    "0-1", 7, f"all_reduce({', '.join(['float32[3]'] * 1000)}, sum)", f"{'folder/' * 500}train.py:7", "entered", 1.0, 3.0
)
WIDE = Whereabouts(
    python=f"{'folder/' * 500}train.py:7 in step",
    threads=["a.py:1 in read" * 500] * 50,
    now=[CALL, *[replace(CALL, group=f"{number}", seconds=1.0) for number in range(100)]],
    last=CALL,
    counts={f"{number}": number for number in range(5000)} | {"0-1": 7},
)


def test_a_rank_that_has_much_to_say() -> None:
    sent = WIDE.short()
    for said in (("where", sent), ("state", 3.0, 0.0, sent), ("frozen", 1, "is stopped", sent)):
        kind, *_, where = TO_HUB.read(write(*said))
        assert kind == said[0]
        assert where == replace(sent, threads=list(sent.threads), now=list(sent.now))
    assert sent.now[0].call.startswith("all_reduce(float32[3], ")
    assert sent.now[0].line.endswith("/train.py:7")
    assert sent.counts["0-1"] == 7
    assert sent.short() == sent


@pytest.mark.parametrize("field", ["python", "threads", "now", "last", "counts"])
def test_what_is_too_long_is_refused(field: str) -> None:
    long = replace(Whereabouts(), **{field: getattr(WIDE, field)})
    for schema in (TO_HUB, TO_RANKS):
        with pytest.raises(UnreadableError):
            schema.read(write("frozen", 1, "is stopped", long))


@pytest.mark.parametrize(
    "said",
    [
        b'where\n[{"python": 3}]',
        b'where\n[{"now": [{"group": "0-1"}]}]',
        b'where\n["train.py:7"]',
        b'state\n[null, 0.0, {"counts": {"0-1": "seven"}}]',
        b"late\n[1]",
    ],
)
def test_other_types_are_refused(said: bytes) -> None:
    with pytest.raises(UnreadableError):
        TO_HUB.read(said)


def test_a_hang_of_many_ranks_is_short() -> None:
    where = WIDE.short().describe()
    hang = Hang("", {rank: f"{rank} {where}" for rank in range(5000)}, 4321, 0.0)
    lines = hang.lines()
    assert len(lines) < MOST_LINES
    assert lines[999].startswith("  rank 4321: 4321 in all_reduce(")
    assert lines[-2:] == ["  and 4000 more ranks", "The first rank that lags is rank 4321."]
    for said in (("hang", ["They wait.", *lines]), ("ended", [(1, True, "is stopped", lines)])):
        body = write(*said)
        assert len(body) < LONGEST
        assert TO_RANKS.read(body) == said
