"""What a conformance check reports, and the line of the user's own code that an exception came from.

`policies.conformance` and `envs.conformance` hold the checks; both report in this form.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

#: Folders of code that is not the user's: this package, the standard library, installed packages.
_FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in {str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)
#: Characters of an exception's text that a sentence quotes.
_QUOTED = 300


class ContractViolation(Exception):
    """Code does something that its contract forbids: `problem`, a clause, and `fix`, what to do about it."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}; {fix}")


class Note(str):
    """The result of a check that passes, with something that the user should know."""

    __slots__ = ()


class Finding(NamedTuple):
    """The result of one check. note: it can be trained so; failed: it cannot. fix: what to do, "" for nothing."""

    name: str
    state: Literal["ok", "note", "failed"]
    detail: str
    fix: str = ""


#: A check raises ContractViolation, or returns what it saw, "" for nothing worth saying.
Check = Callable[[], str]


def run_checks(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Run each check, also after one that failed."""
    for name, check in checks.items():
        try:
            detail = check()
        except ContractViolation as violation:
            yield Finding(name, "failed", violation.problem, violation.fix)
        else:
            yield Finding(name, "note" if isinstance(detail, Note) else "ok", str(detail))


def violation_of(call: str, error: BaseException) -> ContractViolation:
    """What a call into the user's code raised, as a violation that names the user's line."""
    return ContractViolation(f"{call} {raised(error)}", "fix it there")


def raised(error: BaseException) -> str:
    """`raised TypeError: … (/home/me/own.py, line 12)`; no place where the function could not even be called."""
    said = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {said[:_QUOTED]}{place(_frames(error))}"


def own_place(error: BaseException) -> str:
    """` (file, line 12)` of the innermost frame in the user's own code; "" if there is none."""
    return place([frame for frame in _frames(error) if _is_own(frame[0])])


def place(frames: Sequence[tuple[str, int]]) -> str:
    """` (file, line 12)` of the innermost frame in the user's own code, else of the innermost one; "" without frames.

    frames: file and line, the innermost last.
    """
    if not frames:
        return ""
    file, line = ([frame for frame in frames if _is_own(frame[0])] or frames)[-1]
    return f" ({file}, line {line})"


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """Where the error passed, below the function that caught it."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)[1:]]


def _is_own(file: str) -> bool:
    return not file.startswith((*_FOREIGN, "<frozen"))
