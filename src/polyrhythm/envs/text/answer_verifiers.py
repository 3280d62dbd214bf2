"""Verifiers of `env.verify`: the reward of a message, from the answer that its row of the data has.

`exact`, `json` and a function of the user's own are called where the conversation is. `regex` and `math` may take for
ever at what a model writes, and hold Python's lock meanwhile, so that no thread could end them: they are made in a
process beside (`answer_checks`), one for all rows of a process, which the kernel ends at `limit_s`. What ends so, or
raises, counts as wrong.
"""

from __future__ import annotations

import importlib
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
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from polyrhythm.conformance import raised
from polyrhythm.envs.text.answer_checks import bare_answer
from polyrhythm.envs.text.base import enclosed
from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.imports import same_imports
from polyrhythm.specs.finite import as_number

Seconds = Annotated[float, Field(gt=0, le=3600)]


class Verdict(NamedTuple):
    """The reward of a message; failure: why the verifier could not compare it, "" if it could."""

    reward: float
    failure: str = ""


class Verifier(Protocol):
    """What `VerifierSettings.open` gives; `close` it at the end."""

    def verify(self, message: str, answer: Any, row: Mapping[str, Any]) -> Verdict:
        """The verdict on a message. answer, row: of the data, the latter with all columns."""
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class VerifierSettings(BaseModel):
    """What all verifiers have."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    #: Whether an answer may be other than a text or a number.
    structured: ClassVar[bool] = False

    def open(self) -> Verifier:
        """The verifier. Raises ConfigError or MissingError if it cannot be had."""
        raise NotImplementedError

    def written(self, answer: Any) -> str:
        """A message that gives this answer."""
        return as_text(answer)


class Exact(VerifierSettings):
    """The message is the answer, without spaces around it."""

    type: Literal["exact"] = "exact"
    casefold: bool = False
    """Whether upper and lower case are the same."""

    def open(self) -> Verifier:
        return Direct(self._equal)

    def _equal(self, message: str, answer: Any, row: Mapping[str, Any]) -> bool:  # noqa: ARG002 - as others have it
        texts = (message.strip(), as_text(answer))
        return len({text.casefold() if self.casefold else text for text in texts}) == 1


class Unverified(VerifierSettings):
    """Every message has reward 0, for a scorer to judge (`scoring.function`): it gets the answer as `reference`."""

    structured: ClassVar = True

    type: Literal["none"] = "none"

    def open(self) -> Verifier:
        return Direct(lambda *_: 0.0)


class Regex(VerifierSettings):
    """What the pattern finds in the message is what it finds in the answer, or the answer itself."""

    type: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1)]
    """A regular expression of Python, whose last match counts: its first group, or all of it."""
    casefold: bool = False
    """Whether upper and lower case are the same."""
    message: str = "{answer}"
    """How a message gives an answer that the pattern does not match, such as `#### {answer}`: for the trial of the
    data's own answers, and for demonstrations."""
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
        return Beside("regex", {"pattern": self.pattern, "casefold": self.casefold}, self.limit_s)

    def written(self, answer: Any) -> str:
        text = as_text(answer)
        return text if re.search(self.pattern, text) else self.message.replace("{answer}", text)


class Math(VerifierSettings):
    """math-verify finds the message's answer, in \\boxed{} or its last formula or number, equal to the row's."""

    type: Literal["math"] = "math"
    limit_s: Seconds = 2.0
    """Seconds of CPU time of a comparison; the message counts as wrong after that."""

    def open(self) -> Verifier:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingError(
                f"env.verify = math: the package math-verify is not installed; run: {install_command('math')}"
            )
        return Beside("math", {}, self.limit_s)

    def written(self, answer: Any) -> str:
        text = as_text(answer)
        return text if "\\boxed" in text or bare_answer(text) != text else f"\\boxed{{{text}}}"


