"""A slot: the shard of an env batch that asks for actions. It posts requests, keeps answers, and cuts finished samples.

Life: idle → ready (active rows, observations written at `head`) → asked (request out) → answered → stepped → ready …
Invariant: at most one request is out; all active rows that were ready when it was posted are in it; a row that starts
while it is out joins the next one, at `head`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch
from polyrhythm.flow.records import End, Event, Grant, RequestArrived, SampleFailed, SampleFinished, SlotInfo
from polyrhythm.runtime.messages import ACTIONS, Reply
from polyrhythm.runtime.payloads import GREEDY, NOISE_KEY, Index, Payloads, RequestView
from polyrhythm.specs import PROGRESS
from polyrhythm.stations.chunk import ChunkResult
from polyrhythm.stations.recorder import Ending, Recorder
from polyrhythm.stations.rows import Rows, as_index


@dataclass(frozen=True, slots=True)
class StepSettings:
    """chunk: primitive actions per chunk step (C); action_repeat: env steps that each is held for; segment_steps: chunk
    steps after which a training sample is cut, 0 for whole episodes."""

    chunk: int
    action_repeat: int = 1
    segment_steps: int = 0

    def episode_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest episode."""
        return -(-max_steps // (self.chunk * self.action_repeat))

    def sample_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest sample that is kept."""
        longest = self.episode_steps(max_steps)
        return min(self.segment_steps, longest) if self.segment_steps else longest


class Slot:
    """One slot of `env`; `simulator` and `epoch` sign its events."""

    def __init__(
        self,
        info: SlotInfo,
        env: EnvBatch,
        settings: StepSettings,
        simulator: tuple[str, int],
        payloads: Payloads,
        emit: Callable[[Event], None],
    ) -> None:
        self.name, self.first = info.slot, info.first
        self.pending: list[Grant] = []
        self.answered = False
        self._settings, self._payloads, self._emit = settings, payloads, emit
        self._simulator, self._epoch = simulator
        self._max_steps = env.spec.max_steps
        length = settings.sample_steps(self._max_steps) + 1
        self._rings = Recorder(info, env, settings.chunk, length, payloads)
        self._rows = Rows(info.rows, settings.episode_steps(self._max_steps))
        self._numbers = np.arange(info.first, info.first + info.rows)
        self._head = 0
        self._sequence = -1
        self._at = 0
        self._posted: Index = slice(0, 0)
        self._asked: NDArray[np.intp] | None = None
        self._due: Index = slice(0, 0)

    # ------------------------------------------------------------ state

    @property
    def live(self) -> bool:
        """A row holds a ticket and takes part."""
        return bool(len(self._rows.running))

    @property
    def asked(self) -> bool:
        """A request is out, answered or not."""
        return self._asked is not None

    @property
    def due_rows(self) -> int:
        """Rows that the request out was for and that still run."""
        return 0 if self._asked is None else len(self._asked)

    def outstanding(self) -> str:
        """What it waits for, in words."""
        state = "answered" if self.answered else "waits for an answer" if self.asked else "is not asking"
        return f"{self.name} {state} with {len(self._rows.running)} rows, {len(self.pending)} grants pending"

    # ------------------------------------------------------------ begin

    def row(self, grant: Grant) -> int:
        """The row within the slot."""
        return grant.row - self.first

    def begin(self, grants: Sequence[Grant]) -> None:
        """Rows that were reset, or go on with a parked episode, join the next request."""
        rows = [self.row(grant) for grant in grants]
        self._rows.begin(grants, rows, self._head)
        for row, grant in zip(rows, grants, strict=True):
            self._rings.show(row, int(self._rows.instruction[row]))
            parked = self._rows.parked.pop(row, None)
            if grant.resume:
                assert parked is not None, f"row {grant.row} resumes, but no episode is parked there"
                self._rings.restore(self._head, row, parked)
        fresh = np.array(sorted(self.row(grant) for grant in grants if not grant.resume), np.intp)
        if len(fresh):
            self._rings.observe(self._head, as_index(fresh))
        self._show_progress(as_index(np.array(sorted(rows), np.intp)))

    def _show_progress(self, rows: Index) -> None:
        self._rings.obs[PROGRESS][self._head, rows] = self._rows.episode_steps[rows] / self._max_steps

    # ------------------------------------------------------------ ask

    def post(self) -> None:
        """Ask for actions for all active rows."""
        state = self._rows
        arrays = self._rings.at(self._head)
        arrays[NOISE_KEY] = state.next_keys()
        arrays[GREEDY] = state.greedy
        self._at, self._asked, self.answered = self._head, state.running, False
        self._posted = self._due = state.index
        self._head = (self._head + 1) % self._rings.length
        self._sequence += 1
        view = RequestView(arrays, state.index, len(state.running))
        self._emit(
            RequestArrived(
                simulator=self._simulator,
                epoch=self._epoch,
                slot=self.name,
                sequence=self._sequence,
                rows=view.count,
                version=state.newest,
                handle=self._payloads.post(self.name, self._at, view),
                evaluation=state.evaluating,
            )
        )

    def answer(self, reply: Reply) -> bool:
        """Keep the answer; False if it is not the one waited for."""
        if self._asked is None or self.answered or reply.sequence != self._sequence:
            return False
        self._rings.answer(self._at, self._posted, reply)
        self.answered = True
        return True

    # ------------------------------------------------------------ step

    def due(self) -> tuple[NDArray[np.intp], NDArray[np.generic], NDArray[np.int64]]:
        """Env rows to step, their actions [n,C,A], and the env steps that each has left."""
        left = self._max_steps - self._rows.episode_steps[self._due]
        return self._numbers[self._due], self._rings.answers[ACTIONS][self._at, self._due], left

    def record(self, result: ChunkResult) -> bool:
        """Keep the outcome of the chunk step, observe, and send off the samples that ended; True if any did."""
        rows, index, state = self._asked, self._due, self._rows
        assert rows is not None
        self._rings.rewards[self._at, index] = result.rewards
        self._rings.valid[self._at, index] = result.valid
        state.advance(index, result)
        self._rings.observe(self._head, index)
        self._show_progress(index)
        self._asked, self.answered = None, False
        over = result.terminated | result.truncated
        ended = over | state.past(index, self._settings.segment_steps) if self._settings.segment_steps else over
        if not np.count_nonzero(ended):
            return False
        for place in np.flatnonzero(ended):
            end = End.TERMINATED if result.terminated[place] else End.TRUNCATED if over[place] else End.SEGMENT
            self._finish(int(rows[place]), end)
        state.end(rows[ended].tolist())
        return True

    def drop_answer(self) -> None:
        """The answer is of no use: all rows that asked were cancelled."""
        assert self._asked is not None
        assert not len(self._asked)
        self._asked, self.answered = None, False

    def _finish(self, row: int, end: End) -> None:
        state, rings = self._rows, self._rings
        ticket, start, steps = state.ticket(row), int(state.start[row]), int(state.steps[row])
        success, env_steps = bool(state.success[row]), int(state.sample_steps[row])
        handle = ""
        if not ticket.evaluation:
            ending = Ending(int(state.task[row]), end is End.TERMINATED, success, env_steps)
            handle = self._payloads.put(self.name, rings.cut(row, start, steps, ticket, ending))
        if end is End.SEGMENT:
            state.parked[row] = rings.final(row, self._head)
        oldest, newest = rings.versions(row, start, min(steps, rings.length))
        self._emit(
            SampleFinished(
                simulator=self._simulator,
                epoch=self._epoch,
                ticket=ticket.number,
                attempt=ticket.attempt,
                handle=handle,
                end=end,
                chunk_steps=steps,
                env_steps=env_steps,
                oldest=oldest,
                newest=newest,
                success=success,
                episode_return=float(state.returns[row]),
            )
        )

    # ------------------------------------------------------------ fail

    def cancel(self, ticket: int, attempt: int) -> bool:
        """Give up this attempt, running or not yet begun; False if it is not here (its sample has just ended)."""
        for grant in self.pending:
            if (grant.ticket.number, grant.ticket.attempt) == (ticket, attempt):
                self.pending.remove(grant)
                self.fail_grants([grant], "cancelled")
                return True
        row = self._rows.find(ticket, attempt)
        if row is None:
            return False
        self.fail([row], "cancelled")
        return True

    def refuse(self, sequence: int, reason: str) -> None:
        """The request will not be answered, so the samples of its rows come to nothing."""
        if self._asked is not None and not self.answered and sequence == self._sequence:
            self.fail_asked(reason)

    def fail_asked(self, reason: str) -> None:
        """The request out comes to nothing, and with it the samples of its rows."""
        assert self._asked is not None
        self.fail(self._asked.tolist(), reason)
        self._asked, self.answered = None, False

    def fail(self, rows: Sequence[int], reason: str) -> None:
        """The samples of these active rows are lost, and the rows are free."""
        lost = [Grant(self.first + row, self._rows.ticket(row)) for row in rows]
        self._rows.end(rows)
        if self._asked is not None:
            self._asked = self._asked[self._rows.active[self._asked]]
            self._due = as_index(self._asked)
        self.fail_grants(lost, reason)

    def fail_grants(self, grants: Sequence[Grant], reason: str) -> None:
        for grant in grants:
            self._emit(SampleFailed(self._simulator, self._epoch, grant.ticket.number, grant.ticket.attempt, reason))
