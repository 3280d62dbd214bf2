"""Findings of conformance checks, and the line of user code at which an exception was raised.

The checks are those of the plugin `trial`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from polyrhythm.error_codes import CONTRACT
from polyrhythm.errors import ConfigError

#: Folders of foreign code: this package, the standard library, installed packages.
_FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in {str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)
#: Matches the path of a file of any installed package.
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")
#: Suffixes of sources of compiled packages, such as numpy/random/_common.pyx, which tracebacks name and wheels lack.
_COMPILED = (".pyx", ".pxd", ".pxi")
#: Maximum number of characters quoted from an exception's text.
_QUOTED = 300


class ContractViolation(Exception):
    """User code violates its contract: `problem` and `fix`, each a clause."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}; {fix}")


class Note(str):
    """Detail of a passed check that the user should know."""

    __slots__ = ()


class Finding(NamedTuple):
    """Result of one check. note: training works; missing: it works once this machine has a missing resource; failed: it
    does not work. fix: remedy, or "". code: of what is missing or failed (`error_codes`)."""

    name: str
    state: Literal["ok", "note", "missing", "failed"]
    detail: str
    fix: str = ""
    code: str = ""


#: A check raises ContractViolation, or returns a detail, "" or None.
ContractCheck = Callable[[], str | None]


def run_checks(checks: Mapping[str, ContractCheck]) -> Iterator[Finding]:
    """Run all checks, even after a failure. One that fails as an earlier one did is a note that names that one."""
    failed: dict[tuple[str, str], str] = {}
    for name, check in checks.items():
        try:
            detail = check() or ""
        except ContractViolation as violation:
            first = failed.setdefault(_fault(violation), name)
            if first == name:
                yield Finding(name, "failed", violation.problem, violation.fix, CONTRACT)
            else:
                yield Finding(name, "note", f"fails as {first!r} does")
        else:
            yield Finding(name, "note" if isinstance(detail, Note) else "ok", str(detail))


def _fault(violation: ContractViolation) -> tuple[str, str]:
    """Equal for violations with the same cause: its sentence without numbers, and the line that raised it."""
    root, cause = violation, violation.__cause__
    while isinstance(cause, ContractViolation):
        root, cause = cause, cause.__cause__
    return re.sub(r"0x[0-9a-f]+|\d+", "", root.problem), place(_frames(cause)) if cause else ""


def last_line(text: str) -> str:
    """Last non-empty line of a process's output, before Python's messages at exit."""
    lines = [line.strip() for line in text.partition("Exception ignored")[0].splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def violation_of(call: str, error: BaseException) -> ContractViolation:
    """Violation for an exception of a call into user code, with the user's source line."""
    return ContractViolation(f"{call} {raised(error)}", remedy(error))


def remedy(error: BaseException) -> str:
    """Remedy for an exception: `fix it there`, or the installed packages that raised it if no line of the traceback is
    the user's."""
    found = libraries(error)
    if not found:
        return "fix it there"
    return f"this error is of {found}, not of your code: try another version of it, or other settings"


def libraries(error: BaseException) -> str:
    """`pymunk 7.0.0, called by gym-pusht 0.1.8`: installed packages in which an exception was raised; "" if a line of
    the traceback is the user's, or there is none."""
    frames = _frames(error)
    if any(_is_own(file) for file, _ in frames):
        return ""
    return ", called by ".join(dict.fromkeys(filter(None, (_distribution(file) for file, _ in reversed(frames)))))


def _distribution(file: str) -> str:
    """Name and version of the installed package that has this file; "" for other files and for this package."""
    found = _INSTALLED.match(file)
    module = found[1].removesuffix(".py") if found else ""
    return "" if module in ("", __name__.partition(".")[0]) else _package(module)


@cache
def _package(module: str) -> str:
    """Name and version of the installed package that has this module; else the module's name."""
    try:
        name = metadata.packages_distributions()[module][0]
        return f"{name} {metadata.version(name)}"
    except (KeyError, metadata.PackageNotFoundError):
        return module


def raised(error: BaseException) -> str:
    """`raised TypeError: … (/home/me/own.py, line 12)`; without the line if the call itself failed."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:_QUOTED]}{place(_frames(error))}"


def import_function(label: str, path: str) -> Callable[..., Any]:
    """The function or class `module:name`. ConfigError, beginning with `label`: it cannot be imported or called."""
    module, _, name = path.partition(":")
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
    function: Callable[..., Any] = found
    return function


def own_place(error: BaseException) -> str:
    """` (file, line 12)` of the innermost frame in user code; "" if there is none."""
    return place([frame for frame in _frames(error) if _is_own(frame[0])])


def own_call(thread: int | None) -> str:
    """`, in reply (file, line 12)`: the innermost function of user code on a thread's stack; "" without one."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name}{place([(frame.f_code.co_filename, frame.f_lineno or 0)])}"


def definition_place(function: Any) -> str:
    """` (file, line 12)` where a function, or `__call__` of an object, is defined; "" if unknown."""
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - where it is written is asked
    code = getattr(function, "__code__", None)
    return place([(code.co_filename, code.co_firstlineno)]) if code is not None else ""


def place(frames: Sequence[tuple[str, int]]) -> str:
    """` (file, line 12)` of the innermost frame in user code, else of the innermost one; "" without frames.

    frames: (file, line), the innermost last.
    """
    if not frames:
        return ""
    file, line = ([frame for frame in frames if _is_own(frame[0])] or frames)[-1]
    return f" ({file}, line {line})"


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """The error's traceback as (file, line), without the frame that caught it."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)[1:]]


def _is_own(file: str) -> bool:
    if file.endswith(_COMPILED) and not Path(file).is_file():
        return False
    return not (file.startswith((*_FOREIGN, "<frozen")) or _INSTALLED.match(file))
