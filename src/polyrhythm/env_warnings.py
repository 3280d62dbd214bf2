"""Warnings of environments: each is logged once in a run, and those of other processes reach main.

Station processes send main the warnings that are logged below `polyrhythm.envs`; an environment in its own Python
returns them with its next step.
"""

from __future__ import annotations

import logging

log = logging.getLogger("polyrhythm.envs")

#: Warnings of this process's current run by setting, and their maximum number.
_told: dict[str, str] = {}
_MOST_TOLD = 20


def forget_warnings() -> None:
    """Forget the warnings of an earlier run in this process, so that they are logged again."""
    _told.clear()


def warn_once(text: str) -> None:
    """Log a warning that begins with `setting: `, once in a run for each setting."""
    setting = text.partition(":")[0]
    if setting not in _told and len(_told) < _MOST_TOLD:
        _told[setting] = "".join(letter if letter.isprintable() else "?" for letter in text)
        log.warning("%s", _told[setting])


def warnings_so_far() -> list[str]:
    """Warnings of this process's current run."""
    return list(_told.values())


class EnvWarnings(logging.Handler):
    """Collects the warnings of environment modules in this process, from its construction to `close`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        log.addHandler(self)
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        """Warnings since the last call."""
        taken, self._texts = tuple(self._texts), []
        return taken

    def close(self) -> None:
        log.propagate = True
        log.removeHandler(self)
        super().close()
