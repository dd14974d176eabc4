"""What is taken from the output of a launcher on another host, and how it is reached."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time

import pytest
from raising import refuses

from tfrep_strategy.core.limits import ssh_command
from tfrep_strategy.running import Options
from tfrep_strategy.running.hosts import Messages, Remote, ssh_to

MARK = "\x1eMARK"
STREAM = f'one\n{MARK}["hello", {{"port": 7}}, 1.5]\ntwo, {MARK[:3]} no end{MARK}["report", null, 2.5]\n three{MARK[:4]}'.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_messages_are_taken_out_of_output(size: int) -> None:
    """However the stream is cut, and if the end looks like the beginning of a message."""
    messages = Messages(MARK.encode())
    shown = b"".join(messages.take(STREAM[first : first + size]) for first in range(0, len(STREAM), size))
    assert shown == f"one\ntwo, {MARK[:3]} no end three".encode()
    assert messages.found == [("hello", {"port": 7}, 1.5), ("report", None, 2.5)]
    assert messages.take(b"", is_last=True) == MARK[:4].encode()


def test_a_process_is_told_and_tells(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import json, sys; given = json.loads(input()); print('output', flush=True)"
    program += "; print(given['mark'] + '[\"report\", 7, 0.0]')"
    program += "; print('error', file=sys.stderr); sys.exit(given['code'])"
    changes: list[None] = []
    command, given = [sys.executable, "-c", program], {"mark": MARK, "code": 3}
    remote = Remote("here", command, MARK, given, lambda: changes.append(None), by_line=True)
    remote._process.wait(30)
    remote.close()
    assert remote.said == {"report": 7}
    assert remote.code == 3
    assert not remote.is_lost
    assert len(changes) == 2
    assert capfd.readouterr().out == "output\n"
    assert remote.last_words == ["error"]


def test_a_process_that_stands_still_is_lost() -> None:
    """Also if it would say something later. One that speaks is not, nor one whose output waits to be shown."""
    silent = Remote("here", ["sleep", "60"], MARK, {}, lambda: None, by_line=True)
    speaks = Remote("here", ["sh", "-c", "while echo; do sleep 0.05; done"], MARK, {}, lambda: None, by_line=True)
    try:
        for _ in range(3):
            time.sleep(1.0)
            silent.look(1.0, 2.5)
            speaks.look(1.0, 2.5)
        assert silent._process.wait(30) == -signal.SIGKILL
        assert speaks.code is None
    finally:
        speaks.close()
        silent.close()
    assert silent.is_lost
    [last] = silent.last_words
    seconds = re.fullmatch(r"nothing has come from it for (\d+) seconds", last)
    assert seconds is not None, last
    assert int(seconds[1]) >= 2


def test_the_command_of_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFREP_SSH", raising=False)
    command = ssh_to("host2", ["python", "-c", 'print("a b")'])
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "host2"]
    assert shlex.split(command[-1]) == ["exec", "python", "-c", 'print("a b")']
    monkeypatch.setenv("TFREP_SSH", "my-ssh -F 'a file'")
    assert ssh_command() == ("my-ssh", "-F", "a file")
    for wrong in ("ssh 'no end", " "):
        monkeypatch.setenv("TFREP_SSH", wrong)
        with refuses(TFREP_SSH=wrong):
            ssh_command()


@pytest.mark.parametrize(
    ("hosts", "size", "shares"),
    [
        ("a:4,b:4", None, {"a": 4, "b": 4}),
        ("a:4,b:4", 5, {"a": 4, "b": 1}),
        ("a:4,b:4", 4, {"a": 4}),
        ("a:1,b:1,a:2", None, {"a": 3, "b": 1}),
    ],
)
def test_the_first_hosts_are_filled_first(hosts: str, size: int | None, shares: dict[str, int]) -> None:
    assert Options(size, hosts=hosts).shares == shares
