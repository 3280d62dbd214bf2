"""A sink in a process of its own: neither its imports, its signals, nor a call that hangs reach the run.

Messages are JSON, one a line: first the settings and the run, then calls. The process answers each with
`{"id": ...}` or `{"error": ...}`. All else that it prints is in a log file. It ends with its input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from polyrhythm.plugins.trackers.sink import TrackedRun, TrackerSettings, perform

#: Seconds after the run's end within which the process must end.
_LINGER_S = 60.0
#: Seconds between SIGTERM and SIGKILL.
_TERM_S = 2.0
#: Characters of an error that are passed on.
_SHOWN = 300
_START = f"import json,sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import serve; serve()"


class SinkFailed(Exception):
    """A call of a sink failed: it raised, did not return in time, or its process ended."""


class SinkProcess:
    """The process of one sink. log_file: gets what it prints, appended."""

    def __init__(self, settings: TrackerSettings, log_file: Path) -> None:
        self._settings, self._log_file = settings, log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    @property
    def open(self) -> bool:
        return self._process is not None

    def start(self, run: TrackedRun, timeout_s: float) -> str:
        """Start the process and open the sink; return its id. SinkFailed: that failed, and no process is left."""
        words = [sys.executable, "-c", _START, json.dumps(sys.path)]
        try:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with self._log_file.open("ab") as log_file:
                # A session of its own: Ctrl-C ends the run, and the run ends this.
                self._process = subprocess.Popen(  # noqa: S603
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    start_new_session=True,
                )
        except OSError as error:
            raise SinkFailed(f"its process cannot start ({error.strerror})") from error
        self._read = b""
        given = {"settings": self._settings.model_dump(mode="json"), "name": run.name, "folder": str(run.folder)}
        try:
            return self.call({**given, "config": dict(run.config), "id": run.id, "key": run.key}, timeout_s)
        except SinkFailed:
            self.kill()
            raise

    def call(self, message: Mapping[str, Any], timeout_s: float) -> str:
        """Pass a message and return the sink's id. SinkFailed: see there; after a hang or an end no process is left."""
        process = self._process
        if process is None:
            raise SinkFailed("its process has ended")
        try:
            answer = self._exchange(process, json.dumps(message, default=str).encode() + b"\n", timeout_s)
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, TimeoutError):
                self.kill()
                raise SinkFailed(f"it did not return within {timeout_s:g} s") from error
            with suppress(subprocess.TimeoutExpired):  # it closes its pipes shortly before it ends
                process.wait(_TERM_S)
            ended = "closed its connection" if process.returncode is None else f"ended (status {process.returncode})"
            self.kill()
            raise SinkFailed(f"its process {ended}; see {self._log_file}") from error
        if "error" in answer:
            raise SinkFailed(str(answer["error"]))
        return str(answer["id"])

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> Any:
        """Write a line and read one. TimeoutError, EOFError, OSError, ValueError: that failed."""
        assert process.stdin is not None
        assert process.stdout is not None
        until, rest = time.monotonic() + timeout_s, memoryview(line)
        os.set_blocking(process.stdin.fileno(), False)
        while rest or b"\n" not in self._read:
            reading, writing = [process.stdout], [process.stdin] if rest else []
            ready, may, _ = select.select(reading, writing, [], max(0.0, until - time.monotonic()))
            if not ready and not may:
                raise TimeoutError
            if may:
                rest = rest[os.write(process.stdin.fileno(), rest[: select.PIPE_BUF]) :]
            if ready:
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    raise EOFError
                self._read += piece
        answer, _, self._read = self._read.partition(b"\n")
        return json.loads(answer)

    def finish(self, timeout_s: float) -> None:
        """Wait for the end of a process whose sink is closed, then kill what is left."""
        process = self._process
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process and those that it started; a second call does nothing. Any thread may call it."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


# ------------------------------------------------------------ in the process


def serve() -> NoReturn:
    """Serve the calls of the parent process until its end.

    Consumes lines of standard input; waits for the next; unblocked by a line or its end; produces a line for each.
    """
    lines, answers = _take_over_streams()
    status = 1
    try:
        status = _serve(_watched(lines), answers)
    except BaseException:  # noqa: BLE001 - into the log file
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads and exit handlers of a library may wait for a service for hours


def _take_over_streams() -> tuple[IO[str], IO[str]]:
    """The pipes of the parent. Libraries find standard input empty, and print to the log file."""
    lines, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return lines, answers


def _watched(lines: IO[str]) -> Iterator[str]:
    """The lines, read in a thread; from their end on this process has `_LINGER_S` left."""
    from queue import SimpleQueue

    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in lines:
            queue.put(line)
        queue.put("")
        time.sleep(_LINGER_S)
        os._exit(1)

    threading.Thread(target=read, name="input", daemon=True).start()
    return iter(queue.get, "")


def _serve(lines: Iterator[str], answers: IO[str]) -> int:
    from polyrhythm.config.registry import resolve

    sink = None
    for line in lines:
        message, answer = json.loads(line), dict[str, Any]()
        try:
            if sink is None:
                settings = resolve("tracking", message["settings"])
                assert isinstance(settings, TrackerSettings)
                told = (message["config"], message["id"], message["key"])
                run = TrackedRun(message["name"], Path(message["folder"]), *told)
                sink = settings.open(run)
            else:
                perform(sink, message["call"], message["arguments"])
            answer["id"] = sink.id
        except (Exception, SystemExit) as error:  # noqa: BLE001 - passed on
            answer["error"] = describe(error)
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:  # the run's process was killed during the call
            break
        if sink is None:
            return 1
        if message.get("call") == "close" and "error" not in answer:
            return 0
    if sink is not None:
        sink.close(False)  # the run's process was killed
    return 0


def describe(error: BaseException) -> str:
    """The error's type and message, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
