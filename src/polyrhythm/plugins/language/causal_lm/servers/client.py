"""HTTP client of a server: JSON requests, JSON or event-stream answers, a deadline on every wait.

Every failure is a `RunHalted` with the address and the remedy. A lost connection is a `ServerLost`, after which the
request may be repeated; a status other than 200 is a `ServerRefusal`.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from polyrhythm.errors import RunHalted

#: Wait before the first further attempt; each later one waits twice as long.
_PAUSE_S = 0.1

Found = TypeVar("Found")


class ServerLost(RunHalted):
    """The connection failed or closed before the answer was complete; the request may be repeated."""


class ServerRefusal(RunHalted):
    """The server answered with a status other than 200. said: the answer, quoted and shortened."""

    def __init__(self, sentence: str, status: int, said: str) -> None:
        super().__init__(sentence)
        self.status, self.said = status, said


class Line:
    """The connection of one event stream; any thread may cut it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False

    def hold(self, connected: socket.socket) -> None:
        """Set the connection to cut; cuts it at once if `cut` was called before."""
        with self._lock:
            self._socket = connected
            if self._cut:
                _shut(connected)

    def cut(self) -> None:
        """Shut the connection down: its reader sees the end, and the server sees a closed client."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                _shut(self._socket)


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # below TLS, whose state belongs to the reader


class ServerClient:
    """JSON client of the server at `url`. deadline_s: longest time without data; retries: attempts after a lost
    connection; kind: expected kind of server, with its article, for errors; headers: sent with each request."""

    def __init__(self, url: str, deadline_s: float, retries: int, kind: str, headers: Mapping[str, str]) -> None:
        self.url, self._deadline_s, self.retries, self.kind, self._headers = url, deadline_s, retries, kind, headers
        parts = urlsplit(url)
        try:
            self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        except ValueError as wrong:
            raise self.error("there is no such port; correct the address") from wrong
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object. RunHalted: no answer, or not a JSON object."""
        with self._response(path, None) as response:
            return self._object(path, response.read())

    def post(self, path: str, body: Mapping[str, Any], deadline_s: float = 0.0) -> dict[str, Any]:
        """POST a JSON object and return the answer; {} if it is no object. deadline_s: of this call."""

        def ask() -> bytes:
            with self._response(path, body, deadline_s) as response:
                return response.read()

        content = self.again(ask)
        return self._object(path, content) if content.strip().startswith(b"{") else {}

    def again(self, ask: Callable[[], Found]) -> Found:
        for failures in range(1, self.retries + 1):
            try:
                return ask()
            except ServerLost:
                self.pause(failures)
        return ask()

    def pause(self, failures: int) -> None:
        """Wait before the next attempt after this many consecutive lost connections."""
        time.sleep(_PAUSE_S * 2 ** (failures - 1))

    def stream(self, path: str, body: Mapping[str, Any], line: Line) -> Generator[dict[str, Any], None, None]:
        """Events of the answer as they arrive. line: its connection; cutting it raises ServerLost."""
        with self._response(path, body, line=line) as response:
            while read := response.readline():
                if not read.startswith(b"data:"):
                    continue
                content = read.removeprefix(b"data:").strip()
                if content == b"[DONE]":
                    return
                event = self._object(path, content.decode("utf-8", "replace").encode())
                if "error" in event:
                    raise self.error(f"{path} answered {_quote(json.dumps(event['error']).encode())}")
                yield event
        raise self.lost(f"{path} ended in the middle of an answer; the server may have died, see its log")

    @contextmanager
    def _response(
        self, path: str, body: Mapping[str, Any] | None, deadline_s: float = 0.0, line: Line | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The server's answer, of status 200. A timeout, whose deadline has already passed, is not retried."""
        try:
            with closing(
                self._connection(self._host, self._port, timeout=deadline_s or self._deadline_s)
            ) as connection:
                connection.connect()
                if line is not None:
                    line.hold(connection.sock)
                if body is None:
                    connection.request("GET", self._prefix + path, headers=self._headers)
                else:
                    headers = {"Content-Type": "application/json", **self._headers}
                    connection.request("POST", self._prefix + path, json.dumps(body).encode(), headers)
                with closing(connection.getresponse()) as response:
                    if response.status != http.HTTPStatus.OK:
                        said = _quote(response.read())
                        sentence = str(self.error(f"{path} answered {response.status}: {said}"))
                        raise ServerRefusal(sentence, response.status, said)
                    yield response
        except TimeoutError as error:
            limit, setting = (deadline_s, "load_s") if deadline_s else (self._deadline_s, "deadline_s")
            raise self.error(
                f"{path} said nothing for {limit:g} s (policy.engine.{setting}); see the server's log"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise self.lost(f"{path}: {why}; start {self.kind} there, or correct the address") from error

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.error(f"{path} answered {_quote(content)}, which is no JSON object; name {self.kind}")
        return found

    def lost(self, what: str) -> ServerLost:
        return ServerLost(str(self.error(what)))

    def error(self, what: str) -> RunHalted:
        return RunHalted(f"policy.engine.url = {self.url}: {what}")


def _quote(content: bytes) -> str:
    return repr(" ".join(content.decode("utf-8", "replace").split())[:200])
