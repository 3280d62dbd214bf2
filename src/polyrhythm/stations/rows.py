"""What a slot knows of its rows: which hold tickets, how far their samples are. Arrays, so that a step costs no loop.

Invariant: a row is active exactly while it holds a ticket; `running`, `index`, `newest` and `evaluating` describe the
active rows and change only when a ticket comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.flow.records import Grant, Ticket
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.chunk import ChunkResult

Index = slice | NDArray[np.intp]


def as_index(rows: NDArray[np.intp]) -> Index:
    """Ascending rows as a slice if they are consecutive (then indexing makes a view), else as they are."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class Rows:
    """State of `count` rows, numbered within the slot.

    steps: chunk steps of the present sample; base: the arena's entry of its first observation; sample_steps,
    episode_steps, all_steps: env steps of the sample, of the episode and ever; keys[t, row]: noise key of the sample's
    chunk step t.
    task, instruction: the episode's, which a continuation keeps whatever its ticket says.
    parked: the last observation of an episode that waits for its continuation.
    running: the active rows, ascending; index: the same for indexing; newest: highest version among their tickets;
    evaluating: one of them belongs to an evaluation; furthest: none of their episodes has more env steps than that.
    """

    def __init__(self, count: int, longest: int, block_entries: int) -> None:
        self.count, self.block_entries = count, block_entries
        self.tickets: list[Ticket | None] = [None] * count
        self.parked: dict[int, dict[str, NDArray[Any]]] = {}
        self.active = np.zeros(count, bool)
        self.greedy = np.zeros(count, bool)
        self.evaluation = np.zeros(count, bool)
        self.success = np.zeros(count, bool)
        self.task = np.zeros(count, np.int64)
        self.instruction = np.zeros(count, np.int64)
        self.steps = np.zeros(count, np.int64)
        self.base = np.zeros(count, np.int64)
        self._env_steps = np.zeros((3, count), np.int64)
        self.sample_steps, self.episode_steps, self.all_steps = self._env_steps
        self.version = np.zeros(count, np.int64)
        self.returns = np.zeros(count, np.float64)
        self.keys = np.zeros((longest, count), np.int64)
        self._changed()

    def _changed(self) -> None:
        self.running = np.flatnonzero(self.active)
        self.index = as_index(self.running)
        self.newest = int(self.version[self.index].max(initial=0))
        self.evaluating = bool(self.evaluation[self.index].any())
        self.furthest = int(self.episode_steps[self.index].max(initial=0))

    def next_keys(self) -> NDArray[np.int64]:
        """Noise keys of the active rows' next chunk step."""
        return self.keys[self.steps[self.index], self.running]

    def entries(self, rows: Index) -> NDArray[np.int64]:
        """The arena's entries that these active rows are at; an evaluation's episode may go around its block."""
        steps = self.steps[rows]
        return self.base[rows] + (steps % self.block_entries if self.evaluating else steps)

    def ticket(self, row: int) -> Ticket:
        ticket = self.tickets[row]
        assert ticket is not None, f"row {row} holds no ticket"
        return ticket

    def find(self, ticket: int, attempt: int) -> int | None:
        """The active row that holds this attempt."""
        for row in self.running.tolist():
            held = self.ticket(row)
            if (held.number, held.attempt) == (ticket, attempt):
                return int(row)
        return None

    def advance(self, rows: Index, result: ChunkResult, most: int) -> None:
        """These rows did a chunk step, of `most` env steps at most."""
        self.furthest += most
        rewards = result.rewards
        self.returns[rows] += rewards.sum(1) if rewards.shape[1] > 1 else rewards[:, 0]
        self.steps[rows] += 1
        self._env_steps[:, rows] += result.steps
        self.success[rows] |= result.success

    def past(self, rows: Index, segment_steps: int) -> NDArray[np.bool_]:
        """Whether each of these rows has filled a segment. Evaluation episodes are never cut."""
        return np.asarray((self.steps[rows] >= segment_steps) & ~self.evaluation[rows])

    def begin(self, grants: Sequence[Grant], rows: Sequence[int], bases: Sequence[int]) -> None:
        """These rows hold tickets now; their first observations lie at entries `bases`."""
        for row, grant in zip(rows, grants, strict=True):
            assert self.tickets[row] is None, f"row {row} is granted ticket {grant.ticket.number}, but holds one"
            self.tickets[row] = grant.ticket
            self.greedy[row] = grant.ticket.greedy
            self.evaluation[row] = bool(grant.ticket.evaluation)
            self.version[row] = grant.ticket.version
            if not grant.resume:
                self.task[row], self.instruction[row] = grant.ticket.task, grant.ticket.instruction
                self.episode_steps[row] = 0
                self.success[row] = False
        chosen = np.fromiter(rows, np.intp, len(rows))
        noise = np.fromiter((grant.ticket.noise for grant in grants), np.int64, len(rows))
        self.keys[:, chosen] = mix_array(noise[None, :], np.arange(len(self.keys))[:, None])
        for array in (self.steps, self.sample_steps, self.returns):
            array[chosen] = 0
        self.base[chosen] = bases
        self.active[chosen] = True
        self._changed()

    def end(self, rows: Sequence[int]) -> None:
        """These rows hold tickets no longer."""
        for row in rows:
            self.tickets[row] = None
            self.active[row] = False
            self.steps[row] = 0
        self._changed()
