"""Ranks of one machine that want the same file do not race for it."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

import keras
import pytest

_CONTENT = {"/data.txt": b"digits " * 100_000, "/mirror/data.txt": b"letters " * 120_000}


class Server:
    """Serves `_CONTENT`; the second half of an answer waits for another request, for a second at most."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.second = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(self.path)
                if len(server.requests) > 1:
                    server.second.set()
                content = _CONTENT.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                server.second.wait(1.0)
                self.wfile.write(content[len(content) // 2 :])

            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http_server.server_port}"
        finally:
            http_server.shutdown()
            http_server.server_close()


def fetch(strategy: Any, url: str, paths: list[str], names: list[str], folder: str) -> tuple[bytes, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        path = keras.utils.get_file(names[strategy.rank], origin=url + paths[strategy.rank], cache_dir=folder)
    with open(path, "rb") as file:
        return file.read(), said.getvalue()


@pytest.mark.parametrize("paths", [["/data.txt"] * 2, ["/data.txt", "/mirror/data.txt"]])
def test_a_file_is_downloaded_once(paths: list[str], tmp_path: Any, worker_pool: Any) -> None:
    """Two addresses for one file are one download too, as on one device."""
    server = Server()
    with server.running() as url:
        (first, _), (second, _) = worker_pool("tf", 2).run(fetch, url, paths, ["data.txt"] * 2, str(tmp_path))
    assert len(server.requests) == 1
    assert first == second == _CONTENT[server.requests[0]]


def test_only_rank_0_draws_a_bar(tmp_path: Any, worker_pool: Any) -> None:
    server = Server()
    with server.running() as url:
        paths = ["/data.txt", "/mirror/data.txt"]
        (first, drawn), (second, said) = worker_pool("tf", 2).run(fetch, url, paths, ["0.txt", "1.txt"], str(tmp_path))
    assert [first, second] == list(_CONTENT.values())
    assert "━━" in drawn
    assert "━" not in said


@pytest.mark.lane("quick")
def test_a_file_that_is_read_is_not_written_to(tmp_path: Any) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "data.txt").write_text("older")
    server = Server()
    server.second.set()
    with server.running() as url, open(tmp_path / "datasets" / "data.txt", "rb") as reader:
        path = keras.utils.get_file("data.txt", origin=url + "/data.txt", cache_dir=tmp_path, force_download=True)
        assert reader.read() == b"older"
    with open(path, "rb") as file:
        assert file.read() == _CONTENT["/data.txt"]
    with server.running() as url, pytest.raises(Exception, match="missing"):
        keras.utils.get_file("missing", origin=url + "/missing", cache_dir=tmp_path)
    assert os.listdir(tmp_path / "datasets") == ["data.txt"]
