"""Errors that a user can fix. Each message has the setting, its value, the problem and the fix.

    PolyrhythmError          caught by the command line: printed on stderr, exit status 2
    ├── ConfigError          a recipe, an override, or a combination of settings is wrong
    │   └── MissingError     a folder, file, package or device named by the settings is not on this machine
    ├── RunFolderError       a run folder or checkpoint is missing, incomplete or of another run
    ├── StartError           this machine lacks a resource of the run: shared memory, an address, a folder
    └── RunHalted            the run cannot continue (too many failures, for example)
        ├── HostLost         a host that the run needs is lost
        └── RunDistrusted    the run violated a guarantee; resuming it would not help

`scheduler` imports nothing of this package and raises `ValueError`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Maximum number of problems that the message of one ConfigError lists.
LISTED = 8
#: Extras that `make setup` installs.
_SETUP_EXTRAS = ("metaworld", "vla")
#: Extras whose pins contradict constraints.txt.
_OWN_PINS = ("gem", "swanlab", "trackio", "vllm")


class PolyrhythmError(Exception):
    """Base of all errors that a user can fix."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of its problems, such as PR104, in their order: `polyrhythm explain PR104` has cause and remedy."""
        from polyrhythm.error_codes import code_of  # only errors need it

        return tuple(code_of(self, problem) for problem in getattr(self, "problems", (str(self),)))


class ConfigError(PolyrhythmError, ValueError):
    """Invalid settings. The message has the only one of `problems`, or a line for each of the first eight."""

    def __init__(self, *problems: str, origin: str = "") -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = problems
        self.origin = origin
        if len(problems) == 1:
            super().__init__(f"{origin}: {problems[0]}" if origin else problems[0])
            return
        lines = [" ".join(problem.split()) for problem in problems[:LISTED]]
        if more := problems[LISTED:]:
            lines.append(f"and {len(more)} more")
        head = f"{origin}: {len(problems)} problems" if origin else f"{len(problems)} problems"
        super().__init__("\n  ".join([head, *lines]))


class MissingError(ConfigError):
    """Something that the settings name is not on this machine; the message says how to get it."""


class RunFolderError(PolyrhythmError):
    """A run folder or checkpoint cannot be used."""


class StartError(PolyrhythmError):
    """The machine lacks a resource of the run."""


class EnvLost(BaseException):
    """An env batch can no longer be used, for instance because its process has ended.

    Its station is replaced and its samples are repeated. It is not an Exception, so that it is not handled as the
    failure of one call.
    """


class RunHalted(PolyrhythmError):
    """The run ended early, for the reason in the message. station, reason: of the failed station, if there is one."""

    def __init__(self, message: str, station: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.station, self.reason = station, reason


class HostLost(RunHalted):
    """The run ended because it lost a host that it needs. host: its name; stations: those on it."""

    def __init__(self, message: str, host: str, stations: Sequence[str]) -> None:
        super().__init__(message)
        self.host, self.stations = host, stations


class RunDistrusted(RunHalted):
    """The run violated a guarantee, so its result cannot be trusted."""


def as_root() -> str:
    """Prefix of a command that only root may run."""
    return "" if os.getuid() == 0 else "sudo "


def install_command(extra: str) -> str:
    """Command that installs an extra of this package with the tested versions; `make setup` in a checkout that covers
    it."""
    package = Path(__file__).parent
    root = package.parents[1] if (package.parents[1] / "Makefile").is_file() else package
    if root != package and extra in _SETUP_EXTRAS:
        return "make setup"
    constraints = root / "constraints.txt"
    tested = constraints.is_file() and extra not in _OWN_PINS
    versions = f"-c {shlex.quote(str(constraints))} " if tested else ""
    return pip_install(f"{versions}'polyrhythm[{extra}]'")


def pip_install(words: str) -> str:
    """Command that installs packages for this Python: `/usr/bin/python3 -m pip install pygame`.

    words: pip's arguments, quoted for a shell where needed.
    """
    return f"{shlex.quote(sys.executable)} -m pip install {words}"


def first_line(error: BaseException, otherwise: str = "no reason given") -> str:
    """The first line of the error's message; torch's go on with a stack."""
    return (str(error).splitlines() or [otherwise])[0]


def nearest(word: object, valid: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """`did you mean X? ` with the paths `elsewhere` that have the word, else the closest valid word; "" if none."""
    import difflib  # slow, and only errors need it

    known, text = list(valid), str(word)
    holding = [name for name in known if len(text) > 2 and text in name]
    match = list(elsewhere[:3]) or holding[:1] or difflib.get_close_matches(text, known, n=1)
    return f"did you mean {' or '.join(match)}? " if match else ""
