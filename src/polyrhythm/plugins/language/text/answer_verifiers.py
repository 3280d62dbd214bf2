"""Verifiers of `env.verify`: compute the reward of a message from the answer in its data row.

`exact`, `json` and user functions run in the simulator. `regex` and `math` may not terminate on model output and hold
the GIL meanwhile, so a thread could not stop them: they run in another process (`answer_checks`), shared by all rows of
a simulator, which the kernel ends after `limit_s`. A comparison that times out or raises counts as wrong.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from polyrhythm.conformance import import_function
from polyrhythm.errors import MissingError, install_command
from polyrhythm.imports import same_imports
from polyrhythm.plugins.language.sandbox.tool import Shared
from polyrhythm.plugins.language.text.answer_checks import bare_answer, same_text
from polyrhythm.plugins.language.text.base import enclosed
from polyrhythm.specs.finite import as_number

#: Address space of the process that compares, in MiB.
_MEMORY_MIB = 2048

Seconds = Annotated[float, Field(gt=0, le=3600)]


class Verdict(NamedTuple):
    """The reward of a message; failure: why the verifier could not compare it, "" if it could."""

    reward: float
    failure: str = ""


class Verifier(NamedTuple):
    """Computes rewards. verify(message, answer, row): answer: of the data row; row: all its columns. close: releases
    resources; called by the owner."""

    verify: Callable[[str, Any, Mapping[str, Any]], Verdict]
    close: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, reward: Callable[[str, Any, Mapping[str, Any]], float]) -> Verifier:
        """One that runs in this process. reward: of message, answer and row."""
        return cls(lambda *given: Verdict(float(reward(*given))))


class VerifierSettings(BaseModel):
    """Settings of one verifier."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    #: Whether an answer may be other than a text or a number.
    structured: ClassVar[bool] = False

    def open(self) -> Verifier:
        """Create the verifier. ConfigError or MissingError: it cannot be loaded."""
        raise NotImplementedError

    def written(self, answer: Any) -> str:
        """A message that a correct model could give for this answer."""
        return as_text(answer)


class Exact(VerifierSettings):
    """Accepts a message that equals the answer, without spaces around it."""

    type: Literal["exact"] = "exact"
    casefold: bool = False
    """Whether upper and lower case are the same."""

    def open(self) -> Verifier:
        return Verifier.of(lambda message, answer, _: same_text(message, as_text(answer), casefold=self.casefold))


class Unverified(VerifierSettings):
    """Gives reward 0: a scorer (`scoring.function`) judges instead, with the answer as `reference`."""

    structured: ClassVar = True

    type: Literal["none"] = "none"

    def open(self) -> Verifier:
        return Verifier.of(lambda *_: 0.0)


class Regex(VerifierSettings):
    """Accepts a message in which the pattern finds what it finds in the answer, or the answer itself."""

    type: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1)]
    """A regular expression of Python, whose last match counts: its first group, or all of it."""
    casefold: bool = False
    """Whether upper and lower case are the same."""
    message: str = "{answer}"
    """Message for an answer that the pattern does not match, such as `#### {answer}`, in the trial of the data's own
    answers and in demonstrations."""
    limit_s: Seconds = 2.0
    """Seconds of CPU time of a comparison; the message counts as wrong after that."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not a regular expression ({error}); correct it") from error
        return pattern

    def open(self) -> Verifier:
        return beside("regex", self.model_dump(include={"pattern", "casefold"}), self.limit_s)

    def written(self, answer: Any) -> str:
        text = as_text(answer)
        return text if re.search(self.pattern, text) else self.message.replace("{answer}", text)


class Math(VerifierSettings):
    """Accepts a message whose answer, in \\boxed{} or its last formula or number, math-verify finds equal."""

    type: Literal["math"] = "math"
    limit_s: Seconds = 2.0
    """Seconds of CPU time of a comparison; the message counts as wrong after that."""

    def open(self) -> Verifier:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingError(
                f"env.verify = math: the package math-verify is not installed; run: {install_command('math')}"
            )
        return beside("math", {}, self.limit_s)

    def written(self, answer: Any) -> str:
        text = as_text(answer)
        return text if "\\boxed" in text or bare_answer(text) != text else f"\\boxed{{{text}}}"


class Json(VerifierSettings):
    """Accepts a message that is JSON, alone or between ```json and ```, with the values of the answer."""

    structured: ClassVar = True

    type: Literal["json"] = "json"
    fields: tuple[str, ...] = ()
    """Fields of an object to compare; empty for all fields of the answer."""

    def open(self) -> Verifier:
        return Verifier.of(self._equal)

    def _equal(self, message: str, answer: Any, _: Mapping[str, Any]) -> bool:
        given = list(enclosed(message, "```json", "```"))
        try:
            found = json.loads(given[-1] if given else message)
        except (ValueError, RecursionError):  # a message may be anything
            return False
        expected = _as_json(answer)
        if not isinstance(expected, Mapping):
            return _same(found, expected)
        fields = self.fields or tuple(expected)
        has = isinstance(found, dict) and all(field in found and field in expected for field in fields)
        return has and all(_same(found[field], expected[field]) for field in fields)

    def written(self, answer: Any) -> str:
        return json.dumps(_as_json(answer), ensure_ascii=False)


class Function(VerifierSettings):
    """Calls a function of your own: `f(message, answer, row)` returns the reward; `row` has all columns."""

    structured: ClassVar = True

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`; make a slow one a scorer instead (`scoring.function`)."""

    def open(self) -> Verifier:
        found = import_function(f"env.verify = {self.path}", self.path)

        def reward(*given: Any) -> float:
            number = as_number(made := found(*given))
            if not math.isfinite(number):
                raise ValueError(f"env.verify = {self.path}: it returned {made!r:.80}; return a finite number")
            return number

        return Verifier.of(reward)


