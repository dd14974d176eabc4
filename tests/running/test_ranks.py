"""Real processes: they end well, badly, slowly, silently, and with children."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from calling import command
from observing import alive, wait_until

from tfrep_strategy.running.ranks import (
    GRACE_SECONDS,
    TIMED_OUT,
    Command,
    Events,
    Failure,
    Streams,
    deferred_signals,
    run_ranks,
    start_process,
)

pytestmark = pytest.mark.lane("launchers")

SLEEP = "import time; time.sleep(60)"
STUBBORN = Path(__file__).parent / "scripts" / "stubborn.py"
SOON = 30.0  # Seconds; well before the sleepers would end by themselves, also on a busy machine.
WITH_CHILDREN = Path(__file__).parent / "scripts" / "with_children.py"


class Runner:
    """Runs small programs as ranks."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.logs, self.notes, self.marker = folder / "logs", folder / "notes", marker
        self.logs.mkdir()
        self.notes.mkdir()

    def __call__(self, *programs: str | Path, timeout: float | None = 30) -> Failure | None:
        called = [[str(each)] if isinstance(each, Path) else ["-c", each] for each in programs]
        commands = [Command([sys.executable, *each, self.marker], os.environ) for each in called]
        with deferred_signals() as events:
            return run_ranks(
                commands,
                events,
                log_dir=self.logs,
                note_dir=self.notes,
                timeout=timeout,
            )

    def write_note(self, rank: int, age: float, exit_code: int = 1) -> str:
        """A statement that leaves the note of a rank that failed some time ago."""
        note = self.notes / f"{rank}.note"
        text = f'{{"time": %r, "exit_code": {exit_code}, "traceback": "boom"}}'
        return f"import time; open({str(note)!r}, 'w').write({text!r} % (time.monotonic() - {age}));"


@pytest.fixture
def run(tmp_path: Path, marker: str) -> Runner:
    return Runner(tmp_path, marker)


def test_all_end_well(run, capfd):
    assert (
        run(
            "print('zero')",
            "import sys; print('one'); print('err', file=sys.stderr)",
            "print('two')",
        )
        is None
    )
    assert capfd.readouterr().out == "zero\n"
    assert sorted((run.logs / "rank1.log").read_text().split()) == ["err", "one"]
    assert (run.logs / "rank2.log").read_text() == "two\n"


@pytest.mark.parametrize(
    ("death", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError('boom')", 1),
        ("import os; os._exit(7)", 7),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            128 + signal.SIGKILL,
        ),
        ("import os; os.abort()", 128 + signal.SIGABRT),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_dies_and_ends_the_others(run, death, code, rank):
    programs = [SLEEP, SLEEP, SLEEP]
    programs[rank] = death
    start = time.monotonic()
    failure = run(*programs)
    assert failure == Failure(rank, code)
    assert time.monotonic() - start < SOON
    assert not alive(run.marker)


def _show_terminals(marker: str, folder: str) -> None:
    show = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), flush=True)"
    with deferred_signals() as events:
        commands = [Command([sys.executable, "-c", show, marker], os.environ)] * 2
        run_ranks(commands, events, log_dir=Path(folder), note_dir=Path(folder))


def test_rank_0_has_the_terminal(tmp_path, marker):
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            command(_show_terminals, marker, str(tmp_path)),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            timeout=60,
        )
        assert done.returncode == 0
        assert b"True True True" in os.read(ours, 10_000)  # Beside what TensorFlow says when it is imported.
    finally:
        os.close(ours)
        os.close(theirs)
    assert (tmp_path / "rank1.log").read_text().split() == ["False"] * 3


def test_one_that_ends_well_ends_nobody(run):
    assert run("pass", "import time; time.sleep(0.5); print('done')") is None
    assert (run.logs / "rank1.log").read_text() == "done\n"


def test_a_rank_that_will_not_end_is_killed(run):
    start = time.monotonic()
    ready = run.logs / "rank1.log"
    is_ready = f"os.path.exists({str(ready)!r}) and os.path.getsize({str(ready)!r})"
    waits = f"import os, time\nwhile not ({is_ready}): time.sleep(0.01)\nraise SystemExit(3)"
    assert run(waits, STUBBORN) == Failure(0, 3)
    assert GRACE_SECONDS <= time.monotonic() - start < SOON


@pytest.mark.parametrize(
    ("first", "second", "is_saved"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGINT, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGHUP, True),
        (signal.SIGTERM, signal.SIGINT, False),
        (signal.SIGTERM, signal.SIGKILL, False),
    ],
)
def test_only_who_is_impatient_breaks_off_a_backup(tmp_path, marker, first, second, is_saved):
    """A rank that was asked to end saves until the launcher has the second signal, and a moment longer."""
    saving, saved = tmp_path / "saving", tmp_path / "saved"
    program = f"import signal\nfor number in ({first:d}, signal.SIGTERM): signal.signal(number, lambda *_: save())\n"
    program += f"import time\ndef save():\n open({str(saving)!r}, 'w'); time.sleep(1.5); open({str(saved)!r}, 'w'); exit(143)\n"
    program += f"open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"
    events: Events = queue.SimpleQueue()

    def ask() -> None:
        wait_until((tmp_path / "ready").exists)
        events.put((None, first))
        wait_until(saving.exists)
        events.put((None, second))

    asking = threading.Thread(target=ask)
    asking.start()
    commands = [Command([sys.executable, "-c", program, marker], os.environ)]
    failure = run_ranks(commands, events, log_dir=tmp_path, note_dir=tmp_path, grace=SOON)
    asking.join()
    assert failure == Failure(None, 128 + first)
    assert saved.exists() == is_saved
    assert events.get_nowait() == (None, second)  # A run that was to be started again ends.


