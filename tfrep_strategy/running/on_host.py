"""The launcher of one host of `tfrep run --hosts`. The launcher that has started it tells it everything through a pipe.

It ends its ranks when that pipe ends, as it does if the other launcher or the connection is gone. Both tell each other that they
are alive: a process can stand still while its connection stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from tfrep_strategy.cluster.command import check_script
from tfrep_strategy.cluster.rendezvous.connections import free_ports
from tfrep_strategy.errors import ConfigurationError, TfrepError, message
from tfrep_strategy.running.hosts import ALL_ENDED_WELL, BEAT_SECONDS
from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.nodes import Node, meet_nodes
from tfrep_strategy.running.ranks import Events, deferred_signals
from tfrep_strategy.running.runs import Options, Round
from tfrep_strategy.running.script import run_ranks_of_script
from tfrep_strategy.running.shared_folder import shared_folder


def main(given: dict[str, Any]) -> None:
    """Runs the ranks of this host.

    Args:
        given: What the other launcher has told in the first line.
    """
    orders = os.dup(0)  # Ranks must not read from the pipe.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    pipe = os.fdopen(orders, "rb", 0)
    try:
        os.environ.update(given["environ"])
        _enter(given["folder"])
        check_script(*given["program"][:2])
        _tell(given["mark"], "hello", _hello())
        threading.Thread(target=_beat, args=(given["mark"],), daemon=True, name="tfrep-beat").start()
        answer = _answer(pipe)
        if not isinstance(answer, dict):  # The run was given up.
            return
        node = Node(rendezvous=answer["rendezvous"], **given["node"])
        options = Options(given["size"], node=node, **given["options"])
        listener = _Listener(pipe, given["patience"])
        folder = shared_folder(options.backup_dir) if options.backup_dir is not None else None
        nodes = meet_nodes(node, options.size, options.resolved_communicator, secret=bytes.fromhex(given["secret"]))
        with deferred_signals() as events:
            listener.events = events
            report = None
            try:
                run_ranks_of_script(given["program"], options, events, [Round(0, events, nodes, keeps_backups=True)])
            except RunFailed as failed:
                report = {"failure": asdict(failed.failure), "story": str(failed)}
            _tell(given["mark"], "report", report)
            if folder and node.rank == 0 and report is None and listener.all_ended_well():
                folder.remove_backups()
    except TfrepError as error:
        kind = ConfigurationError if isinstance(error, ConfigurationError) else TfrepError
        _tell(given["mark"], "error", {"kind": kind.__name__, "text": str(error)})
        sys.exit(1)


class _Listener:
    """Passes on what the other launcher wants: numbers of signals. Its silence, or the end of the pipe, is a wish to end.

    Args:
        pipe: What it says.
        patience: How many seconds it may be silent; None for no limit.

    Attributes:
        events: Where signals go; None while there are no ranks, when a signal ends this process.
    """

    def __init__(self, pipe: Any, patience: float | None) -> None:
        self.events: Events | None = None
        self._pipe, self._patience = pipe, patience
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="tfrep-orders").start()

    def all_ended_well(self) -> bool:
        """Waits until the other launcher says how the run has ended."""
        return self._orders.get() == ALL_ENDED_WELL

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], self._patience)
            line = self._pipe.readline() if ready else b""
            number = json.loads(line) if line.endswith(b"\n") else signal.SIGTERM
            if number is not None:
                self._orders.put(int(number))
                if number != ALL_ENDED_WELL:
                    self._signal(int(number))
            if not line:
                return

    def _signal(self, number: int) -> None:
        if self.events is None:
            os._exit(128 + number)
        self.events.put((None, number))


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        what = f"The working folder cannot be entered on this host ({error.strerror})."
        hint = "have the program in the same folder on all hosts: copy it there, or share the folder."
        raise ConfigurationError(message(what, hint=hint, folder=folder)) from None


def _hello() -> dict[str, Any]:
    """Returns the address at which ssh has reached this host, the address of the other machine, and a free port."""
    seen_from, _, address, _ = (os.environ.get("SSH_CONNECTION") or "   ").split(" ")
    return {"address": address, "seen_from": seen_from, "port": free_ports(1, "")[0]}


def _answer(pipe: Any) -> Any:
    """Returns the first line that says something; None at the end."""
    said = (json.loads(line) for line in iter(pipe.readline, b"") if line.endswith(b"\n"))
    return next((content for content in said if content is not None), None)


def _beat(mark: str) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        _tell(mark, "alive", None)


def _tell(mark: str, kind: str, content: Any) -> None:
    with contextlib.suppress(OSError), _telling:  # The other launcher is gone.
        sys.stdout.flush()
        os.write(1, f"{mark}{json.dumps([kind, content, time.monotonic()])}\n".encode())


_telling = threading.Lock()
