"""A slot: the shard of an env batch that asks for actions. It posts requests, keeps answers, and cuts finished samples.

Life: idle → ready (active rows, observations written) → asked (request out) → answered → stepped → ready …
Invariant: at most one request is out; all active rows that were ready when it was posted are in it; a row that starts
while it is out joins the next one. An answer is written only to blocks of rows that still wait for it: a cancelled
row's block may have another owner by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch
from polyrhythm.runtime.memory.arena import FAR, Arena, Entries, RequestView, numbers
from polyrhythm.runtime.messages import ACTIONS, VERSION, Reply
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    DropReason,
    Event,
    Grant,
    RequestArrived,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    SlotInfo,
    Ticket,
)
from polyrhythm.specs.finite import (
    ENVIRONMENT,
    POLICY,
    RecordCheck,
    first_not_finite,
    is_finite,
    not_finite_reason,
)
from polyrhythm.stations.simulator.chunk import ChunkResult
from polyrhythm.stations.simulator.env_metrics import EpisodeMetrics
from polyrhythm.stations.simulator.recorder import Recorder
from polyrhythm.stations.simulator.rows import Index, RowStates, as_index


@dataclass(frozen=True, slots=True)
class StepSettings:
    """chunk: primitive actions per chunk step (C); action_repeat: env steps that each is held for; segment_steps: chunk
    steps after which a training sample is cut, 0 for whole episodes; join: the slots of an env batch step together,
    once all of them are answered, also where the environment could step them one by one."""

    chunk: int
    action_repeat: int = 1
    segment_steps: int = 0
    join: bool = False

    def episode_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest episode."""
        return -(-max_steps // (self.chunk * self.action_repeat))

    def sample_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest sample that is kept."""
        longest = self.episode_steps(max_steps)
        return min(self.segment_steps, longest) if self.segment_steps else longest


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """Identity of a slot: `simulator` and `incarnation` sign its events, answers go to `address`."""

    simulator: str
    incarnation: int
    address: str
    emit: Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Pending:
    """A grant that has not begun, and its block."""

    grant: Grant
    block: int


class Slot:
    """One slot of `env`. env_steps: that its rows have executed. metrics: of the env batch's episodes, if any."""

    def __init__(
        self,
        info: SlotInfo,
        env: EnvBatch,
        settings: StepSettings,
        arena: Arena,
        source: SlotIdentity,
        metrics: EpisodeMetrics | None = None,
    ) -> None:
        self.name, self.first = info.slot, info.first
        self.pending: list[Pending] = []
        self.answered = False
        self._settings, self._arena, self._source, self._metrics = settings, arena, source, metrics
        self.env_steps = 0
        self._tasks = len(env.spec.tasks)
        self._max_steps, self._stride = env.spec.max_steps, settings.chunk * settings.action_repeat
        self._recorder = Recorder(info, env, arena)
        longest = settings.episode_steps(self._max_steps)
        self._rows = RowStates(info.rows, longest, self._stride, arena.layout, env.spec.tasks)
        self._numbers = np.arange(info.first, info.first + info.rows)
        self._sequence = -1
        self._asked: NDArray[np.intp] | None = None
        self._asked_rows = 0
        self._due: Index = slice(0, 0)
        self._at: Entries = slice(0, 0)
        self._next: tuple[NDArray[np.intp], Entries] = (self._rows.running, self._at)
        self._wanted: NDArray[np.intp] | None = None
        self._actions: NDArray[np.generic] = np.zeros(0)
        self._check = RecordCheck(arena.layout.answer_dtype)

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
    def sequence(self) -> int:
        """The number of its last request, from 0."""
        return self._sequence

    @property
    def due_rows(self) -> int:
        """Rows that the request out was for and that still run."""
        return 0 if self._asked is None else len(self._asked)

    def pending_work(self) -> str:
        """What it waits for, in words."""
        state = "answered" if self.answered else "waits for an answer" if self.asked else "is not asking"
        return f"{self.name} {state} with {len(self._rows.running)} rows, {len(self.pending)} grants pending"

    # ------------------------------------------------------------ begin

    def row(self, grant: Grant) -> int:
        """The row within the slot."""
        return grant.row - self.first

    def check(self, starting: Sequence[Pending]) -> None:
        """UnfitMessage: one of these cannot begin here now."""
        taken = {self.row(pending.grant) for pending in self.pending}
        for pending in starting:
            row, ticket = self.row(pending.grant), pending.grant.ticket
            if not (
                0 <= row < len(self._rows.tickets)
                and self._rows.tickets[row] is None
                and row not in taken
                and (row in self._rows.parked or not pending.grant.resume)
                and 0 <= pending.block < self._arena.layout.blocks
                and 0 <= ticket.task < self._tasks > ticket.instruction >= 0
                and max(map(abs, (ticket.number, ticket.noise, ticket.seed, ticket.version))) < FAR
            ):
                raise UnfitMessage("impossible", f"slot {self.name} cannot begin {pending.grant}")
            taken.add(row)

    def begin(self, starting: Sequence[Pending]) -> None:
        """Rows that were reset, or go on with a parked episode, join the next request. `starting` is sorted by row."""
        grants = [pending.grant for pending in starting]
        rows = [self.row(grant) for grant in grants]
        blocks = [pending.block for pending in starting]
        self._rows.begin(grants, rows, blocks)
        for pending, row in zip(starting, rows, strict=True):
            self._recorder.show_instruction(pending.block, int(self._rows.instruction[row]))
            parked = self._rows.parked.pop(row, None)
            if pending.grant.resume:
                assert parked is not None, f"row {pending.grant.row} resumes, but no episode is parked there"
                self._recorder.restore(pending.block, parked, self._rows.before[row] / self._max_steps)
        fresh = np.array([row for row, grant in zip(rows, grants, strict=True) if not grant.resume], np.intp)
        if len(fresh):
            if self._metrics:
                self._metrics.begin(self._numbers[fresh])
            nonfinite = self._recorder.observe(fresh, self._rows.entries(fresh), 0.0)
            self._fail_nonfinite(fresh, ENVIRONMENT, nonfinite)

    # ------------------------------------------------------------ ask

    def post(self) -> None:
        """Ask for actions for all active rows."""
        state, source = self._rows, self._source
        self._asked, self.answered = state.running, False
        self._asked_rows = len(state.running)
        self._due = state.index
        running, at = self._next
        self._at = at if running is state.running else state.entries(state.index)
        self._wanted = None
        self._sequence += 1
        self._arena.post(self.name, RequestView(numbers(self._at), state.next_keys(), state.greedy[state.index]))
        source.emit(
            RequestArrived(
                simulator=source.simulator,
                incarnation=source.incarnation,
                slot=self.name,
                sequence=self._sequence,
                rows=len(state.running),
                version=state.required,
                reply_to=source.address,
                evaluation=state.evaluating,
            )
        )

    def answer(self, reply: Reply) -> bool:
        """Keep the answer; False if it is not the one waited for. Rows whose answer is not finite fail, so that no
        environment is given such actions. UnfitMessage: it is of another number of rows."""
        if self._asked is None or self.answered or reply.sequence != self._sequence:
            return False
        if len(reply.answers) != self._asked_rows:
            given = len(reply.answers)
            raise UnfitMessage("impossible", f"slot {self.name} asked for {self._asked_rows} rows, not {given}")
        answers = reply.answers if self._wanted is None else reply.answers[self._wanted]
        self._arena.keep(self._at, answers)
        version = int(answers[VERSION][0]) if len(answers) else 0
        self._rows.answered(self._due, version)
        self._actions = answers[ACTIONS].copy()
        self.answered = True
        if nonfinite := self._check.first_not_finite(answers):
            self._fail_nonfinite(self._asked, POLICY, nonfinite, f", weights of version {version}")
        return True

    # ------------------------------------------------------------ step

    def due(self) -> tuple[NDArray[np.intp], NDArray[np.generic]]:
        """Env rows to step, and their actions [n,C,A]."""
        return self._numbers[self._due], self._actions

    @property
    def runs_out(self) -> bool:
        """The time limit may be reached in this chunk step."""
        return self._rows.furthest + self._stride >= self._max_steps

    def left(self) -> NDArray[np.int64]:
        """Env steps that each of the rows to step has left."""
        return np.asarray(self._max_steps - self._rows.elapsed(self._due))

    def record(self, result: ChunkResult) -> bool:
        """Keep the outcome of the chunk step, observe, and send off the samples that ended or fail; True if any did."""
        rows, index, state, arena = self._asked, self._due, self._rows, self._arena
        assert rows is not None
        rewards = result.rewards
        if rewards.dtype != np.float32:
            with np.errstate(over="ignore", invalid="ignore"):  # a float64 above float32's range fails its row below
                rewards = rewards.astype(np.float32)
        arena.rewards[self._at] = rewards
        arena.valid[self._at] = result.valid
        elapsed = state.elapsed(index) + result.steps
        state.advance(index, result)
        self.env_steps += len(rows) * self._stride
        at = state.entries(index)
        self._next = (rows, at)
        nonfinite = self._recorder.observe(index, at, elapsed / self._max_steps)
        if not is_finite(rewards):
            nonfinite |= first_not_finite({"reward": rewards})
        self._asked, self.answered = None, False
        over = result.terminated | result.truncated
        ended = over | state.past(index, self._settings.segment_steps) if self._settings.segment_steps else over
        if nonfinite:
            ended = ended & ~np.isin(np.arange(len(rows)), list(nonfinite))
            self._fail_nonfinite(rows, ENVIRONMENT, nonfinite)
        if not np.count_nonzero(ended):
            return bool(nonfinite)
        for place in np.flatnonzero(ended):
            end = (
                SampleEnd.TERMINATED
                if result.terminated[place]
                else SampleEnd.TRUNCATED
                if over[place]
                else SampleEnd.SEGMENT
            )
            self._finish(int(rows[place]), end, int(result.steps[place]))
        state.end(rows[ended].tolist())
        return True

    def drop_answer(self) -> None:
        """The answer is of no use: all rows that asked were cancelled."""
        assert self._asked is not None
        assert not len(self._asked)
        self._asked, self.answered = None, False

    def _finish(self, row: int, end: SampleEnd, last: int) -> None:
        """Its last chunk step had `last` env steps."""
        state, arena = self._rows, self._arena
        ticket, block, steps = state.ticket(row), int(state.block[row]), int(state.steps[row])
        success, env_steps = bool(state.success[row]), (steps - 1) * self._stride + last
        self.env_steps += last - self._stride
        payload_id = ""
        if not ticket.evaluation:
            arena.finish(
                block,
                steps=steps,
                terminated=end is SampleEnd.TERMINATED,
                success=success,
                env_steps=env_steps,
                ticket=ticket.number,
                group=ticket.group,
                task=int(state.task[row]),
            )
            payload_id = str(block)
        if end is SampleEnd.SEGMENT:
            state.before[row] += env_steps
            state.parked[row] = self._recorder.final(block + steps * arena.layout.blocks)
        self._source.emit(
            SampleFinished(
                simulator=self._source.simulator,
                incarnation=self._source.incarnation,
                ticket=ticket.number,
                attempt=ticket.attempt,
                payload_id=payload_id,
                end=end,
                chunk_steps=steps,
                env_steps=env_steps,
                oldest=int(state.oldest[row]),
                newest=int(state.newest[row]),
                success=success,
                episode_return=float(state.returns[row]),
                metrics=self._metrics.summarize(self.first + row)
                if self._metrics and end is not SampleEnd.SEGMENT
                else (),
            )
        )

    # ------------------------------------------------------------ fail

    def cancel(self, ticket: int, attempt: int) -> bool:
        """Give up this attempt, running or not yet begun; False if it is not here (its sample has just ended)."""
        for pending in self.pending:
            if (pending.grant.ticket.number, pending.grant.ticket.attempt) == (ticket, attempt):
                self.pending.remove(pending)
                self.fail_grants([pending.grant], DropReason.CANCELLED)
                return True
        row = self._rows.find(ticket, attempt)
        if row is None:
            return False
        self.fail([row], DropReason.CANCELLED)
        return True

    def refuse(self, sequence: int, reason: str) -> None:
        """The request will not be answered, so the samples of its rows come to nothing."""
        if self._asked is not None and not self.answered and sequence == self._sequence:
            self.fail_asked(reason)

    def _fail_nonfinite(self, rows: NDArray[np.intp], culprit: str, nonfinite: Mapping[int, str], by: str = "") -> None:
        """Fail the rows at these places, each by what of it is not finite. by: more to tell of the culprit."""
        for place, what in nonfinite.items():
            row = int(rows[place])
            step = int(self._rows.elapsed(np.array([row]))[0])
            self.fail([row], not_finite_reason(culprit, what), f", env step {step}{by}")

    def fail_asked(self, reason: str, more: str = "") -> None:
        """The request out comes to nothing, and with it the samples of its rows. more: to tell of each."""
        assert self._asked is not None
        self.fail(self._asked.tolist(), reason, more)
        self._asked, self.answered = None, False

    def fail(self, rows: Sequence[int], reason: str, more: str = "") -> None:
        """The samples of these active rows are lost, and the rows are free. more: to tell beside task and seed."""
        lost = [(row, self._rows.ticket(row)) for row in rows]
        self._rows.end(rows)
        if self._asked is not None:
            still = self._rows.active[self._asked]
            wanted = np.arange(len(self._asked)) if self._wanted is None else self._wanted
            self._asked, self._wanted = self._asked[still], wanted[still]
            if self.answered:
                self._actions = self._actions[still]
            self._due = as_index(self._asked)
            self._at = self._rows.entries(self._due)
            if not len(self._asked) and not self.answered:
                self._asked = None  # whatever becomes of the request, nobody waits for it
        for row, ticket in lost:
            self._emit_failed(ticket, reason, self._rows.episode(row) + more)

    def fail_grants(self, grants: Sequence[Grant], reason: str, more: str = "") -> None:
        """What was granted and has not begun comes to nothing. more: to tell of each."""
        for grant in grants:
            begins = None if grant.resume else grant.ticket
            self._emit_failed(grant.ticket, reason, self._rows.episode(self.row(grant), begins) + more)

    def _emit_failed(self, ticket: Ticket, reason: str, detail: str) -> None:
        source = self._source
        source.emit(SampleFailed(source.simulator, source.incarnation, ticket.number, ticket.attempt, reason, detail))