class Json(VerifierSettings):
    """The message is JSON, alone or between ```json and ```, and has what the answer has."""

    structured: ClassVar = True

    type: Literal["json"] = "json"
    fields: tuple[str, ...] = ()
    """Which fields of an object are compared; without any, all that the answer has."""

    def open(self) -> Verifier:
        return Direct(self._equal)

    def _equal(self, message: str, answer: Any, row: Mapping[str, Any]) -> bool:  # noqa: ARG002 - as others have it
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
    """A function of your own: `f(message, answer, row)` returns the reward, `row` having all columns."""

    structured: ClassVar = True

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`; one that takes long is better a scorer (`scoring.function`)."""

    def open(self) -> Verifier:
        module, _, name = self.path.partition(":")
        label = f"env.verify = {self.path}"
        try:
            found = getattr(importlib.import_module(module), name)
        except AttributeError as error:
            raise ConfigError(f"{label}: {module} has no {name}; name a function of it") from error
        except ImportError as error:
            raise ConfigError(f"{label}: it cannot be imported ({error}); install it or correct the name") from error
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise ConfigError(f"{label}: importing {module} {raised(error)}; fix it there") from error
        if not callable(found):
            raise ConfigError(f"{label}: it is {type(found).__name__}, not a function; name a function of {module}")
        return Direct(lambda *given: self._finite(found(*given)))

    def _finite(self, reward: Any) -> float:
        number = as_number(reward)
        if not math.isfinite(number):
            raise ValueError(f"env.verify = {self.path}: it returned {reward!r:.80}; return a finite number")
        return number


def as_text(answer: Any) -> str:
    """An answer as a text: 72.0, which is how tables without integers have it, is 72."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return answer.strip() if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _as_json(answer: Any) -> Any:
    """The answer; what a text says, if that is JSON."""
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def _same(found: Any, expected: Any) -> bool:
    """Whether they are equal; 1 is 1.0, and not true."""
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _by_name(value: Any) -> Any:
    """A type alone, or a function's path, as `env.verify=math` says it."""
    if isinstance(value, str):
        return {"type": "function", "path": value} if ":" in value else {"type": value}
    return value


AnyVerifier = Annotated[
    Exact | Regex | Math | Json | Function | Unverified, Field(discriminator="type"), BeforeValidator(_by_name)
]


class Direct:
    """A verifier that is called here. equal: takes message, answer and row."""

    def __init__(self, equal: Callable[[str, Any, Mapping[str, Any]], float]) -> None:
        self._equal = equal

    def verify(self, message: str, answer: Any, row: Mapping[str, Any]) -> Verdict:
        return Verdict(float(self._equal(message, answer, row)))

    def close(self) -> None:
        pass


class Beside:
    """A verifier whose comparisons are made in a process beside; those of equal settings share it."""

    #: Address space of the process, in MiB.
    MEMORY_MIB: ClassVar = 2048
    _lock: ClassVar = threading.Lock()
    _shared: ClassVar[dict[str, tuple[CheckProcess, int]]] = {}

    def __init__(self, kind: str, options: Mapping[str, Any], limit_s: float) -> None:
        start = {"kind": kind, "options": options, "limit_s": limit_s, "memory_mib": self.MEMORY_MIB}
        self._key, self._open = json.dumps(start), True
        with self._lock:
            self._process, users = self._shared.get(self._key, (CheckProcess(self._key, limit_s), 0))
            self._shared[self._key] = self._process, users + 1

    def verify(self, message: str, answer: Any, row: Mapping[str, Any]) -> Verdict:  # noqa: ARG002 - see `Verifier`
        found = self._process.compare(message, as_text(answer))
        return Verdict(0.0, found) if isinstance(found, str) else Verdict(float(found))

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with self._lock:
            process, users = self._shared.pop(self._key)
            if users > 1:
                self._shared[self._key] = process, users - 1
        if users == 1:
            process.close()


class CheckProcess:
    """The process that compares, started at the first comparison and again after one that ended it."""

    def __init__(self, start: str, limit_s: float) -> None:
        self._start, self._limit_s = start, limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, message: str, answer: str) -> bool | str:
        """Whether they are equal, or why that is unknown."""
        with self._lock:
            try:
                return self._exchange(json.dumps([message, answer]))
            except OSError:  # it ended between two comparisons
                self._end()
                return self._exchange(json.dumps([message, answer]))

    def _exchange(self, line: str) -> bool | str:
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        if found := process.stdout.readline():
            equal: bool | str = json.loads(found)
            return equal
        status = self._end()
        if status == -signal.SIGPROF:
            return f"it took more than {self._limit_s:g} s"
        return f"its process ended with status {status}"

    def _started(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("answer_checks.py")
        process = self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", "-W", "ignore", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogatepass",
            env={**os.environ, **same_imports()},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{self._start}\n")
        process.stdin.flush()
        if process.stdout.readline() != '"ready"\n':
            raise RuntimeError(f"the process of env.verify ended at its start, with status {self._end()}")
        return process

    def _end(self) -> int:
        """End the process; its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(OSError):
            process.kill()
        status = process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        return status

    def close(self) -> None:
        with self._lock:
            self._end()
