"""The server at which ranks of Horovod leave their addresses for each other. It hears only who knows the secret of the run."""

from __future__ import annotations

import contextlib
import errno
import hmac
import importlib.metadata
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from tfrep_strategy.errors import message
from tfrep_strategy.horovod_source import MARK

_log = logging.getLogger(__name__)

SECRET = "HOROVOD_GLOO_RENDEZVOUS_SECRET"
"""The variable in which a rank finds the secret."""

_MOST_AT_ONCE = 256
"""How many may be silent at once. When one more comes, the one that has waited longest has to go."""


def horovod_version() -> str:
    """Returns the version of the installed Horovod.

    Example:
        >>> horovod_version()
        '0.28.1...'
    """
    return importlib.metadata.version("horovod")


def new_secret() -> str:
    """Returns a secret for a run; none, which is empty, if the installed Horovod cannot show it.

    Example:
        >>> len(new_secret()) in (0, 32)
        True
    """
    return secrets.token_hex(16) if horovod_version().endswith(MARK) else ""


def warn_of_open_ranks() -> None:
    """Says what everybody can do who reaches ranks of the installed Horovod, if it is not the one that asks for a secret.

    Example:
        >>> warn_of_open_ranks()
    """
    if not new_secret():
        what = "Whoever reaches the ports of this run can read and change its gradients: this Horovod asks nobody for a secret."
        hint = "build one that does: `tfrep horovod install`."
        _log.warning("%s", message(what, hint=hint, horovod=horovod_version()))


def horovod_server(address: str, port: int, secret: str, guard: Callable[[socket.socket], None] | None = None) -> Any:
    """Opens Horovod's rendezvous server.

    Args:
        address: Where to listen; if it is none of this machine's, on all interfaces.
        port: The port; 0 for a free one.
        secret: What each request has to show; anybody is heard if it is empty.
        guard: Called with the socket before it listens.

    Raises:
        OSError: It cannot listen.

    Example:
        >>> with horovod_server("127.0.0.1", 0, "sesame") as server:
        ...     server.server_port > 0
        True
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):
        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            shown = self.headers.get("Authorization", "").encode(errors="replace")
            if secret and not hmac.compare_digest(shown, f"Bearer {secret}".encode()):
                self.send_error(HTTPStatus.UNAUTHORIZED)
                return False
            return True

    class Server(RendezvousHTTPServer):
        request_queue_size = 1024
        daemon_threads = True  # Who is silent does not keep the run from ending.

        def __init__(self) -> None:
            self._silent: dict[socket.socket, None] = {}  # In the order in which they came.
            self._lock = threading.Lock()
            super().__init__((address, port), Handler, False)

        def server_bind(self) -> None:
            try:
                super().server_bind()
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                self.server_address = ("", port)
                super().server_bind()

        def server_activate(self) -> None:
            if guard is not None:
                guard(self.socket)
            super().server_activate()

        def process_request(self, request: socket.socket, client_address: Any) -> None:
            with self._lock:
                self._silent[request] = None
                if len(self._silent) > _MOST_AT_ONCE:
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    with contextlib.suppress(OSError):  # It has left.
                        oldest.shutdown(socket.SHUT_RDWR)
            super().process_request(request, client_address)

        def shutdown_request(self, request: socket.socket) -> None:
            with self._lock:
                self._silent.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: socket.socket, client_address: Any) -> None:
            """Says nothing: another program may connect, send anything, and leave."""

    return Server()
