"""Payloads of an `inline` run: ring memory, requests in place, finished trajectories by handle.

A request's payload stays where it was written, in its slot's ring: the handle only names it, and it is valid while
the request is unanswered. A finished trajectory belongs to the store until `release`; only the conductor releases.

Invariant: what was put is released exactly once, so that `leaked()` is empty at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.specs import Trajectory

Index = slice | NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a generator reads: at one ring position, arrays [rows, ...] by name, and which rows ask (ascending).

    The names are the observation's, plus `NOISE_KEY` (int64) and `GREEDY` (bool).
    """

    arrays: Mapping[str, NDArray[Any]]
    index: Index
    count: int


#: Names beside the observation's in a request; the dot keeps them apart from an environment's own names.
NOISE_KEY = "act.noise_key"
GREEDY = "act.greedy"


class Payloads(Protocol):
    """What stations need of a payload store."""

    def allocate(self, owner: str, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Zeroed memory that `owner` (a slot) keeps for its life."""
        ...

    def post(self, owner: str, position: int, view: RequestView) -> str:
        """Make `view`, at ring position `position` of `owner`, readable under the returned handle."""
        ...

    def view(self, handle: str) -> RequestView: ...

    def put(self, owner: str, trajectory: Trajectory) -> str: ...

    def get(self, handle: str) -> Trajectory: ...


class InlinePayloads:
    """The store when everything lives in one process: a dictionary that counts."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestView] = {}
        self._finished: dict[str, Trajectory] = {}
        self._puts = 0
        self._most = 0

    def allocate(self, owner: str, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:  # noqa: ARG002
        return np.zeros(shape, dtype)

    def post(self, owner: str, position: int, view: RequestView) -> str:  # noqa: ARG002 - one process needs no address
        self._requests[owner] = view
        return owner

    def view(self, handle: str) -> RequestView:
        return self._requests[handle]

    def put(self, owner: str, trajectory: Trajectory) -> str:
        handle = f"{owner}/{self._puts}"
        self._puts += 1
        self._finished[handle] = trajectory
        self._most = max(self._most, len(self._finished))
        return handle

    def get(self, handle: str) -> Trajectory:
        return self._finished[handle]

    def release(self, handles: Iterable[str]) -> None:
        """Forget these. The empty handle is an evaluation's: its trajectory was not kept."""
        for handle in handles:
            if handle:
                del self._finished[handle]

    def leaked(self) -> tuple[str, ...]:
        """Handles that were put and not yet released."""
        return tuple(self._finished)

    def statistics(self) -> dict[str, float]:
        return {"payloads": float(self._puts), "payloads_most": float(self._most)}
