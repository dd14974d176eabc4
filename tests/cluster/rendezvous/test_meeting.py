"""Meetings over real connections; TensorFlow is not loaded. Most processes of a meeting are threads of this one."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from raising import refuses

from tfrep_strategy.cluster.rendezvous import meeting
from tfrep_strategy.cluster.rendezvous.channel import _HELLO, LONGEST, Channel, Schema, introduced
from tfrep_strategy.cluster.rendezvous.confinement import confine, problem_of_confining
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.cluster.rendezvous.introductions import Place, Statement
from tfrep_strategy.cluster.rendezvous.meeting import _TO_GUESTS, Met, Refusal, _Host, meet, shared_secret
from tfrep_strategy.errors import ConfigurationError, PeerError

pytestmark = pytest.mark.lane("quick")

LIMIT = 60
SOON = 30
"""Seconds in which a mistake is told."""
SECRET = b"s" * 32
Meeting = Future[list[Met]]
Start = Callable[..., Meeting]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # The secret of this user.
    monkeypatch.delenv("TFREP_SECRET_FILE", raising=False)
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting._LINGER_SECONDS", 0.5)
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting._GREETING_SECONDS", 1)
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def start(address: str) -> Iterator[Start]:
    """Starts a process of a meeting."""
    with ThreadPoolExecutor(8) as threads:

        def begin(
            number: int, count: int = 2, at: str = address, one_machine: bool = True, secret: bytes = SECRET, seconds: float = LIMIT
        ) -> Meeting:
            place = Place(at, number, count, one_machine)
            return threads.submit(meet, place, {"name": f"process {number}"}, secret=secret, seconds=seconds)

        yield begin


def process(place: Place, path: Path | None = None) -> subprocess.Popen[str]:
    """Starts a real one, which uses the packages of a folder."""
    script = Path(__file__).parent / "scripts" / "goes.py"
    own = {"address": place.address, "number": place.number, "count": place.count, "one_machine": place.one_machine}
    entries = [str(path)] * bool(path) + [str(Path(__file__).parents[3])]
    return subprocess.Popen([sys.executable, script, json.dumps(entries), json.dumps(own)], stdout=subprocess.PIPE, text=True)


def secret_file(path: Path, text: str = "s" * 32, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_all_get_what_each_tells_in_any_order(start: Start) -> None:
    meetings = [start(number, 3) for number in (2, 1, 0)]
    expected = [Met("127.0.0.1", {"name": f"process {number}"}) for number in range(3)]
    assert [each.result(LIMIT) for each in meetings] == [expected] * 3


def test_over_an_interface(start: Start, tmp_path: Path) -> None:
    """As between machines: each tells the address at which the others reach it; the port is not open on other interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Sends nothing; it chooses the interface to the world.
        own = probe.getsockname()[0]
    port = free_ports(1, own)[0]
    host = start(0, 2, f"{own}:{port}", False)
    until_listening(own, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    guest = start(1, 2, f"{own}:{port}", False)
    assert [each.host for each in host.result(LIMIT)] == [each.host for each in guest.result(LIMIT)] == [own] * 2


def test_a_name_that_means_loopback_on_its_own_machine(start: Start) -> None:
    """As Debian has it in /etc/hosts. A process that comes over loopback is on the machine of process 0."""
    port = free_ports(1, "")[0]
    meetings = [start(number, 2, f"localhost:{port}", False) for number in range(2)]
    assert [[met.host for met in each.result(LIMIT)] for each in meetings] == [["127.0.0.1"] * 2] * 2


def test_process_0_does_not_take_itself_for_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at such a name whether another one is there, each time that it says whom it awaits."""
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting.LINE_SECONDS", 0.5)
    looked = threading.Semaphore(0)
    look = _Host._look_for_another_host

    def counted(host: _Host) -> None:
        look(host)
        looked.release()

    monkeypatch.setattr(_Host, "_look_for_another_host", counted)
    at = f"localhost:{free_ports(1, '')[0]}"
    host = start(0, 2, at, False)
    for _ in range(3):
        assert looked.acquire(timeout=SOON)
    guest = start(1, 2, at, False)
    assert len(host.result(LIMIT)) == len(guest.result(LIMIT)) == 2


def until_listening(host: str, port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, port)):
            return
        threading.Event().wait(0.05)


def check_refused(meetings: list[Meeting], named: str) -> None:
    for each in meetings:
        error = each.exception(SOON)
        assert isinstance(error, ConfigurationError), error
        assert named in str(error)
        assert "Hint: " in str(error)
        assert "rendezvous=" in str(error)


def test_two_of_one_rank(start: Start) -> None:
    who = f"{socket.gethostname()}, process {os.getpid()}"
    check_refused([start(0, 3), start(1, 3), start(1, 3)], f"Two processes say that they are rank 1: {who} and {who}.")


def test_two_of_rank_0(start: Start, address: str) -> None:
    first = start(0)
    until_listening(*Place(address, 0, 2).target)
    check_refused([first, start(0)], "Two processes say that they are rank 0: ")


def test_other_numbers_of_ranks(start: Start) -> None:
    named = "Rank 2 says that there are 4 ranks, and rank 0 that there are 3."
    check_refused([start(0, 3), start(1, 3), start(2, 4)], named)


def test_a_number_that_no_rank_has(start: Start) -> None:
    check_refused([start(0, 3), start(1, 3), start(3, 3)], "Rank 3 is not one of the 3 ranks.")


def test_who_comes_together_with_others_is_compared_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _Host._missing

    def slowly(host: _Host) -> list[int]:
        threading.Event().wait(1.0)  # All greet meanwhile, and are let in at once.
        return missing(host)

    monkeypatch.setattr(_Host, "_missing", slowly)
    for wrong in (1, 2, 3):
        named = f"Rank {wrong} says that there are 5 ranks, and rank 0 that there are 4."
        check_refused([start(0, 4), *(start(number, 5 if number == wrong else 4) for number in (1, 2, 3))], named)


@pytest.mark.parametrize(("package", "named"), [("tensorflow", "TensorFlow"), ("keras", "Keras")])
def test_other_versions(start: Start, address: str, package: str, named: str, tmp_path: Path) -> None:
    information = tmp_path / f"{package}-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    host = start(0, secret=shared_secret(one_machine=True))
    with process(Place(address, 1, 2, one_machine=True), tmp_path) as other:
        told = json.loads(other.communicate(timeout=LIMIT)[0])
    check_refused([host], f"has {named} 9.9, and rank 0")
    assert told == {"kind": "ConfigurationError", "text": str(host.exception())}


def test_another_version_of_this_package(start: Start, address: str) -> None:
    """What it states besides is not read."""
    host, place = start(0), Place(address, 1, 2, one_machine=True)
    until_listening(*place.target)
    stated = asdict(Statement.of(place, {})) | {"more": 1}
    stated["versions"]["tfrep_strategy"] = "99"
    with introduced(socket.create_connection(place.target), SECRET, _TO_GUESTS, 5, "statement", stated) as other:
        check_refused([host], "has tfrep_strategy 99, and rank 0")
        assert other.receive() == ("error", Refusal(str(host.exception()), lost=False))


def test_another_secret(start: Start) -> None:
    """It is told so. The others go on waiting, since any program can send what looks like a proof."""
    meetings = [start(number, 3) for number in range(2)]
    check_refused([start(2, 3, secret=b"o" * 32)], "The secret of this process is not that of rank 0.")
    assert [len(each.result(LIMIT)) for each in (*meetings, start(2, 3))] == [3] * 3


def test_another_secret_is_named_when_the_time_is_over(start: Start) -> None:
    host = start(0, seconds=2.0)
    check_refused([start(1, secret=b"o" * 32)], "The secret of this process is not that of rank 0.")
    named = r"Rank 1 has not come. A process at 127.0.0.1 has another secret \(TFREP_SECRET_FILE\)\."
    with pytest.raises(PeerError, match=named):
        host.result(LIMIT)


@pytest.mark.skipif(problem_of_confining() is not None, reason=f"sockets are open here: {problem_of_confining()}")
def test_a_guard_keeps_strangers_away(start: Start, address: str) -> None:
    place = Place(address, 0, 2, one_machine=True)

    def guard(server: socket.socket) -> None:
        confine(server, [ipaddress.ip_network("127.0.0.1")])

    with ThreadPoolExecutor(1) as thread:
        host = thread.submit(meet, place, {}, secret=SECRET, seconds=LIMIT, guard=guard)
        until_listening(*place.target)
        with pytest.raises(TimeoutError):
            socket.create_connection(place.target, 0.3, source_address=("127.0.0.2", 0))
        assert len(start(1).result(LIMIT)) == len(host.result(LIMIT)) == 2


def test_strangers_at_the_door(start: Start, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that connect and send anything, or nothing, disturb nobody; nobody waits for them either."""
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting._GREETING_SECONDS", LIMIT)
    host, target = start(0), Place(address, 0, 2).target
    until_listening(*target)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(target)) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].close()
        assert start(1).result(LIMIT / 2) == host.result(LIMIT / 2)


