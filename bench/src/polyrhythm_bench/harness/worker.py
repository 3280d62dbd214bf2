"""A part of a benchmark in its own process: started once, asked many times, ended with its owner.

Questions and answers are lines of JSON on the process's standard input and output. The process ignores SIGINT, which a
terminal sends to everybody: its owner ends it: cleanly by closing its input, at once by SIGTERM.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

import polyrhythm
import polyrhythm_bench
from polyrhythm.errors import RunHalted

#: Called with the keywords of a question; returns plain data.
Answer = Callable[..., Any]

_LEAVE_S = 20.0


class Worker:
    """A process that holds the `Answer` of `make` (module:function: a context manager, called with `arguments`).
    python: another interpreter, which gets our two packages and no others from here."""

    def __init__(self, make: str, *, python: Path | None = None, **arguments: Any) -> None:
        self.make, self._waits = make, False
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        packages = [str(Path(package.__path__[0]).parent) for package in (polyrhythm, polyrhythm_bench)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in (packages if python else sys.path) if path)
        command = [str(python or sys.executable), "-m", "polyrhythm_bench.harness.worker"]
        self._popen = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        try:
            self._send({"make": make, "arguments": arguments})
        except BaseException:
            self.close()
            raise

    def ask(self, **question: Any) -> Any:
        """The answer to a question. RunHalted: the process has ended."""
        self.begin(**question)
        return self.answer()

    def begin(self, **question: Any) -> None:
        """Send a question; `answer` returns its answer."""
        self._send(question)

    def _send(self, content: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        self._waits = True
        try:
            self._popen.stdin.write(json.dumps(content).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise RunHalted(self._how_it_ended()) from None

    def answer(self) -> Any:
        """Wait for the answer to the question that `begin` sent."""
        assert self._popen.stdout is not None
        while not (line := self._popen.stdout.readline()).strip():
            if not line:
                raise RunHalted(self._how_it_ended())
        self._waits = False
        return json.loads(line)

    def _how_it_ended(self) -> str:
        return f"{self.make} ended with status {self._popen.wait(_LEAVE_S)}; its own words stand above"

    def close(self) -> None:
        """End the process; what it holds is freed first, if that takes no longer than `_LEAVE_S`."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            if self._waits:
                self._popen.terminate()
            with suppress(BrokenPipeError):  # it has ended already
                self._popen.stdin.close()
            self._popen.wait(_LEAVE_S)
        finally:
            self._popen.kill()
            self._popen.wait()
            self._popen.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Build the `Answer` that the first line names, then answer each further line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Answers have a channel of their own: whatever else is printed goes to the log.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        order = json.loads(sys.stdin.readline())
        module, _, name = order["make"].partition(":")
        made: AbstractContextManager[Answer] = getattr(importlib.import_module(module), name)(**order["arguments"])
        with made as answer:
            for line in iter(sys.stdin.readline, ""):
                answers.write(json.dumps(answer(**json.loads(line))) + "\n")
                answers.flush()


if __name__ == "__main__":
    main()
