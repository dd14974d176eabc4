"""Faults that are injected into a run from outside, and what becomes of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import psutil
from disturbed import Run
from networks import CABLE, cable_cut, on, pids_on

START_SECONDS = 150.0
"""How long a run may take until it does what a fault is aimed at, or ends."""
LIMIT = 20.0
"""Within how many seconds of a fault the ranks have ended, and a launcher that it ends."""
AIMS = ("start-up", "steps", "backup", "evaluation", "end")
ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM)
KILLED = (-signal.SIGKILL,)
LOST = 1
"""What a launcher ends with whose run has lost what it cannot do without."""
_FILE_BYTES = 4096
"""Less than a backup has."""


@dataclass(frozen=True)
class Done:
    """What a fault has done.

    Attributes:
        ended: The launchers that end.
        codes: With which exit codes launchers may end, beside 0.
    """

    ended: Sequence[subprocess.Popen[bytes]] = ()
    codes: Collection[int] = ()


def kill_a_rank(run: Run, rng: random.Random) -> Done:
    rng.choice(run.ranks()).kill()
    return Done()


def stop_a_rank(run: Run, rng: random.Random) -> Done:
    rng.choice(run.ranks()).suspend()
    return Done()


def kill_a_launcher(run: Run, rng: random.Random) -> Done:
    """If it is that of machine 0, the others end."""
    launcher = rng.choice(run.launchers)
    launcher.kill()
    return Done([launcher], [*KILLED, LOST])


def kill_a_host(run: Run, rng: random.Random) -> Done:
    """All of its processes at once, as when its power fails. Temporary files are gone when it starts."""
    number = rng.randrange(len(run.launchers))
    for pid in pids_on(run.kind.hosts[number]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.launchers[number].wait()
    shutil.rmtree(run.temporary(number))
    return Done([run.launchers[number]], [*KILLED, LOST])


def ask_a_launcher(run: Run, rng: random.Random) -> Done:
    launcher = rng.choice(run.launchers)
    launcher.send_signal(signal.SIGTERM)
    return Done([launcher], [*ASKED, LOST] if run.kind.hosts else ASKED)


def warn_all(run: Run, rng: random.Random) -> Done:
    """A scheduler may send its signal to all processes."""
    for process in [*run.ranks(), *(psutil.Process(launcher.pid) for launcher in run.launchers)]:
        process.send_signal(signal.SIGTERM)
    return Done(run.launchers, ASKED)


def fill_the_disk(run: Run, rng: random.Random) -> Done:
    """Backups fail for a while."""
    with contextlib.suppress(OSError), open(run.backups / "filler", "wb") as filler:
        while True:
            filler.write(b"0" * 4096)
            filler.flush()
    time.sleep(2.0)
    return Done()


def limit_files(run: Run, rng: random.Random) -> Done:
    """All backups of these ranks fail."""
    for rank in run.ranks():
        rank.rlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))
    return Done()


def send_garbage(run: Run, rng: random.Random) -> Done:
    """Strangers connect to every port; some stay, and say nothing."""
    with contextlib.ExitStack() as stack:
        for rank in run.ranks():
            with contextlib.suppress(psutil.Error):
                for each in rank.net_connections("tcp"):
                    for content in (b"", rng.randbytes(500), b"GET / HTTP/1.1\r\n\r\n"):
                        with contextlib.suppress(OSError):
                            stranger = stack.enter_context(socket.create_connection(each.laddr, timeout=1.0))
                            stranger.sendall(content)
        time.sleep(1.0)
    return Done()


def cut_the_cable(run: Run, rng: random.Random) -> Done:
    """Until the ranks of both machines have ended. Machine 1 ends if it takes part, and comes again when the cable is mended."""
    deadline = time.monotonic() + _LIMITS["the cable is cut"]
    takes_part = bool(run.ranks_of(1))  # Else it waits for the others, and goes on with that.
    with cable_cut(rng.choice(run.kind.hosts)):
        psutil.wait_procs(run.ranks(), _LIMITS["the cable is cut"])
        if takes_part and run.launchers[1].poll() is None:
            run.launchers[1].wait(max(0.1, deadline - time.monotonic()))
    return Done(codes=[LOST])


def cut_the_cable_shortly(run: Run, rng: random.Random) -> Done:
    with cable_cut(rng.choice(run.kind.hosts)):
        time.sleep(rng.uniform(0.2, 3.0))
    return Done()


def slow_the_cable(run: Run, rng: random.Random) -> Done:
    name = rng.choice(run.kind.hosts)
    slow = ["rate", "64kbit", "burst", "2kb", "latency", "200ms"]  # What waits for longer is lost, and sent again.
    subprocess.run([*on(name), "tc", "qdisc", "add", "dev", CABLE, "root", "tbf", *slow], check=True)
    time.sleep(5.0)
    subprocess.run([*on(name), "tc", "qdisc", "delete", "dev", CABLE, "root"], check=True)
    return Done()


Fault = Callable[[Run, random.Random], Done]

ENDS_RANKS: dict[str, Fault] = {
    "a rank is killed": kill_a_rank,
    "a rank is stopped": stop_a_rank,
    "a launcher is killed": kill_a_launcher,
    "a launcher is asked to end": ask_a_launcher,
    "all processes are warned": warn_all,
    "a host is killed": kill_a_host,
    "the cable is cut": cut_the_cable,
}
ENDS_NOBODY: dict[str, Fault] = {
    "the disk is full": fill_the_disk,
    "files have a limit": limit_files,
    "strangers send garbage": send_garbage,
    "the cable is cut for 3 seconds": cut_the_cable_shortly,
    "the network is slow": slow_the_cable,
}
FAULTS = ENDS_RANKS | ENDS_NOBODY
OF_HOSTS = ("a host is killed", "the cable is cut", "the cable is cut for 3 seconds", "the network is slow")
ON_HOSTS = ("a rank is killed", "a rank is stopped", "a launcher is killed", "a launcher is asked to end", *OF_HOSTS)
_LIMITS = {"the cable is cut": 60.0}
"""Of faults that are noticed later than others: when nothing has come for 17 seconds."""


def drawn(names: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields faults and what they are aimed at for ever, each pair once before one comes again."""
    pairs = [(what, aim) for what in names for aim in AIMS]
    return itertools.chain.from_iterable(rng.sample(each, len(each)) for each in itertools.repeat(pairs))