def as_text(answer: Any) -> str:
    """An answer as text. 72.0 becomes 72, since tables with missing values store integers as floats."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return answer.strip() if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _as_json(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def _same(found: Any, expected: Any) -> bool:
    """Whether two values are equal: 1 equals 1.0, but not true."""
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _by_name(value: Any) -> Any:
    """Expand the short form: `env.verify=math` names a type, `env.verify=module:function` a function."""
    if isinstance(value, str):
        return {"type": "function", "path": value} if ":" in value else {"type": value}
    return value


AnyVerifier = Annotated[
    Exact | Regex | Math | Json | Function | Unverified, Field(discriminator="type"), BeforeValidator(_by_name)
]


class Beside:
    """Compares in a process, which the first comparison starts, and the next one after its end. start: its options."""

    def __init__(self, start: str, limit_s: float) -> None:
        self._start, self._limit_s = start, limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def verify(self, message: str, answer: Any, _: Mapping[str, Any]) -> Verdict:
        line = json.dumps([message, as_text(answer)])
        with self._lock:
            try:
                found = self._exchange(line)
            except OSError:  # the process ended between two comparisons
                self._end()
                found = self._exchange(line)
        return Verdict(0.0, found) if isinstance(found, str) else Verdict(float(found))

    def _exchange(self, line: str) -> bool | str:
        """Whether message and answer are equal, or a text that says why the comparison failed."""
        if self._process is None and self._answer_to(self._start) != "ready":
            raise RuntimeError(f"the process of env.verify ended at its start, with status {self._end()}")
        found: bool | str | None = self._answer_to(line)
        if found is not None:
            return found
        status = self._end()
        late = status == -signal.SIGPROF
        return f"it took more than {self._limit_s:g} s" if late else f"its process ended with status {status}"

    def _answer_to(self, line: str) -> Any:
        """The process's answer to a line; None if the process ended."""
        if self._process is None:
            program = Path(__file__).with_name("answer_checks.py")
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-P", "-W", "ignore", str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **same_imports()},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        found = process.stdout.readline()
        return json.loads(found) if found else None

    def _end(self) -> int:
        """Kill the process; return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        with suppress(OSError):  # stdin may hold unwritten text
            process.communicate()
        return process.wait()

    def close(self) -> None:
        with self._lock:
            self._end()


_PROCESSES = Shared(Beside.close)


def beside(kind: str, options: Mapping[str, Any], limit_s: float) -> Verifier:
    """A verifier in a process that all rows with these settings share; it ends with the last of them."""
    start = json.dumps({"kind": kind, "options": options, "limit_s": limit_s, "memory_mib": _MEMORY_MIB})
    process, leave = _PROCESSES.open(start, lambda: Beside(start, limit_s))
    return Verifier(process.verify, leave)
