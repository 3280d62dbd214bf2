"""Serves the page of one run over HTTP, on the loopback interface only, for reading.

    GET /                   the page, with its data and the script that polls
    GET /data.json?after=S  what changed since state S
    GET /gallery/NAME       a video of an evaluation's episode, whole or one range of its bytes

A web page of another site that is open in the same browser must not read the run. It could reach the port under a name
of its own that resolves to 127.0.0.1 (DNS rebinding), so requests whose Host is not this address are refused; and it
could embed the videos, which Cross-Origin-Resource-Policy forbids.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

from polyrhythm import __version__
from polyrhythm.errors import StartError
from polyrhythm.plugins.report.gallery import MEDIA_TYPES, video_path
from polyrhythm.plugins.report.live import LiveRun
from polyrhythm.plugins.report.page import live_html

log = logging.getLogger(__name__)

_ADDRESS = "127.0.0.1"
#: Seconds that a connection may be silent, longer than a page's pause between two polls: silent ones take the place of
#: others; connections at once; bytes of a video that are read at once.
_SILENT_S, _CONNECTIONS, _BLOCK = 5.0, 32, 1 << 18
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer:
    """The server, from its construction to the end of its block. port: 0 for a free one.

    StartError: the port is not available.
    """

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"live": run})
        try:
            self._server = _Server((_ADDRESS, port), handler)
        except OSError as error:
            raise StartError(
                f"--port = {port}: {_ADDRESS}:{port} cannot be opened ({error.strerror or error}); name another, or "
                "leave it out"
            ) from error
        self.port = int(self._server.server_address[1])
        self.url = f"http://{_ADDRESS}:{self.port}/"

    def serve(self) -> None:
        """Answer requests until `stop`, or until an exception, such as that of a signal, is raised in this thread."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `serve`, which runs in another thread."""
        self._server.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread per connection, at most `_CONNECTIONS`; others are closed. The process does not wait for them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.debug("a request failed", exc_info=True)  # noqa: LOG014 - called while it is handled


class _Handler(BaseHTTPRequestHandler):
    live: ClassVar[LiveRun]

    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"polyrhythm/{__version__}", ""
    timeout = _SILENT_S

    def do_GET(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            self._answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)

    def _answer(self) -> None:
        if not self._is_own_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 and localhost only")
            return
        url = urlsplit(self.path)
        if url.path == "/":
            state, data = self.live.whole()
            self._send(live_html(data, state).encode(), "text/html; charset=utf-8")
        elif url.path == "/data.json":
            after = parse_qs(url.query).get("after", [""])[-1]
            self._send(json.dumps(self.live.since(after)).encode(), "application/json")
        elif url.path.startswith("/gallery/"):
            self._send_video(video_path(self.live.folder, url.path.removeprefix("/gallery/")))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _is_own_host(self, host: str) -> bool:
        port = self.connection.getsockname()[1]
        return host.lower() in (f"{_ADDRESS}:{port}", f"localhost:{port}") or (
            port == 80 and host.lower() in (_ADDRESS, "localhost")
        )

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(f"{words}\n".encode(), "text/plain; charset=utf-8", status)

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        more = {}
        if len(content) > 4096 and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, more = gzip.compress(content, 1), {"Content-Encoding": "gzip"}
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(content)), **more})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_video(self, path: Path | None) -> None:
        try:
            # A link could lead out of the run's folder.
            file = None if path is None else os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except OSError:
            file = None
        if path is None or file is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such video")
            return
        with file:
            self._send_file(file, MEDIA_TYPES[path.suffix])

    def _send_file(self, file: BinaryIO, kind: str) -> None:
        size = os.fstat(file.fileno()).st_size
        first, last = _range(self.headers.get("Range", ""), size)
        headers = {"Content-Type": kind, "Accept-Ranges": "bytes"}
        if first > last and size:
            self._head(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
            )
            return
        whole = last - first + 1 == size
        if not whole:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        left = last - first + 1
        self._head(HTTPStatus.OK if whole else HTTPStatus.PARTIAL_CONTENT, headers | {"Content-Length": str(left)})
        file.seek(first)
        while left and self.command != "HEAD":
            block = file.read(min(_BLOCK, left))
            if not block:  # it has become shorter meanwhile
                self.close_connection = True
                return
            self.wfile.write(block)
            left -= len(block)


def _range(header: str, size: int) -> tuple[int, int]:
    """First and last byte to send; first > last if there are none of the wanted ones. Without one range, and of an
    empty file: all."""
    found = _RANGE.fullmatch(header)
    if found is None or found.group() == "bytes=-" or not size:
        return 0, size - 1
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size - 1
    return int(first), min(int(last) if last else size - 1, size - 1)
