"""Warnings of environments: each is logged once in a run, and those of other processes reach main.

Stations' processes send main what is logged below `polyrhythm.envs` as a warning; an environment in a Python of its own
returns it with its next step.
"""

from __future__ import annotations

import logging

log = logging.getLogger("polyrhythm.envs")

#: Warnings of the present run of this process by their setting, and the most of them.
_told: dict[str, str] = {}
_MOST_TOLD = 20


def forget_warnings() -> None:
    """At the begin of a run: what an earlier one in this process has warned of is told again."""
    _told.clear()


def warn_once(text: str) -> None:
    """Log a warning that begins with `setting: `, once in a run for each setting, whichever env batch it is of."""
    setting = text.partition(":")[0]
    if setting not in _told and len(_told) < _MOST_TOLD:
        _told[setting] = "".join(letter if letter.isprintable() else "?" for letter in text)
        log.warning("%s", _told[setting])


def warnings_so_far() -> list[str]:
    """The warnings of the present run of this process."""
    return list(_told.values())


class EnvWarnings(logging.Handler):
    """Collects what the modules of environments log as warnings in this process, from its construction to `close`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        log.addHandler(self)
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        """The warnings since the last call."""
        taken, self._texts = tuple(self._texts), []
        return taken

    def close(self) -> None:
        log.propagate = True
        log.removeHandler(self)
        super().close()
