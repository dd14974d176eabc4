"""A server of Google's object storage on this machine. TensorFlow comes to it as it is: through a proxy for HTTPS."""

from __future__ import annotations

import socketserver
import ssl
import sys
from pathlib import Path
from typing import Any

import trustme
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.storage import Storage

HOST = "www.googleapis.com"


def read_data(request_handler: Any, query: Any, read: Any = emulator._read_data) -> Any:
    """Empty objects, by which TensorFlow makes folders, are data too."""
    data = read(request_handler, query)
    return b"" if data is None and request_handler.command == "POST" else data


class Handler(emulator.RequestHandler):
    """Knows that a body in chunks has no other length, whatever TensorFlow says."""

    def parse_request(self) -> bool:
        """Reads the headers of a request."""
        is_good = super().parse_request()
        if is_good and self.headers.get("Transfer-Encoding") == "chunked":
            del self.headers["Content-Length"]
        return is_good


class Proxy(socketserver.BaseRequestHandler):
    """Is asked for a connection to Google, and is Google."""

    context: ssl.SSLContext
    storage: Storage

    def handle(self) -> None:
        """Answers one connection."""
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += self.request.recv(4096)
        self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with self.context.wrap_socket(self.request, server_side=True) as inside:
            Handler(self.storage, inside, self.client_address, self.server)


class Server(socketserver.ThreadingTCPServer):
    """Takes all connections at once."""

    daemon_threads = True


def main(folder: Path) -> None:
    """Serves; writes the authority to trust to a folder, and the port to standard output."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    Proxy.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST, "storage.googleapis.com").configure_cert(Proxy.context)
    Proxy.storage = Storage(use_memory_fs=True)
    create_bucket("bucket", Proxy.storage)
    emulator._read_data = read_data
    emulator.Request.full_url = property(lambda request: f"https://{HOST}{request._path}")
    with Server(("127.0.0.1", 0), Proxy) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