class Table:
    """What was tried, and what came of it."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.compared = 0

    @property
    def count(self) -> int:
        """How many faults there were."""
        return sum(map(len, self.seconds.values()))

    def __str__(self) -> str:
        lines = [f"| what happens | {' | '.join(AIMS)} | longest time |", f"|---|{'---|' * len(AIMS)}---|"]
        for what in FAULTS:
            found = [self.seconds.get((what, aim), []) for aim in AIMS]
            if any(found):
                longest = f"{max(itertools.chain(*found)):.1f} s" if what in ENDS_RANKS else "nobody ends"
                lines.append(f"| {what} | {' | '.join(str(len(each)) for each in found)} | {longest} |")
        return "\n".join(lines)


def inject(run: Run, what: str, aim: str, rng: random.Random, table: Table) -> bool:
    """Waits until a run does something, has something happen then, and waits until the ranks have ended for which it is a reason.

    Returns:
        Whether the run is over: it has ended well. Where it has ended otherwise it is started again.
    """
    if not _comes_to(run, aim, what):
        return True
    time.sleep({"start-up": rng.uniform(0, 3), "backup": 0.0}.get(aim, rng.uniform(0, 0.2)))
    began, ranks, in_vain = time.monotonic(), run.ranks(), run.times_in_vain()
    if not ranks or any(launcher.poll() is not None for launcher in run.launchers):
        return False  # Too late; the next fault finds out.
    try:
        done = FAULTS[what](run, rng)
    except (psutil.NoSuchProcess, IndexError):  # There is no rank any more.
        return False
    run.expect(done.codes, in_vain)
    if what in ENDS_RANKS:
        limit = _LIMITS.get(what, LIMIT)
        _, alive = psutil.wait_procs(ranks, max(0.0, began + limit - time.monotonic()))
        assert not alive, f"{what}, {aim}: {len(alive)} of {len(ranks)} ranks were there after {limit} s. {run.errors}"
    table.seconds[what, aim].append(time.monotonic() - began)
    for launcher in done.ended:
        code = launcher.wait(LIMIT)
        assert run.is_expected(code), f"{what}, {aim}: exit code {code}. {run.errors}"
    (run.backups / "filler").unlink(missing_ok=True)
    return run.is_over


def _comes_to(run: Run, aim: str, what: str) -> bool:
    """Waits until a run does something; returns False if it has ended well before."""
    deadline = time.monotonic() + START_SECONDS
    while not run.does(aim):
        if run.is_over:
            return False
        run.go_on()
        assert time.monotonic() < deadline, f"{what}: no {aim} after {START_SECONDS} seconds. {run.errors}"
        time.sleep(0.002)
    return True


def finish(run: Run) -> None:
    """Waits until a run has ended well."""
    deadline = time.monotonic() + START_SECONDS
    while not run.is_over:
        run.go_on()
        assert time.monotonic() < deadline, f"no end after {START_SECONDS} seconds. {run.errors}"
        time.sleep(0.05)
