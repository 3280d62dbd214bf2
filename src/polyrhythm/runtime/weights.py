"""The weights bus of an `inline` run: versioned and double-buffered.

Invariant: the two newest published versions can be fetched, whole; an older one is gone. Versions only rise.
"""

from __future__ import annotations

from typing import Protocol

from polyrhythm.runtime.tensors import State, snapshot


class Weights(Protocol):
    """What stations need of a weights bus."""

    def publish(self, version: int, state: State) -> None: ...

    def fetch(self, version: int) -> tuple[int, State]: ...


class InlineWeights:
    """Two snapshots in this process's memory; the older one's memory is used again."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    @property
    def newest(self) -> int:
        """Highest version published, -1 before the first."""
        return max(self._states, default=-1)

    def publish(self, version: int, state: State) -> None:
        assert version > self.newest, f"version {version} published after {self.newest}"
        spare = self._states.pop(min(self._states)) if len(self._states) == 2 else None
        self._states[version] = snapshot(state, spare)

    def fetch(self, version: int) -> tuple[int, State]:
        """`version` and its weights, or the newest one's if `version` has been overwritten meanwhile.

        The caller copies before anybody publishes again.
        """
        if version not in self._states:
            version = self.newest
        assert version >= 0, "nothing was published"
        return version, self._states[version]
