"""Standing meetings over real connections. Their launchers are played by this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from tfrep_strategy.cluster.rendezvous.assembly import ANY, TO_SEATS, Assembly, RoundEnd, RoundReport, Seat, Verdict
from tfrep_strategy.cluster.rendezvous.channel import Channel, Schema
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.cluster.rendezvous.introductions import Place, Statement
from tfrep_strategy.cluster.rendezvous.meeting import Visit

pytestmark = pytest.mark.lane("quick")

LIMIT = 10
QUIET = 0.3
SECRET = b"s" * 32


class Run:
    """A meeting, and those who are there."""

    def __init__(
        self, count: int, least: int | None = None, *, seconds: float = LIMIT, seconds_to_end: float = LIMIT, **told: Any
    ) -> None:
        self.place = Place(f"127.0.0.1:{free_ports(1)[0]}", 0, count, one_machine=True, noun="node")
        self.heard: list[RoundEnd] = []
        self.verdict: Callable[[RoundEnd], Verdict] = lambda ended: Verdict(again=not ended.ended_well, text="Again.")
        self.assembly = Assembly(self.place, least, SECRET, seconds=seconds, seconds_to_end=seconds_to_end, decide=self.decide)
        own = self.statement(0, **{"mark": "0f"} | told)
        self.told_by_0 = own.told
        self.own = Seat(self.assembly.begin(own), lambda *_: None)

    def decide(self, ended: RoundEnd) -> Verdict:
        self.heard.append(ended)
        return self.verdict(ended)

    def statement(self, number: int, **told: Any) -> Statement:
        place = Place(self.place.address, max(number, 0), self.place.count, one_machine=True, noun="node")
        made = Statement.of(place, {"alike": {}} | told)
        return Statement(**asdict(made) | {"number": number})

    def comes(self, number: int = ANY, *, is_ready: bool = True, **told: Any) -> Seat:
        """Somebody comes."""
        visit = Visit(self.place, self.statement(number, **told), SECRET, LIMIT)
        seat = Seat(visit.insist(lambda: visit.enter(TO_SEATS)), lambda *_: None)
        assert told_to(seat, "welcome") == self.told_by_0
        if is_ready:
            seat.tell("ready", {"alike": {}} | told)
        return seat


def told_to(seat: Seat, kind: str) -> Any:
    """Returns what somebody is told next, which must be of a kind."""
    found, content = seat.inbox.get(timeout=LIMIT)
    assert found == kind, content
    return content


def reports(seat: Seat, outcome: str, number: int = 0, **more: Any) -> None:
    seat.tell("report", RoundReport(number, outcome, **more))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.assembly._LAST_CALL_SECONDS", QUIET)
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.assembly._LINGER_SECONDS", QUIET)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def begin(*arguments: Any, **options: Any) -> Run:
        made.append(Run(*arguments, **options))
        return made[-1]

    yield begin
    for each in made:
        each.own.tell("leave", 1)
        each.assembly.end(LIMIT)


def test_a_run_whose_machine_0_does_not_end_its_round_has_failed(start: Callable[..., Run]) -> None:
    run = start(2, seconds_to_end=QUIET)
    other = run.comes(1)
    assert told_to(other, "round").place == 1
    reports(other, "failed", exit_code=7)
    assert told_to(other, "over") == Verdict(again=False, text="Node 0 was lost.", exit_code=1)


def test_a_run_that_has_not_ended_well_has_an_exit_code(start: Callable[..., Run]) -> None:
    run = start(2)
    run.verdict = lambda ended: Verdict(again=False, text="Lost.")
    other = run.comes(1)
    for seat in (run.own, other):
        told_to(seat, "round")
    reports(other, "left")
    reports(run.own, "told")
    assert told_to(other, "over") == Verdict(again=False, text="Lost.", exit_code=1)


def test_whoever_comes_when_some_are_done_waits(start: Callable[..., Run]) -> None:
    run = start(3, least=1)
    other = run.comes()
    for seat in (run.own, other):
        told_to(seat, "round")
    reports(other, "well")
    late = run.comes()
    time.sleep(3 * QUIET)
    assert run.own.inbox.empty()
    reports(run.own, "well")
    for seat in (run.own, other, late):
        assert told_to(seat, "over").exit_code == 0


def test_the_last_that_is_needed_comes_just_in_time(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.assembly._LAST_CALL_SECONDS", LIMIT)
    run = start(3, least=2, seconds=1.5, seconds_to_end=QUIET)
    other = run.comes()
    assert len(told_to(other, "round").met) == 2


def test_a_meeting_that_breaks_down_ends_for_all(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = start(2)

    def breaks(ended: RoundEnd) -> Verdict:
        raise OSError(116, "Stale file handle")

    run.verdict = breaks
    other = run.comes(1)
    for seat in (run.own, other):
        told_to(seat, "round")
        reports(seat, "well")
    for seat in (run.own, other):
        error = told_to(seat, "error")
        assert error.lost
        assert "The meeting of the nodes has broken down (OSError: [Errno 116] Stale file handle)." in error.text
        assert run.place.address in error.text
        told_to(seat, "lost")
    assert "has broken down" in caplog.text


@pytest.mark.parametrize("odd", [b"", b"report\n[{}]", b"report\n[7]", b"7"])
def test_whoever_says_odd_things_is_lost(odd: bytes, start: Callable[..., Run]) -> None:
    run = start(2)
    other = run.comes(1)
    for seat in (run.own, other):
        told_to(seat, "round")
    other._channel.send_written(odd)
    told_to(other, "lost")
    assert told_to(run.own, "end") is True
    reports(run.own, "told")
    told_to(run.own, "again")
    assert len(run.heard[0].lost) == 1


def test_whoever_stops_in_the_middle_of_a_message_is_lost(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "5")
    run = start(3)
    other = run.comes(1)
    visit = Visit(run.place, run.statement(2), SECRET, LIMIT)
    with visit.insist(lambda: visit.enter(TO_SEATS)) as cut_off:
        cut_off.send("ready", {"alike": {}})
        for seat in (run.own, other):
            told_to(seat, "round")
        cut_off._socket.sendall(b"\0\0\1\0report\n[{")
        other.tell("leave", 1)
        assert told_to(run.own, "end") is True  # At once: the one that is cut off keeps no other waiting.
        reports(run.own, "told")
        told_to(run.own, "again")
    [ended] = run.heard
    assert len(ended.lost) == 2


@pytest.mark.parametrize("odd", [b"7", b'ready\n[{"alike":{}}]', b"sign\n[null]", b"leave\n[1]", b'statement\n[{"number":1}]'])
def test_whoever_says_odd_things_first_is_not_in(odd: bytes, start: Callable[..., Run]) -> None:
    run = start(2)
    with Channel(socket.create_connection(run.place.target), TO_SEATS, LIMIT) as first:
        first.enter(SECRET)
        first.send_written(odd)
        with pytest.raises((EOFError, ConnectionResetError)):
            first.receive()
    told_to(run.comes(1), "round")


@pytest.mark.parametrize(
    ("number", "told", "said"),
    [
        (1, {"alike": 7}, "has --nnodes None, and node 0"),
        (1, {"alike": [["--nnodes", 2]]}, "has --nnodes None, and node 0"),
        (2, {}, "Node 2 is not one of the 2 nodes."),
        (-7, {}, "Node -7 is not one of the 2 nodes."),
    ],
)
def test_whoever_makes_an_odd_statement_is_refused_alone(number: int, told: Any, said: str, start: Callable[..., Run]) -> None:
    run = start(2, alike={"--nnodes": 2})
    visit = Visit(run.place, run.statement(number, **{"alike": {"--nnodes": 2}} | told), SECRET, LIMIT)
    seat = Seat(visit.insist(lambda: visit.enter(TO_SEATS)), lambda *_: None)
    refusal = told_to(seat, "error")
    assert said in refusal.text
    assert not refusal.lost
    told_to(run.comes(1, alike={"--nnodes": 2}), "round")


def test_whoever_is_not_ready_is_not_in_a_round(start: Callable[..., Run]) -> None:
    run = start(3, least=1, seconds=2)
    other, unready = run.comes(), run.comes(is_ready=False)
    unready.tell("leave", 2)
    assert len(told_to(other, "round").met) == 2
    told_to(run.own, "round")
    unready = run.comes(is_ready=False)
    time.sleep(3 * QUIET)
    unready.tell("leave", 2)
    time.sleep(QUIET)
    assert run.own.inbox.empty()
    for seat in (run.own, other):
        reports(seat, "well")
    assert told_to(other, "over").exit_code == 0


def test_whoever_has_waited_says_what_is_true_now(start: Callable[..., Run]) -> None:
    run = start(2, least=1)
    other = run.comes()
    for seat in (run.own, other):
        told_to(seat, "round")
    waiting = run.comes(ports=[1])
    told_to(waiting, "line")
    other.tell("leave", 1)
    told_to(run.own, "end")
    reports(run.own, "told")
    for seat in (run.own, waiting):
        assert told_to(seat, "again") == "Again."
        seat.tell("ready", {"alike": {}, "ports": [2]})
    for seat in (run.own, waiting):
        assert [each.told["ports"] for each in told_to(seat, "round").met] == [[2], [2]]
        reports(seat, "well", 1)


def test_a_machine_that_stands_still_is_lost(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernel still answers. Whoever has nothing to say is not lost."""
    monkeypatch.setenv("TFREP_TIMEOUT", "5")
    run = start(3)
    quiet = run.comes(1)
    visit = Visit(run.place, run.statement(2), SECRET, LIMIT)
    with visit.insist(lambda: visit.enter(TO_SEATS)) as connection:  # There is no seat, which would give signs.
        connection.send("ready", {"alike": {}})
        began = time.monotonic()
        for seat in (run.own, quiet):
            told_to(seat, "round")
        for seat in (run.own, quiet):
            assert told_to(seat, "end") is True
            reports(seat, "told")
        for seat in (run.own, quiet):
            told_to(seat, "again")
    assert 4.5 < time.monotonic() - began < LIMIT
    [ended] = run.heard
    assert len(ended.lost) == 1
    assert "has said nothing for 5 seconds." in caplog.text


def pair() -> tuple[Channel, Channel]:
    """Returns an end that only gets signs, and one for a seat."""
    here, there = socket.socketpair()
    return Channel(here, Schema({"sign": tuple[None]})), Channel(there, TO_SEATS)


@pytest.mark.parametrize("odd", [b"", b"{", b"7", b"line\n[1]"])
def test_a_meeting_that_says_odd_things_is_lost(odd: bytes) -> None:
    here, there = pair()
    with here:
        seat = Seat(there, lambda *_: None)
        here.send_written(odd)
        told_to(seat, "lost")


def test_a_meeting_that_stands_still_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_TIMEOUT", "0")
    (here, there), (other, patient) = pair(), pair()
    heard: list[str] = []
    with here, other:
        began = time.monotonic()
        bears_all = Seat(patient, lambda *_: None)
        monkeypatch.setenv("TFREP_TIMEOUT", "5")
        seat = Seat(there, lambda kind, _: heard.append(kind))
        assert here.receive() == ("sign", None)
        told_to(seat, "lost")
        assert 4.5 < time.monotonic() - began < LIMIT
        assert heard == ["lost"]
        assert bears_all.inbox.empty()
    told_to(bears_all, "lost")