def test_a_rank_that_the_kernel_keeps_is_left_behind(tmp_path, marker, capfd, monkeypatch):
    """No run waits for it for ever, and its late end is no event of the next start."""
    may_end = threading.Event()

    class Kept:
        def __init__(self, process: Any) -> None:
            self.pid, self._process = process.pid, process

        def wait(self) -> int:
            may_end.wait()
            return self._process.wait()

    keep = Command([sys.executable, "-c", SLEEP, marker], os.environ)
    fail = Command([sys.executable, "-c", "exit(3)", marker], os.environ)

    def start(command: Command, streams: Streams) -> Any:
        process = start_process(command, streams)
        return Kept(process) if command is keep else process

    monkeypatch.setattr("tfrep_strategy.running.ranks.start_process", start)
    began, before = time.monotonic(), threading.active_count()
    with deferred_signals() as events:
        assert run_ranks([fail, keep], events, log_dir=tmp_path, note_dir=tmp_path) == Failure(0, 3)
        assert time.monotonic() - began < SOON
        may_end.set()
        wait_until(lambda: threading.active_count() == before)
        assert events.empty()
    assert "tfrep: Rank 1 was killed, and does not end: the kernel keeps it." in capfd.readouterr().err


def test_children_of_ranks_end_too(run):
    ready = run.logs / "rank1.log"
    is_ready = f"os.path.exists({str(ready)!r}) and os.path.getsize({str(ready)!r})"
    waits = f"import os, time\nwhile not ({is_ready}): time.sleep(0.01)\nraise SystemExit(3)"
    assert run(waits, WITH_CHILDREN) == Failure(0, 3)
    wait_until(lambda: not alive(run.marker))


def test_what_a_good_rank_left_running_ends_too(run):
    assert run(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}, sys.argv[1]])") is None
    wait_until(lambda: not alive(run.marker))


def test_time_limit(run):
    start = time.monotonic()
    assert run(SLEEP, SLEEP, timeout=0.5) == Failure(None, TIMED_OUT)
    assert 0.5 <= time.monotonic() - start < SOON


def test_a_note_tells_who_failed_first(run):
    # Rank 1 failed first and is slow to end; its peer, which crashes over that, is gone before.
    slow = run.write_note(1, age=0, exit_code=5) + "time.sleep(0.5); raise SystemExit(5)"
    waits = "import os, time\n" + f"while not os.path.exists({str(run.notes / '1.note')!r}): time.sleep(0.01)\nos.abort()"
    assert run(waits, slow) == Failure(1, 5, "boom", noted=True)


def test_a_silent_death_comes_before_the_failures_it_caused(run):
    dies = run.write_note(0, age=0.02) + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(SLEEP, dies) == Failure(1, 128 + signal.SIGKILL)


def test_two_that_fail_at_once_are_both_waited_for(run):
    assert run("raise SystemExit(3)", "raise SystemExit(3)").exit_code == 3


def test_a_command_that_does_not_exist_leaves_nothing(run):
    commands = [
        Command([sys.executable, "-c", SLEEP, run.marker], os.environ),
        Command(["no-such-command"], os.environ),
    ]
    with deferred_signals() as events, pytest.raises(FileNotFoundError):
        run_ranks(commands, events, log_dir=run.logs, note_dir=run.notes)
    assert not alive(run.marker)


def _launch(marker: str, folder: str) -> None:
    commands = [Command([sys.executable, str(WITH_CHILDREN), marker], os.environ)] * 2
    try:
        with deferred_signals() as events:
            temporary = Path(folder, "temporary")
            temporary.mkdir()
            run_ranks(commands, events, log_dir=Path(folder), note_dir=Path(folder), temporary=[temporary])
    except KeyboardInterrupt:
        sys.exit(130)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, 130),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_signals_to_the_launcher_end_everything(tmp_path, marker, number, code):
    launcher = subprocess.Popen(
        command(_launch, marker, str(tmp_path)),
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: len(alive(marker)) == 1 + 2 * 3, 60)
    launcher.send_signal(number)
    assert launcher.wait(SOON) == code
    wait_until(lambda: not alive(marker))


def test_a_killed_launcher_leaves_no_rank(tmp_path, marker):
    launcher = subprocess.Popen(
        command(_launch, marker, str(tmp_path)),
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: len(alive(marker)) == 1 + 2 * 3, 60)
    assert (tmp_path / "temporary").exists()
    launcher.kill()
    launcher.wait(10)
    wait_until(lambda: not alive(marker) and not (tmp_path / "temporary").exists())


def test_signals_that_are_ignored_stay_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals() as events:
            signal.raise_signal(signal.SIGHUP)
            assert events.empty()
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_signals_wait_for_the_end_of_the_body():
    received = []

    def interrupted() -> None:
        with deferred_signals() as events:
            signal.raise_signal(signal.SIGINT)
            received.append(events.get())

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert received == [(None, signal.SIGINT)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_works_outside_of_the_main_thread(run):
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run("pass", "raise SystemExit(4)")))
    thread.start()
    thread.join(30)
    assert results == [Failure(1, 4)]