ODD = [b"", b"7", b"rank\n[1]", b'ready\n[{"alike":{}}]', b"sign\n[null]", b"statement\n[7]", b'statement\n[{"number":1}]']
"""First messages that are no statements."""


@pytest.mark.parametrize("odd", ODD)
def test_who_says_odd_things_first_or_says_more_is_not_in(odd: bytes, start: Start, address: str) -> None:
    """It knows the secret. The others meet without it."""
    host, place = start(0, 3), Place(address, 1, 3, one_machine=True)
    until_listening(*place.target)
    with Channel(socket.create_connection(place.target), _TO_GUESTS, 5) as first:
        first.enter(SECRET)
        first.send_written(odd)
        with pytest.raises((EOFError, ConnectionResetError)):
            first.receive()
    own = Statement.of(place, {})
    with introduced(socket.create_connection(place.target), SECRET, _TO_GUESTS, 5, "statement", own) as second:
        second.send("statement", own)
        with pytest.raises((EOFError, ConnectionResetError)):
            second.receive()
    meetings = [host, start(1, 3), start(2, 3)]
    assert [len(each.result(SOON)) for each in meetings] == [3] * 3


def test_a_statement_that_is_cut_off_keeps_nobody_waiting(start: Start, address: str) -> None:
    """It comes from a process that knows the secret. Whether it hangs up or is silent then, rank 1 can still come."""
    host, place = start(0), Place(address, 1, 2, one_machine=True)
    until_listening(*place.target)
    with contextlib.ExitStack() as stack:
        for is_closed in (True, False):
            channel = Channel(stack.enter_context(socket.create_connection(place.target)), _TO_GUESTS, 5)
            channel.enter(SECRET)
            channel._socket.sendall(b"\0\0\1\0statement\n[{")
            if is_closed:
                channel.close()
        assert start(1).result(SOON) == host.result(SOON)


