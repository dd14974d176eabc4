"""Ranks of one machine that want the same file do not race for it."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import keras


def fetch(strategy: Any, url: str, folder: str) -> str:
    with open(keras.utils.get_file("data.txt", origin=url, cache_dir=folder), encoding="utf-8") as file:
        return file.read()


def test_a_file_is_downloaded_once(tmp_path: Any, worker_pool: Any) -> None:
    requests: list[str] = []
    content = b"digits " * 100_000

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/data.txt"
        texts = worker_pool("tf", 2).run(fetch, url, str(tmp_path))
    finally:
        server.shutdown()
        server.server_close()
    assert texts == [content.decode()] * 2
    assert len(requests) == 1
