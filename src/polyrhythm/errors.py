"""Errors that a user can act on. Each message says what is wrong, shows the value, and says what to do.

    PolyrhythmError          caught by the command line: one line on stderr, exit status 2
    ├── ConfigError          a recipe, an override, or a combination of settings is wrong
    ├── RunFolderError       a run folder or checkpoint is missing, incomplete or of another run
    ├── StartError           this machine lacks what the run needs: shared memory, an address, a folder
    └── RunHalted            the run cannot go on (too many failures, for example)
        └── RunDistrusted    what it has trained broke a promise of ours; to resume it would not mend that

`flow` stands apart: it imports nothing of this package and raises `ValueError`.
"""

from __future__ import annotations


class PolyrhythmError(Exception):
    """Base of every error that is the user's to solve."""


class ConfigError(PolyrhythmError, ValueError):
    """Settings that cannot be run. The message shows the first of `problems` and counts the others."""

    def __init__(self, *problems: str, origin: str = "") -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = problems
        self.origin = origin
        more = len(problems) - 1
        tail = f" (and {more} more {'problem' if more == 1 else 'problems'})" if more else ""
        super().__init__(f"{origin}: {problems[0]}{tail}" if origin else f"{problems[0]}{tail}")


class RunFolderError(PolyrhythmError):
    """A run folder or checkpoint cannot be used."""


class StartError(PolyrhythmError):
    """The machine cannot give what the run needs."""


class RunHalted(PolyrhythmError):
    """The run ended before its goal, for the reason in the message."""


class RunDistrusted(RunHalted):
    """What the run has done breaks a guarantee, so that its result is not to be trusted."""
