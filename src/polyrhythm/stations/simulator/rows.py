"""State of a slot's rows in arrays: tickets, progress of their samples, and observations.

Invariant: a row is active exactly while it holds a ticket; `running`, `index`, `required` and `evaluating` describe the
active rows and change only when a row gains or loses a ticket. Rows at the same step in adjacent blocks are rendered in
one call, straight into their entries. Otherwise small observations are made for all rows in one call and scattered,
large ones are rendered row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType as ReadOnly
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, Entries, whole
from polyrhythm.scheduler.records import Grant, SlotInfo, Ticket
from polyrhythm.specs import INSTRUCTION, PROGRESS, Task
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.simulator.chunk import ChunkResult
from polyrhythm.stations.simulator.guard import GuardedEnv

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.observed import ObservedBlock

Index = slice | NDArray[np.intp]
#: Makes a slot's memory of observations on the device; None where the device's memory cannot be shared.
MakeBlock = Callable[[SlotInfo], "ObservedBlock | None"]


def as_index(rows: NDArray[np.intp]) -> Index:
    """Ascending rows as a slice if they are consecutive (indexing then makes a view), else unchanged."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class RowStates:
    """State of `count` rows, numbered within the slot.

    steps: chunk steps of the current sample, `stride` env steps each except possibly the last; before: env steps of the
    episode before this sample; block: arena block of the sample; keys[t, row]: noise key of chunk step t. task, seed,
    instruction: of the episode; a continuation keeps them whatever its ticket says. parked: last observation of an
    episode that waits for its continuation. oldest, newest: weight versions that answered in the current sample.
    success: of the episode so far, as in `ChunkResult`. running: the active rows, ascending; index: the same for
    indexing; required: highest version among their tickets; evaluating: one of them belongs to an evaluation;
    max_elapsed: upper bound of their episodes' env steps.
    """

    def __init__(self, count: int, longest: int, stride: int, layout: ArenaLayout, tasks: Sequence[Task]) -> None:
        self._stride, self._layout, self._tasks = stride, layout, tasks
        self.tickets: list[Ticket | None] = [None] * count
        self.parked: dict[int, dict[str, NDArray[Any]]] = {}
        self.active = np.zeros(count, bool)
        self.greedy = np.zeros(count, bool)
        self.evaluation = np.zeros(count, bool)
        self.success = np.full(count, -1, np.int8)
        self.task = np.zeros(count, np.int64)
        self.seed = np.zeros(count, np.int64)
        self.instruction = np.zeros(count, np.int64)
        self.steps = np.zeros(count, np.int64)
        self.block = np.zeros(count, np.int64)
        self.before = np.zeros(count, np.int64)
        self.version = np.zeros(count, np.int64)
        self.oldest = np.zeros(count, np.int64)
        self.newest = np.zeros(count, np.int64)
        self._answered_by: tuple[int, int] | None = None
        self.returns = np.zeros(count, np.float64)
        self.keys = np.zeros((longest, count), np.int64)
        self._changed()

    def _changed(self) -> None:
        self.running = np.flatnonzero(self.active)
        self.index = as_index(self.running)
        self.required = int(self.version[self.index].max(initial=0))
        self.evaluating = bool(self.evaluation[self.index].any())
        self.max_elapsed = int(self.elapsed(self.index).max(initial=0))
        self._abreast = self._first_entry()

    def _first_entry(self) -> int | None:
        """First entry of the active rows if they are at the same step in adjacent blocks, else None."""
        if self.evaluating or not isinstance(self.index, slice) or not len(self.running):
            return None
        block, steps = self.block[self.index], self.steps[self.index]
        if (np.diff(block) != 1).any() or steps.min() != steps.max():
            return None
        return int(block[0] + steps[0] * self._layout.blocks)

    def elapsed(self, rows: Index) -> NDArray[np.int64]:
        """Env steps so far in the episodes of these active rows."""
        return self.before[rows] + self.steps[rows] * self._stride

    def next_keys(self) -> NDArray[np.int64]:
        if self._abreast is not None:
            return self.keys[self._abreast // self._layout.blocks, self.index]
        return self.keys[self.steps[self.index], self.running]

    def entries(self, rows: Index) -> Entries:
        """The current arena entries of these active rows; an evaluation episode may wrap around its block."""
        if self._abreast is not None and rows is self.index:
            return slice(self._abreast, self._abreast + len(self.running))
        steps = self.steps[rows]
        return self.block[rows] + (steps % self._layout.entries if self.evaluating else steps) * self._layout.blocks

    def ticket(self, row: int) -> Ticket:
        ticket = self.tickets[row]
        assert ticket is not None, f"row {row} holds no ticket"
        return ticket

    def episode(self, row: int, begins: Ticket | None = None) -> str:
        """Description of the row's current or parked episode, or of the one that ticket `begins` starts."""
        task, seed = (self.task[row], self.seed[row]) if begins is None else (begins.task, begins.seed)
        return f"task {self._tasks[task].name}, seed {seed}"

    def find(self, ticket: int, attempt: int) -> int | None:
        for row in self.running.tolist():
            held = self.ticket(row)
            if (held.number, held.attempt) == (ticket, attempt):
                return int(row)
        return None

    def answered(self, rows: Index, oldest: int, newest: int) -> None:
        every = rows is self.index
        if not every or (oldest, newest) != self._answered_by:
            self._answered_by = (oldest, newest) if every else None
            self.oldest[rows] = np.minimum(self.oldest[rows], oldest)
            self.newest[rows] = np.maximum(self.newest[rows], newest)

    def advance(self, rows: Index, result: ChunkResult) -> None:
        self.max_elapsed += self._stride
        if self._abreast is not None:
            self._abreast = self._abreast + self._layout.blocks if rows is self.index else None
        rewards = result.rewards
        self.returns[rows] += rewards.sum(1) if rewards.shape[1] > 1 else rewards[:, 0]
        self.steps[rows] += 1
        self.success[rows] = np.maximum(self.success[rows], result.success)

    def segment_done(self, rows: Index, segment_steps: int) -> NDArray[np.bool_]:
        """Whether each of these rows has completed a segment. Evaluation episodes are never cut."""
        return np.asarray((self.steps[rows] >= segment_steps) & ~self.evaluation[rows])

    def begin(self, grants: Sequence[Grant], rows: Sequence[int]) -> None:
        for row, grant in zip(rows, grants, strict=True):
            assert self.tickets[row] is None, f"row {row} is granted ticket {grant.ticket.number}, but holds one"
            self.tickets[row] = grant.ticket
            self.greedy[row] = grant.ticket.greedy
            self.evaluation[row] = bool(grant.ticket.evaluation)
            self.version[row] = grant.ticket.version
            if not grant.resume:
                ticket = grant.ticket
                self.task[row], self.seed[row], self.instruction[row] = ticket.task, ticket.seed, ticket.instruction
                self.before[row] = 0
                self.success[row] = -1
        chosen = np.fromiter(rows, np.intp, len(rows))
        noise = np.fromiter((grant.ticket.noise for grant in grants), np.int64, len(rows))
        self.keys[:, chosen] = mix_array(noise[None, :], np.arange(len(self.keys))[:, None])
        self.steps[chosen] = 0
        self.returns[chosen] = 0.0
        self.oldest[chosen], self.newest[chosen], self._answered_by = np.iinfo(np.int64).max, -1, None
        self.block[chosen] = [grant.block for grant in grants]
        self.active[chosen] = True
        self._changed()

    def end(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.tickets[row] = None
            self.active[row] = False
            self.steps[row] = 0
        self._changed()


#: Observations of at least this many bytes per row are rendered in place rather than scattered.
_LARGE = 4096


class Recorder:
    """Writes the observations of one slot, whose rows are `first`..`first + rows - 1` of `env`. make_block: makes the
    memory of its observations on the device; None, or what returns None: they are made on the host."""

    def __init__(self, info: SlotInfo, env: GuardedEnv, arena: Arena, make_block: MakeBlock | None = None) -> None:
        self.arena, self._info = arena, info
        self._block = make_block(info) if make_block else None
        self._env = env
        self._numbers = np.arange(info.first, info.first + info.rows)
        self._shown = {name: arena.obs[name] for name in env.spec.observation}
        self._floating = {n: f"observation {n}" for n, array in self._shown.items() if array.dtype.kind == "f"}
        self._instruction, self._progress = arena.obs[INSTRUCTION], arena.obs[PROGRESS]
        size = sum(array[0].nbytes for array in self._shown.values())
        self._scratch = {
            name: np.zeros((info.rows, *array.shape[1:]), array.dtype)
            for name, array in self._shown.items()
            if size < _LARGE and info.rows > 1
        }
        self._moves = [(whole(array), whole(self._shown[name])) for name, array in self._scratch.items()]

    def observe(self, rows: Index, entries: Entries, progress: NDArray[np.float64] | float) -> dict[int, str]:
        """Observe these rows (ascending, numbered within the slot), each into its entry.

        Returns for each row with NaN or infinity: position in `rows` → name of the observation.
        """
        numbers = self._numbers[rows]
        self._progress[entries] = progress
        if self._block is not None:
            seen = {}
            if tensors := self._env.observe_on_device(numbers):
                self._block.record(numbers - self._info.first, tensors)
                seen = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
            for name, array in seen.items():
                self._shown[name][entries] = array
            seen = {name: array for name, array in seen.items() if name in self._floating}
        elif isinstance(entries, slice):
            seen = {name: array[entries] for name, array in self._shown.items()}
            self._env.observe(numbers, ReadOnly(seen))
        elif self._scratch:
            count = len(entries)
            seen = {name: array[:count] for name, array in self._scratch.items()}
            self._env.observe(numbers, ReadOnly(seen))
            for made, shown in self._moves:
                shown.put(entries, made[:count])
        else:
            for place, entry in enumerate(entries.tolist()):
                into = {name: array[entry : entry + 1] for name, array in self._shown.items()}
                self._env.observe(numbers[place : place + 1], ReadOnly(into))
            seen = {name: self._shown[name][entries] for name in self._floating}
        # Scattered entries are checked in the scratch array: no second gather.
        return first_not_finite({label: seen[name] for name, label in self._floating.items() if name in seen})

    def post(self, sequence: int, rows: NDArray[np.intp]) -> None:
        """Show the observations of these rows on the device, for a request that is about to be sent."""
        if self._block is not None:
            self._block.post(sequence, rows)

    def close(self) -> None:
        """Free the device's memory; the arena has what was observed."""
        if self._block is not None:
            self._block.close()
            self._block = None

    def show_instruction(self, block: int, instruction: int) -> None:
        layout = self.arena.layout
        self._instruction[layout.block(block, layout.entries)] = instruction

    def restore(self, entry: int, observation: dict[str, NDArray[Any]], progress: float) -> None:
        """Write an observation from `final` back to an entry."""
        for name, array in observation.items():
            self._shown[name][entry] = array
        self._progress[entry] = progress

    def final(self, entry: int) -> dict[str, NDArray[Any]]:
        return {name: array[entry].copy() for name, array in self._shown.items()}
