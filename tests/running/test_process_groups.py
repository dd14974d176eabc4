"""Groups of processes whose leaders have ended, and numbers that belong to others by now."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess

import psutil

from tfrep_strategy.running.guard import Group

LIMIT = 30


def test_a_number_that_another_process_has_by_now() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        group = Group.of(process.pid)
        earlier, unknown = dataclasses.replace(group, started=group.started - 1), dataclasses.replace(group, started=0)
        for other in (earlier, unknown):
            other.send(signal.SIGKILL)
            assert other.descendants() == []
        assert process.poll() is None
        group.send(signal.SIGKILL)
        assert process.wait(LIMIT) == -signal.SIGKILL


def test_a_group_outlives_its_leader() -> None:
    program = "sleep 60 & echo $!; read line"
    with subprocess.Popen(
        ["sh", "-c", program], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        group, member = Group.of(process.pid), psutil.Process(int(process.stdout.readline()))
        assert member in group.descendants()
        print(file=process.stdin, flush=True)
        assert process.wait(LIMIT) == 0
        assert group.descendants() == []
        assert member.is_running()
        group.send(signal.SIGKILL)
        assert psutil.wait_procs([member], LIMIT)[1] == []
    group.send(signal.SIGKILL)  # Nobody is left.


def test_the_number_of_a_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait(LIMIT)
    assert Group.of(process.pid).started == 0
    assert Group.of(os.getpid()).started > 0
