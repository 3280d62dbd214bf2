"""Published weights as the main process reads them, which may lie on a host that does not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.memory.tensors import State
from polyrhythm.runtime.memory.weights import Weights

log = logging.getLogger(__name__)


def read_newest(weights: Weights, what: str, *, needed: bool) -> tuple[int, State] | None:
    """The newest version, for the file `what`. If its host does not answer: RunHalted where it is needed; else None and
    a warning, since the run ends already, for another reason."""
    try:
        return weights.read()
    except ConnectionError as silent:
        why = f"{what} is not written: {silent}, and the newest weights lie there; resume the run from its last save"
        if needed:
            raise RunHalted(why) from silent
        log.warning("%s", why)
        return None


def reader_of(weights: Weights, version: int) -> tuple[int, Callable[[], State]]:
    """The version that is there now, or the newest if it is gone; and what gives its tensors to the thread that writes
    them. From another host they are fetched only then, since that takes as long as the link needs. OSError: the version
    is gone by then."""
    if not weights.fetches:
        found, state = weights.read(version)
        return found, lambda: state

    def fetch() -> State:
        try:
            found, state = weights.read(version)
        except RuntimeError as overwritten:
            raise OSError(str(overwritten)) from overwritten
        if found != version:
            raise OSError(f"version {version} was replaced by {found} before it was fetched")
        return state

    return version, fetch
