"""Errors that a user can fix. Each message has the setting, its value, the problem and the fix.

    PolyrhythmError          caught by the command line: one line on stderr, exit status 2
    ├── ConfigError          a recipe, an override, or a combination of settings is wrong
    ├── RunFolderError       a run folder or checkpoint is missing, incomplete or of another run
    ├── StartError           this machine lacks a resource of the run: shared memory, an address, a folder
    └── RunHalted            the run cannot go on (too many failures, for example)
        └── RunDistrusted    the run violated a guarantee; resuming it would not help

`scheduler` imports nothing of this package and raises `ValueError`.
"""

from __future__ import annotations


class PolyrhythmError(Exception):
    """Base of all errors that a user can fix."""


class ConfigError(PolyrhythmError, ValueError):
    """Invalid settings. The message has the first of `problems` and the number of others."""

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
    """The machine lacks a resource of the run."""


class RunHalted(PolyrhythmError):
    """The run ended early, for the reason in the message."""


class RunDistrusted(RunHalted):
    """The run violated a guarantee, so its result is not to be trusted."""