def test_clocks_that_differ_by_a_day(start: Start, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 86_400\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    host = start(0, secret=shared_secret(one_machine=True))
    with process(Place(address, 1, 2, one_machine=True)) as other:
        assert json.loads(other.communicate(timeout=SOON)[0]) == ["127.0.0.1"] * 2
    assert len(host.result(SOON)) == 2


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.2p1\r\n"])
def test_a_name_with_two_addresses(says: bytes, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first of them another program listens, which hangs up."""
    look_up, address = socket.getaddrinfo, ("127.0.0.2", free_ports(1, "127.0.0.2")[0])

    def two(host: str, port: int, *others: Any, **more: Any) -> list[Any]:
        if host != "two.example":
            return look_up(host, port, *others, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in (address, ("127.0.0.1", port))]

    def answer() -> None:
        with server.accept()[0] as peer:
            peer.sendall(says)

    monkeypatch.setattr(socket, "getaddrinfo", two)
    at = f"two.example:{free_ports(1, '')[0]}"
    with socket.create_server(address) as server, ThreadPoolExecutor(1) as answering:
        answering.submit(answer)
        meetings = [start(number, 2, at, False) for number in range(2)]
        assert [len(each.result(SOON)) for each in meetings] == [2, 2]


def test_ipv6_alone(start: Start) -> None:
    at = f"[::1]:{free_ports(1, '')[0]}"
    meetings = [start(number, 2, at, False) for number in range(2)]
    assert [len(each.result(SOON)) for each in meetings] == [2, 2]


def test_a_stranger_at_the_address(start: Start, address: str) -> None:
    with socket.create_server(Place(address, 0, 2).target) as server, ThreadPoolExecutor(1) as answering:
        server.settimeout(LIMIT)

        def answer() -> None:
            with server.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                peer.recv(1)

        answering.submit(answer)
        check_refused([start(1)], "Another program listens at the rendezvous.")


def test_a_silent_stranger_at_the_address(start: Start, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting._ANSWER_SECONDS * meeting._SILENCES < SOON
    monkeypatch.setattr("tfrep_strategy.cluster.rendezvous.meeting._ANSWER_SECONDS", 1)
    with socket.create_server(Place(address, 0, 2).target):
        check_refused([start(1)], "Another program listens at the rendezvous.")
        check_refused([start(0)], "Rank 0 cannot listen at the rendezvous (Address already in use).")


def test_who_does_not_come_is_named(start: Start, address: str) -> None:
    meetings = [start(0, 4, seconds=1.5), start(2, 4)]
    for each in meetings:
        error = each.exception(LIMIT)
        assert isinstance(error, PeerError), error
        assert "Not all ranks came to the rendezvous within 1.5 seconds. Ranks 1, 3 have not come. " in str(error)
        assert address in str(error)


def test_nobody_listens(address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TFREP_RENDEZVOUS_TIMEOUT", "1")
    monkeypatch.setattr(meeting, "LINE_SECONDS", 0.3)
    with pytest.raises(PeerError, match=r"within 1 seconds. Rank 0 cannot be reached \(.*refused.*\)"):
        meet(Place(address, 1, 2, one_machine=True), {})
    assert f"Waiting at {address}. Rank 0 cannot be reached" in caplog.text


def test_lines_say_who_is_awaited(
    start: Start, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert meeting.LINE_SECONDS == 10.0
    monkeypatch.setattr(meeting, "LINE_SECONDS", 0.3)
    waiting, pause = [start(0, 3), start(2, 3)], threading.Event()
    while caplog.text.count(f"Waiting at {address}. Rank 1 has not come.") < 2:  # Both ranks say so.
        assert not pause.wait(0.05)
    assert [len(each.result(LIMIT)) for each in [*waiting, start(1, 3)]] == [3, 3, 3]


def test_who_gives_up_may_come_again(start: Start, address: str) -> None:
    host = start(0, 3)
    until_listening(*Place(address, 0, 2).target)
    assert isinstance(start(1, 3, seconds=0.5).exception(LIMIT), PeerError)
    assert [len(each.result(LIMIT)) for each in (start(1, 3), start(2, 3), host)] == [3, 3, 3]


def test_process_0_may_start_again(start: Start, address: str) -> None:
    place = Place(address, 0, 3, one_machine=True)
    with process(place) as first:
        until_listening(*place.target)
        guest = start(1, 3, secret=shared_secret(one_machine=True))
        assert not wait([guest], timeout=1).done
        first.kill()
    others = [start(number, 3, secret=shared_secret(one_machine=True)) for number in (0, 2)]
    assert [len(each.result(LIMIT)) for each in [guest, *others]] == [3, 3, 3]


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refuses(code="TFREP-E015", hint="set TFREP_SECRET_FILE", TFREP_SECRET_FILE=None):
        shared_secret(one_machine=False)
    with ThreadPoolExecutor(4) as several:
        own = set(several.map(lambda _: shared_secret(one_machine=True), range(8)))
    assert len(own) == 1
    assert len(own.pop()) == 64
    files = list((tmp_path / "cache").rglob("*.secret*"))
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600]

    monkeypatch.setenv("TFREP_SECRET_FILE", secret_file(tmp_path / "good", "  " + "s" * 20 + "\n", 0o400))
    assert shared_secret(one_machine=False) == b"s" * 20
    for file, named in (
        (secret_file(tmp_path / "open", mode=0o640), "mode 640"),
        (secret_file(tmp_path / "short", "secret"), "16 characters"),
        (str(tmp_path / "none"), "No such file"),
    ):
        monkeypatch.setenv("TFREP_SECRET_FILE", file)
        with refuses(code="TFREP-E015", told=[named], TFREP_SECRET_FILE=file):
            shared_secret(one_machine=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(
    ("owner", "user", "mode", "is_taken"),
    [
        (0, 1000, 0o440, True),
        (0, 1000, 0o460, False),
        (0, 1000, 0o444, False),
        (0, 0, 0o440, False),
        (1000, 1000, 0o440, False),
    ],
)
def test_a_secret_of_kubernetes_is_of_root_and_of_the_group_of_the_pod(
    owner: int, user: int, mode: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = secret_file(tmp_path / "secret", mode=mode)
    os.chown(file, owner, 1000)
    monkeypatch.setenv("TFREP_SECRET_FILE", file)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with contextlib.nullcontext() if is_taken else refuses(code="TFREP-E015", hint="fsGroup", TFREP_SECRET_FILE=file):
        assert shared_secret(one_machine=False) == b"s" * 32


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:port", "host:0", "host:99999"])
def test_addresses_that_cannot_be_read(text: str) -> None:
    with refuses(told=["host:port"], rendezvous=text):
        Place(text, 0, 2)


def test_nothing_is_read_before_the_proof(start: Start, address: str) -> None:
    """A statement without a proof is no statement."""
    host, target = start(0), Place(address, 0, 2).target
    until_listening(*target)
    with Channel(socket.create_connection(target), Schema({}), 5) as intruder:
        intruder.send_written(_HELLO + b"x" * 64)
        intruder.send("statement", Statement.of(Place(address, 1, 2), {}))
        assert intruder._received(LONGEST).startswith(_HELLO)
        assert intruder._received(LONGEST) == b"another secret"
        with pytest.raises((EOFError, ConnectionResetError)):
            intruder.receive()
        assert start(1).result(LIMIT) == host.result(LIMIT)
