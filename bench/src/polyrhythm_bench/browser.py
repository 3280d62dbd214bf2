"""A headless Chromium that opens a page, evaluates expressions in it and takes pictures, over its debugging pipe.

Chromium with --remote-debugging-pipe reads commands from file descriptor 3 and writes answers and events to 4, each a
JSON object that ends with a zero byte. No socket is opened.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: Names of the program, in the order in which they are looked for.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: The descriptors that Chromium was told, whatever the pipes' numbers are here.
_SHELL = 'exec "$@" 3<&{read} 4>&{write}'


def chromium() -> str | None:
    """Path of an installed Chromium."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a Chromium of its own; a context manager. errors: what its console said, and exceptions."""

    def __init__(self, width: int = 1200, height: int = 900, *, dark: bool = False, touch: bool = False) -> None:
        self.errors: list[str] = []
        self._number, self._rest, self._session = 0, b"", ""
        self._folder = Path(tempfile.mkdtemp(prefix="polyrhythm-browser-"))
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        program = chromium()
        assert program is not None, "no Chromium is installed"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._folder}", "--no-first-run", "about:blank"]
        self._process = subprocess.Popen(  # noqa: S603
            ["/bin/bash", "-c", _SHELL.format(read=to_read, write=to_write), "bash", program, *options],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if touch else 1,
            mobile=touch,
        )

    def open(self, url: str) -> None:
        """Open the page and wait until it has drawn all its figures (`data-drawn-ms` of its root)."""
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.drawnMs !== undefined")

    def wait(self, condition: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} did not come true in {timeout_s} s; {self.errors}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools protocol, and its result."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _receive(self, timeout_s: float = 120.0) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], timeout_s)[0], "Chromium does not answer"
            found = os.read(self._in, 1 << 20)
            assert found, "Chromium has ended"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(about["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                self.errors.append(json.dumps(about["args"])[:2000])
            case "Log.entryAdded":
                self.errors.append(about["entry"]["text"])

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
