"""A process on a host, reached through ssh or on this machine: what it is told, what it tells, and its output.

It is told lines of JSON through its standard input. It tells such lines through its standard output, each after a mark that only it
and this process know. What stands between them is output, which is shown.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.limits import ssh_command

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
        "nobody is asked for a password here. Let `{ssh} {host} true` work without one (ssh-copy-id, ssh-agent).",
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
            return ConfigurationError(message(what, hint=hint, host=self.host, interpreter=sys.executable))
        for pattern, hint in _HINTS:
            if re.search(pattern, text, re.MULTILINE):
                hint = hint.format(ssh=ssh, host=self.host)
                what = f"{self.host} cannot be reached through ssh ({last})."
                return ConfigurationError(message(what, hint=hint, host=self.host))
        told = "".join(f"\n  {line}" for line in self.last_words)
        what = f"tfrep does not start on {self.host} (exit code {self.code}).{told}\n"
        hint = f"install tfrep_strategy in the same place on all hosts; see what `{ssh} {self.host} {sys.executable} -V` says."
        return ConfigurationError(message(what, hint=hint, host=self.host))

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            # A session of its own: a signal of the terminal is for the launcher, which passes it on.
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            what = f"Cannot start {command[0]} ({error.strerror})."
            hint = "install OpenSSH's client, or set TFREP_SSH to a command like ssh."
            raise ConfigurationError(message(what, hint=hint, host=self.host)) from None

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
