"""A run on several hosts that is started on one. A launcher on each of them is started through ssh, and told all through pipes.

A process on a host, reached through ssh or on this machine: what it is told, what it tells, and its output.
It is told lines of JSON through its standard input. It tells such lines through its standard output, each after a mark that only it
and this process know. What stands between them is output, which is shown.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from tfrep_strategy.cluster.command import piped_command, search_path
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.rendezvous.confinement import is_this_machine
from tfrep_strategy.cluster.rendezvous.meeting import with_port
from tfrep_strategy.core.limits import grace_seconds, machine_silence, ssh_command, timeout_seconds
from tfrep_strategy.errors import ConfigurationError, PeerError, message
from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.ranks import Events, Failure
from tfrep_strategy.running.runs import Options

# No question is asked: what ssh would ask for is an error. A host that is gone is noticed after 15 seconds.
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ControlPath=none")
_LAST_LINES = 20
_LAST_OUTPUT_SECONDS = 2.0
_LONGEST_READ = 1 << 16
_HINTS = (
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED",
        "~/.ssh/known_hosts has no key of it, or another one. Find out why; `{ssh} {host} true` shows its key and asks.",
    ),
    (
        r"Permission denied",
        "no password is asked for here. Let `{ssh} {host} true` work without one (ssh-copy-id, ssh-agent).",
    ),
    (
        r"^ssh: |timed out|Connection (refused|closed|reset)|kex_exchange",
        "check the name, that the host is on, and that `{ssh} {host} true` works. ~/.ssh/config may give its address and port.",
    ),
)
"""What ssh says, and what the user can do."""

_showing = threading.Lock()


def ssh_to(host: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command on another host.

    Args:
        host: As ssh knows it.
        command: What to run there. Everybody can read it, here and there.

    Example:
        >>> ssh_to("host2", ["echo", "two words"])[-3:]
        ['--', 'host2', "exec echo 'two words'"]
    """
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return [*ssh_command(), "-T", *options, "--", host, f"exec {shlex.join(command)}"]


class Messages:
    """Takes messages out of a stream of output.

    Args:
        mark: What stands before each.

    Attributes:
        found: Those that have come, as (kind, content, time on the clock of the sender).

    Example:
        >>> messages = Messages(b"MARK")
        >>> messages.take(b'epoch 1\\nMARK["report", 7, 0.5]\\nepoch 2\\nMA'), messages.found
        (b'epoch 1\\nepoch 2\\n', [('report', 7, 0.5)])
    """

    def __init__(self, mark: bytes) -> None:
        self._mark, self._rest = mark, b""
        self.found: list[tuple[str, Any, float]] = []

    def take(self, new: bytes, *, is_last: bool = False) -> bytes:
        """Returns the output so far, without messages. What may be the beginning of one is kept back, unless nothing follows."""
        shown, self._rest = b"", self._rest + new
        while self._mark in self._rest:
            before, _, after = self._rest.partition(self._mark)
            line, end, rest = after.partition(b"\n")
            if not end:
                break
            kind, content, sent_at = json.loads(line)
            self.found.append((kind, content, sent_at))
            shown, self._rest = shown + before, rest
        else:
            lengths = range(min(len(self._mark) - 1, len(self._rest)), 0, -1)
            kept = next((length for length in lengths if self._rest.endswith(self._mark[:length])), 0)
            end_of_output = len(self._rest) - (0 if is_last else kept)
            shown, self._rest = shown + self._rest[:end_of_output], self._rest[end_of_output:]
        return shown


