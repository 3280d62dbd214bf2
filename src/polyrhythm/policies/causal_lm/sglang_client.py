"""Speaks to an sglang server over HTTP: JSON in, JSON or a stream of events out, every wait with a deadline.

Endpoints: GET /get_model_info; POST /generate (stream), /abort_request, /pause_generation, /update_weights_from_disk,
/continue_generation. Whatever goes wrong is one sentence (`RunHalted`) with the address and the remedy.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from polyrhythm.errors import RunHalted

#: How a stream of events ends.
_DONE = "[DONE]"
_DATA = b"data:"
#: Characters quoted of what a server said.
_QUOTED = 200


class SglangClient:
    """A server at `url`. deadline_s: the longest silence of the server in the middle of an answer."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self.url, self._deadline_s = url, deadline_s
        parts = urlsplit(url)
        try:
            self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        except ValueError as wrong:
            raise self.error("there is no such port; correct the address") from wrong
        self._secure = parts.scheme == "https"

    def get(self, path: str) -> dict[str, Any]:
        """What the server answers. RunHalted: nothing, or no JSON object."""
        return self._object(path, *self._ask(path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same; an answer without content, or a text alone, is {}."""
        status, content = self._ask(path, body)
        if not content.strip().startswith(b"{"):
            content = b"{}"
        return self._object(path, status, content)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of the answer as they come."""
        try:
            with closing(self._connect()) as connection, closing(self._request(connection, path, body)) as response:
                if response.status != http.HTTPStatus.OK:
                    raise self.error(f"{path} answered {response.status}: {_quote(response.read())}")
                while line := response.readline():
                    if line.startswith(_DATA):
                        text = line.removeprefix(_DATA).strip().decode("utf-8", "replace")
                        if text == _DONE:
                            return
                        yield self._event(path, text)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(path, error) from error
        raise self.error(f"{path} ended in the middle of an answer; the server may have died, see its log")

    def _event(self, path: str, text: str) -> dict[str, Any]:
        event = self._object(path, http.HTTPStatus.OK, text.encode())
        if "error" in event:
            raise self.error(f"{path} answered {_quote(json.dumps(event['error']).encode())}")
        return event

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        try:
            with closing(self._connect()) as connection, closing(self._request(connection, path, body)) as response:
                return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(path, error) from error

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._deadline_s)

    def _request(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        """POST with a body, GET without."""
        if body is None:
            connection.request("GET", self._prefix + path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._prefix + path, json.dumps(body).encode(), headers)
        return connection.getresponse()

    def _object(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status != http.HTTPStatus.OK:
            raise self.error(f"{path} answered {status}: {_quote(content)}")
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.error(f"{path} answered {_quote(content)}, which is no JSON object; name an sglang server")
        return found

    def _lost(self, path: str, error: Exception) -> RunHalted:
        if isinstance(error, TimeoutError):
            return self.error(
                f"{path} said nothing for {self._deadline_s:g} s (policy.engine.deadline_s); see the server's log"
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return self.error(f"{path}: {why}; start an sglang server there, or correct the address")

    def error(self, what: str) -> RunHalted:
        """The sentence for something that went wrong."""
        return RunHalted(f"policy.engine.url = {self.url}: {what}")


def _quote(content: bytes) -> str:
    return repr(" ".join(content.decode("utf-8", "replace").split())[:_QUOTED])
