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
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from polyrhythm.errors import RunHalted

#: How a stream of events ends.
_DONE = "[DONE]"
_DATA = b"data:"
#: Characters quoted of what a server said.
_QUOTED = 200
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

    def __init__(
        self, url: str, deadline_s: float, retries: int, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url, self._deadline_s, self.retries, self.kind = url, deadline_s, retries, kind
        self._headers = dict(headers or {})
        parts = urlsplit(url)
        try:
            self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        except ValueError as wrong:
            raise self.error("there is no such port; correct the address") from wrong
        self._secure = parts.scheme == "https"

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object. RunHalted: no answer, or not a JSON object."""
        return self._object(path, *self._ask(path, None))

    def again(self, ask: Callable[[], Found]) -> Found:
        """Return `ask()`; repeat it after a lost connection."""
        for failures in range(1, self.retries + 1):
            try:
                return ask()
            except ServerLost:
                self.pause(failures)
        return ask()

    def pause(self, failures: int) -> None:
        """Wait before the next attempt after this many consecutive lost connections."""
        time.sleep(_PAUSE_S * 2 ** (failures - 1))

    def post(self, path: str, body: Mapping[str, Any], deadline_s: float = 0.0) -> dict[str, Any]:
        """POST a JSON object and return the answer; {} if it is empty or plain text. deadline_s: of this call, 0 for
        the client's."""
        status, content = self.again(lambda: self._ask(path, body, deadline_s))
        if not content.strip().startswith(b"{"):
            content = b"{}"
        return self._object(path, status, content)

    def stream(self, path: str, body: Mapping[str, Any], line: Line) -> Generator[dict[str, Any], None, None]:
        """Events of the answer as they arrive. line: its connection; cutting it raises ServerLost."""
        try:
            with closing(self._connect()) as connection:
                connection.connect()
                line.hold(connection.sock)
                with closing(self._request(connection, path, body)) as response:
                    yield from self._events(path, response)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(path, error) from error

    def _events(self, path: str, response: http.client.HTTPResponse) -> Generator[dict[str, Any], None, None]:
        if response.status != http.HTTPStatus.OK:
            raise self._refusal(path, response.status, response.read())
        while line := response.readline():
            if line.startswith(_DATA):
                text = line.removeprefix(_DATA).strip().decode("utf-8", "replace")
                if text == _DONE:
                    return
                yield self._event(path, text)
        raise self.lost(f"{path} ended in the middle of an answer; the server may have died, see its log")

    def _event(self, path: str, text: str) -> dict[str, Any]:
        event = self._object(path, http.HTTPStatus.OK, text.encode())
        if "error" in event:
            raise self.error(f"{path} answered {_quote(json.dumps(event['error']).encode())}")
        return event

    def _ask(self, path: str, body: Mapping[str, Any] | None, deadline_s: float = 0.0) -> tuple[int, bytes]:
        try:
            with (
                closing(self._connect(deadline_s)) as connection,
                closing(self._request(connection, path, body)) as response,
            ):
                return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(path, error, deadline_s) from error

    def _connect(self, deadline_s: float = 0.0) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=deadline_s or self._deadline_s)

    def _request(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        if body is None:
            connection.request("GET", self._prefix + path, headers=self._headers)
        else:
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request("POST", self._prefix + path, json.dumps(body).encode(), headers)
        return connection.getresponse()

    def _object(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status != http.HTTPStatus.OK:
            raise self._refusal(path, status, content)
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.error(f"{path} answered {_quote(content)}, which is no JSON object; name {self.kind}")
        return found

    def _lost(self, path: str, error: Exception, deadline_s: float = 0.0) -> RunHalted:
        """A timeout is not a lost connection, as the deadline has already passed; it is not retried."""
        if isinstance(error, TimeoutError):
            limit, setting = (deadline_s, "load_s") if deadline_s else (self._deadline_s, "deadline_s")
            return self.error(f"{path} said nothing for {limit:g} s (policy.engine.{setting}); see the server's log")
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return self.lost(f"{path}: {why}; start {self.kind} there, or correct the address")

    def _refusal(self, path: str, status: int, content: bytes) -> ServerRefusal:
        said = _quote(content)
        return ServerRefusal(str(self.error(f"{path} answered {status}: {said}")), status, said)

    def lost(self, what: str) -> ServerLost:
        """A `ServerLost` with address and remedy."""
        return ServerLost(str(self.error(what)))

    def error(self, what: str) -> RunHalted:
        """A `RunHalted` with address and remedy."""
        return RunHalted(f"policy.engine.url = {self.url}: {what}")


def _quote(content: bytes) -> str:
    return repr(" ".join(content.decode("utf-8", "replace").split())[:_QUOTED])