class Remote:
    """A process on a host.

    Args:
        host: Its name.
        command: The command line that starts it, through ssh or not.
        mark: What stands before its messages.
        given: What it is told first.
        changed: Is called, in a thread, whenever it has said something or ended.
        by_line: Whether its output is shown in whole lines, because others show theirs in between.

    Attributes:
        said: What it has told, by kind.
        heard_at: When it did (`time.monotonic()`), by kind.
        clock_difference: What this machine's clock shows more than the other one's, and the time that a message needs.
        code: The exit code with which it, or ssh, has ended; None while it runs.

    Raises:
        ConfigurationError: There is no ssh.
    """

    def __init__(
        self, host: str, command: Sequence[str], mark: str, given: Mapping[str, Any], changed: Callable[[], None], *, by_line: bool
    ) -> None:
        self.host, self._changed, self._by_line = host, changed, by_line
        self.said: dict[str, Any] = {}
        self.heard_at: dict[str, float] = {}
        self.clock_difference = math.inf
        self.code: int | None = None
        self._silent, self._has_come, self._is_showing = 0.0, False, False
        self._errors: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._process = self._start(command)
        self._threads = [
            threading.Thread(target=self._show_output, args=(Messages(mark.encode()),), daemon=True, name="tfrep-output"),
            threading.Thread(target=self._show_errors, daemon=True, name="tfrep-output"),
        ]
        # ssh reads only when it is connected.
        self._threads_without_end = [
            threading.Thread(target=self.tell, args=(given,), daemon=True, name="tfrep-telling"),
            threading.Thread(target=self._wait, daemon=True, name="tfrep-waiting"),
        ]
        for thread in (*self._threads, *self._threads_without_end):
            thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether it has ended without a last message."""
        return self.code is not None and not self.said.keys() & {"error", "report"}

    @property
    def last_words(self) -> list[str]:
        """The last lines on its standard error, or ssh's."""
        return [line.decode("utf-8", "replace").rstrip() for line in list(self._errors) if line.strip()]

    def tell(self, content: Any) -> None:
        """Tells it something; nothing happens if it has ended."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def look(self, passed: float, patience: float) -> None:
        """Looks whether it still gives signs of life. If it has been silent for too long, ends the connection to it.

        Args:
            passed: Seconds since the last look.
            patience: How many seconds it may be silent.
        """
        # What it says waits while its output is shown, which a terminal can stop.
        self._silent = 0.0 if self._has_come or self._is_showing else self._silent + passed
        self._has_come = False
        if self._silent > patience:
            self._errors.append(f"nothing has come from it for {self._silent:.0f} seconds".encode())
            self._process.kill()

    def close(self) -> None:
        """Ends it, or the connection to it, by which it notices."""
        self._process.kill()
        for thread in (*self._threads_without_end, *self._threads):
            thread.join(_LAST_OUTPUT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def unreachable(self) -> ConfigurationError:
        """Returns the error of a host where the process has ended before it said anything."""
        ssh, text = shlex.join(ssh_command()), "\n".join(self.last_words)
        last = self.last_words[-1] if text else f"exit code {self.code}"
        if self.code in (126, 127):
            what = f"{self.host} has no Python where this machine has it ({last})."
            hint = "install the same environment in the same place on all hosts, or share its folder."
            return ConfigurationError(message(what, hint=hint, code="TFREP-E012", host=self.host, interpreter=sys.executable))
        for pattern, hint in _HINTS:
            if re.search(pattern, text, re.MULTILINE):
                hint = hint.format(ssh=ssh, host=self.host)
                what = f"{self.host} cannot be reached through ssh ({last})."
                return ConfigurationError(message(what, hint=hint, code="TFREP-E012", host=self.host))
        told = "".join(f"\n  {line}" for line in self.last_words)
        what = f"tfrep does not start on {self.host} (exit code {self.code}).{told}\n"
        hint = f"install tfrep_strategy in the same place on all hosts; see what `{ssh} {self.host} {sys.executable} -V` says."
        return ConfigurationError(message(what, hint=hint, code="TFREP-E012", host=self.host))

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            # Its own session: a signal of the terminal is for the launcher, which passes it on.
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            what = f"Cannot start {command[0]} ({error.strerror})."
            hint = "install OpenSSH's client, or set TFREP_SSH to a command like ssh."
            raise ConfigurationError(message(what, hint=hint, code="TFREP-E012", host=self.host)) from None

    def _wait(self) -> None:
        code = self._process.wait()
        for thread in self._threads:
            thread.join(_LAST_OUTPUT_SECONDS)  # A process that it has left may hold the other ends.
        self.code = code
        self._changed()

    def _show_output(self, messages: Messages) -> None:
        assert self._process.stdout is not None
        unfinished = b""
        for new in _reads(self._process.stdout):
            self._has_come = self._is_showing = True
            output = unfinished + messages.take(new, is_last=not new)
            unfinished = b""
            if self._by_line and new:
                output, end, unfinished = output.rpartition(b"\n")
                output += end
            _show(sys.stdout, output)
            for kind, content, sent_at in messages.found:
                now = time.monotonic()
                self.said[kind], self.heard_at[kind] = content, now
                self.clock_difference = min(self.clock_difference, now - sent_at)
                self._changed()
            messages.found.clear()
            self._is_showing = False

    def _show_errors(self) -> None:
        """Shows what it says. Before it has said hello, what ssh says is kept: if the host cannot be reached, the error has it."""
        assert self._process.stderr is not None
        line = b""
        for new in _reads(self._process.stderr):
            *lines, line = (line + new).split(b"\n")
            self._errors.extend([*lines, *([line] if line and not new else [])])
            if self.said:
                _show(sys.stderr, new)


def _reads(stream: IO[bytes]) -> Any:
    """Yields what comes, and nothing (b"") as the last."""
    new = b"more"
    while new:
        new = b""
        with contextlib.suppress(OSError, ValueError):
            new = stream.read1(_LONGEST_READ)  # type: ignore[attr-defined]
        yield new


def _show(stream: Any, output: bytes) -> None:
    if output:
        with _showing, contextlib.suppress(OSError, ValueError):
            stream.buffer.write(output)
            stream.flush()


LAUNCHER = "tfrep_strategy.running.on_host"
"""The module of a launcher on a host."""
_OF_NETWORKS = ("HOROVOD_GLOO_IFACE",)
"""Variables that other hosts need, though they tell a process of Horovod who it is."""

EXPORTED = ("CUDA_", "GLOO_", "HOROVOD_", "KERAS_", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "PYTHON", "TFREP_", "TF_", "XLA_")
"""How variables are named that other hosts get, beside `PATH`."""
BEAT_SECONDS = 2.0
"""How often this launcher and those on hosts tell each other that they are alive."""
SILENCE_SECONDS = 30.0
"""How long this launcher may be silent before those on hosts count it as gone. ssh gives up a connection after 15."""
ALL_ENDED_WELL = 0
"""What hosts are told, in place of the number of a signal, when the ranks of all have ended well."""

_HELLO_SECONDS = 25.0
_SETTLE_SECONDS = 1.0
"""How long the other hosts may take to notice a failure by themselves, so that it is known where the first one was."""
_END_SECONDS = 20.0
"""How long a host may take to end, beside its grace. ssh needs 15 to notice that the host is gone."""
_LOST = 255


def runs_on_other_hosts(options: Options) -> bool:
    """Tells whether ranks will be on other machines than this one.

    Example:
        >>> runs_on_other_hosts(Options(hosts="localhost:2"))
        False
    """
    return not all(map(is_this_machine, options.shares))


def run_on_hosts(options: Options, program: Sequence[str], events: Events) -> None:
    """Runs a program on the ranks of several hosts, and returns when all have ended well.

    Args:
        options: What is wanted, with `hosts`.
        program: What each rank runs, as for `script.main`: "script" or "module", its name, and its arguments.
        events: From `deferred_signals`.

    Raises:
        ConfigurationError: A host cannot be reached, or lacks something; or the launchers do not fit.
        PeerError: The launchers on the hosts did not meet.
        RunFailed: A rank failed, a host was lost, or a signal came.

    Example:
        >>> with deferred_signals() as events:  # doctest: +SKIP
        ...     run_on_hosts(Options(hosts="host1:4,host2:4"), ["script", "train.py"], events)
    """
    if options.max_restarts:
        what = "A run whose machines are reached through ssh is not started again by itself."
        hint = "start `tfrep run --nnodes N --rendezvous HOST:PORT --max-restarts K` on each machine, or leave --max-restarts out."
        raise ConfigurationError(message(what, hint=hint, hosts=options.hosts, max_restarts=options.max_restarts))
    run = _Launchers(options, events)
    try:
        run.start(_given(options, program))
        number = run.go()
    except BaseException:
        run.end(signal.SIGTERM)
        raise
    run.finish(number)


class _Launchers:
    """The launchers of one start of a run, in the order of the ranks.

    Args:
        options: What is wanted.
        events: From `deferred_signals`.
    """

    def __init__(self, options: Options, events: Events) -> None:
        self._options, self._events = options, events
        self._remotes: list[Remote] = []
        self._grace = grace_seconds(for_a_backup=options.backup_dir is not None)
        self._last_beat, self._patience = time.monotonic(), machine_silence()

    def start(self, given: dict[str, Any]) -> None:
        """Starts a launcher on each host."""
        mark, changed = f"\x1e{secrets.token_hex(16)}", lambda: self._events.put((0, 0))
        command, shares = piped_command(LAUNCHER), self._options.shares
        # By that variable a launcher tells how ssh has reached it. Here it would tell from where the user has come.
        here = ["env", "-u", "SSH_CONNECTION", *command]
        for rank, (host, size) in enumerate(shares.items()):
            own = {"mark": mark, "node": {"rank": rank, "count": len(shares), "name": host}, "size": size}
            start = here if is_this_machine(host) else ssh_to(host, command)
            self._remotes.append(Remote(host, start, mark, given | own, changed, by_line=self._options.prefix))

    def go(self) -> int | None:
        """Lets the launchers start ranks when all are there; returns at the first failure, when all have ended, or at a signal.

        Returns:
            The number of the signal, if one came.
        """
        number = self._wait(lambda: self._has_failed() or all("hello" in each.said for each in self._remotes), _HELLO_SECONDS)
        if number is not None:
            return number
        self._check_all_are_there()
        for each in self._remotes:
            each.tell({"rendezvous": self._rendezvous()})
        number = self._wait(lambda: self._has_failed() or self._have_ended())
        return number or self._wait(self._have_ended, _SETTLE_SECONDS)

    def finish(self, number: int | None) -> None:
        """Ends the launchers, and raises the error of the run, if there is one.

        Args:
            number: Of the signal that has ended the run, if one has.

        Raises:
            ConfigurationError, PeerError, RunFailed: As for `run_on_hosts`.
        """
        has_ended_well = self._have_ended() and not self._has_failed()
        self.end(number or (ALL_ENDED_WELL if has_ended_well else signal.SIGTERM))
        self._raise_failure(number)

    def end(self, number: int) -> None:
        """Ends the launchers that are left: asks, waits, then ends the connections, at which they end everything.

        Args:
            number: Of the signal that they are told.
        """
        here = [each for each in self._remotes if each.code is None and "hello" in each.said]
        for each in here:
            each.tell(number)
        deadline = time.monotonic() + self._grace + _END_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            impatient = self._wait(lambda: all(each.code is not None for each in here), left)
            if impatient is None:
                break
            for each in here:
                each.tell(impatient)
        for each in self._remotes:
            each.close()

    def _raise_failure(self, number: int | None) -> None:
        """Raises the error of the run, if there is one."""
        if number is not None:
            raise RunFailed(f"The run was stopped by {signal.Signals(number).name}.", Failure(None, 128 + number))
        self._raise_error()
        failed = [each for each in self._remotes if each.said.get("report")]
        lost = [each for each in self._remotes if each.is_lost]
        story = "".join(f"{each.host} was lost{_in_brackets(each.last_words[-1:])}; all ranks were ended.\n" for each in lost)
        if failed:
            first = min(failed, key=_failed_at)
            failure = Failure(**first.said["report"]["failure"])
            story += f"On {first.host}: {first.said['report']['story']}"
            raise RunFailed(story, failure, was_lost=bool(lost) or failure.was_lost)
        if lost:
            raise RunFailed(story.rstrip(), Failure(None, _LOST), was_lost=True)

    def _wait(self, condition: Callable[[], bool], seconds: float = math.inf) -> int | None:
        """Waits for a condition, or for some seconds; returns the number of a signal that came instead."""
        deadline = time.monotonic() + seconds
        while not condition() and (left := deadline - time.monotonic()) > 0:
            if (passed := time.monotonic() - self._last_beat) >= BEAT_SECONDS:
                self._last_beat += passed
                for each in self._remotes:
                    if "hello" in each.said and each.code is None:
                        each.tell(None)
                        each.look(min(passed, 2 * BEAT_SECONDS), self._patience)  # This process may have stood still itself.
            try:
                about, number = self._events.get(timeout=min(left, BEAT_SECONDS))
            except queue.Empty:
                continue
            if about is None:
                return number
        return None

    def _has_failed(self) -> bool:
        return any("error" in each.said or each.said.get("report") or each.is_lost for each in self._remotes)

    def _have_ended(self) -> bool:
        return all("report" in each.said or each.is_lost for each in self._remotes)

    def _check_all_are_there(self) -> None:
        self._raise_error()
        silent = [each for each in self._remotes if "hello" not in each.said]
        for each in silent:
            if each.is_lost:
                raise each.unreachable()
        if silent and not self._has_failed():
            names = ", ".join(each.host for each in silent)
            what = f"{names} did not answer within {_HELLO_SECONDS:g} seconds."
            hint = f"check that `{shlex.join(ssh_command())} {silent[0].host} {sys.executable} -V` ends soon."
            raise ConfigurationError(message(what, hint=hint, hosts=[each.host for each in self._remotes]))

    def _raise_error(self) -> None:
        for each in sorted(self._remotes, key=lambda each: each.heard_at.get("error", math.inf)):
            if error := each.said.get("error"):
                kind = ConfigurationError if error["kind"] == ConfigurationError.__name__ else PeerError
                raise kind(f"{each.host}: {error['text']}")

    def _rendezvous(self) -> str:
        """Returns where the first host listens, as the others reach it: where ssh has reached it, or where ssh has come from."""
        hellos = [each.said["hello"] for each in self._remotes]
        seen = [hello["seen_from"] for hello in hellos if hello["seen_from"]]
        found = next(filter(None, [hellos[0]["address"], *seen]), None)
        if found is None:
            what = f"The address at which the other hosts reach {self._remotes[0].host} is not known."
            hint = "have the command of TFREP_SSH set SSH_CONNECTION on the host, as OpenSSH does."
            raise ConfigurationError(message(what, hint=hint, hosts=[each.host for each in self._remotes]))
        return with_port(found, hellos[0]["port"])


def _given(options: Options, program: Sequence[str]) -> dict[str, Any]:
    """Returns what all launchers are told, secrets among it."""
    missing = [name for name in options.export if name not in os.environ]
    if missing:
        raise ConfigurationError(message("Variables that are to be exported are not set.", hint="set them.", export=missing))
    environ = inherited_environ() | {name: os.environ[name] for name in _OF_NETWORKS if name in os.environ}
    refused = [name for name in options.export if name not in environ]
    if refused:
        what = "Variables that tell a process its rank, or its run, cannot be exported: each rank gets its own."
        raise ConfigurationError(message(what, hint="leave them out; most of them are options of `tfrep run`.", export=refused))
    chosen = {name for name in environ if name == "PATH" or name.startswith(EXPORTED) or name in options.export}
    return {
        "path": [os.path.abspath(each) for each in search_path()],
        "folder": os.getcwd(),
        "environ": {name: environ[name] for name in chosen},
        "secret": secrets.token_hex(32),
        "program": list(program),
        "patience": None if math.isinf(timeout_seconds()) else SILENCE_SECONDS,  # Under a debugger this launcher may stand still.
        "options": {
            "strategy": options.strategy,
            "communicator": options.communicator,
            "log_dir": None if options.log_dir is None else os.fspath(options.log_dir),
            "backup_dir": None if options.backup_dir is None else os.fspath(options.backup_dir),
            "timeout": options.timeout,
            "prefix": options.prefix,
            "profile": options.profile,
            "profile_dir": None if options.profile_dir is None else os.fspath(options.profile_dir),
            "bind_cores": options.bind_cores,
            "speaks": options.speaks,
        },
    }


def _in_brackets(words: Sequence[str]) -> str:
    return f" ({words[0]})" if words else ""


def _failed_at(remote: Remote) -> tuple[bool, float]:
    """Returns when a host's rank failed, on this machine's clock. Ranks that were only told to end failed last."""
    failure = remote.said["report"]["failure"]
    return failure["rank"] is None, failure["time"] + remote.clock_difference
