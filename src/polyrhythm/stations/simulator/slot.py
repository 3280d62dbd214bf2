"""A slot: the shard of an env batch that requests actions. It posts requests, stores answers, emits finished samples.

Life: idle → ready (active rows, observations written) → requested → answered → stepped → ready …
Invariant: at most one request is open; it holds all rows that were active when it was posted; a row that starts while
it is open joins the next one. An answer is written only to blocks of rows that still wait for it: a cancelled row's
block may belong to another row by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.runtime.memory.arena import FAR, Arena, Entries, RequestView, numbers
from polyrhythm.runtime.messages import ACTIONS, VERSION, Reply, newest_version
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.specs import EnvSpec, finite
from polyrhythm.stations.simulator.chunk import ChunkResult, EpisodeMetrics
from polyrhythm.stations.simulator.guard import GuardedEnv
from polyrhythm.stations.simulator.rows import Index, MakeBlock, Recorder, RowStates, as_index

log = logging.getLogger(__name__)

#: Maximum characters of an error and of its location that are sent: messages have a size limit.
TEXT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How slots step. chunk: primitive actions per chunk step (C); action_repeat: env steps per primitive action.

    segment_steps: chunk steps after which a training sample is cut, 0 for whole episodes; join: step all slots of an
    env batch together once all are answered, even if the environment could step them one by one; whole: an env step
    takes a whole chunk (`EnvSpec.chunk`).
    """

    chunk: int
    action_repeat: int = 1
    segment_steps: int = 0
    join: bool = False
    whole: bool = False

    def check(self, spec: EnvSpec) -> None:
        """ValueError: segments are set but the environment cannot keep a parked episode unchanged."""
        fix = "set segment_steps to 0"
        if self.segment_steps and not spec.step_rows:
            raise ValueError(
                f"the environment steps only whole batches, so no-ops would advance a parked episode; {fix}"
            )
        if self.segment_steps and not spec.reset_rows:
            raise ValueError(f"the environment resets only whole batches, so a parked episode would be lost; {fix}")

    @property
    def stride(self) -> int:
        """Env steps of a full chunk step."""
        return 1 if self.whole else self.chunk * self.action_repeat

    def episode_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest episode."""
        return -(-max_steps // self.stride)

    def sample_steps(self, max_steps: int) -> int:
        """Chunk steps of the longest training sample."""
        longest = self.episode_steps(max_steps)
        return min(self.segment_steps, longest) if self.segment_steps else longest


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """Sender of a slot's events: `simulator` and `incarnation`; answers go to `address`."""

    simulator: str
    incarnation: int
    address: str
    emit: Callable[[records.Event], None]


class Slot:
    """One slot of `env`. env_steps: executed by its rows; metrics: of the env batch's episodes, if any; make_block: as
    in `Recorder`."""

    def __init__(
        self,
        info: records.SlotInfo,
        env: GuardedEnv,
        settings: StepSettings,
        arena: Arena,
        source: SlotIdentity,
        metrics: EpisodeMetrics | None = None,
        make_block: MakeBlock | None = None,
    ) -> None:
        self.name, self.first = info.slot, info.first
        self.pending: list[records.Grant] = []
        self.answered = False
        self._settings, self._arena, self._source, self._metrics = settings, arena, source, metrics
        self.env_steps = 0
        self._env = env
        self._tasks = len(env.spec.tasks)
        self._max_steps, self._stride = env.spec.max_steps, settings.stride
        self._recorder = Recorder(info, env, arena, make_block)
        self.close = self._recorder.close
        longest = settings.episode_steps(self._max_steps)
        self._rows = RowStates(info.rows, longest, self._stride, arena.layout, env.spec.tasks)
        self._numbers = np.arange(info.first, info.first + info.rows)
        self._sequence = -1
        self._request_rows: NDArray[np.intp] | None = None
        self._request_size = 0
        self._due: Index = slice(0, 0)
        self._at: Entries = slice(0, 0)
        self._next: tuple[NDArray[np.intp], Entries] = (self._rows.running, self._at)
        self._answer_rows: NDArray[np.intp] | None = None
        self._actions: NDArray[np.generic] = np.zeros(0)
        self._check = finite.RecordCheck(arena.layout.answer_dtype)

    # ------------------------------------------------------------ state

    @property
    def live(self) -> bool:
        return bool(len(self._rows.running))

    @property
    def has_request(self) -> bool:
        """Whether a request is open, answered or not."""
        return self._request_rows is not None

    @property
    def sequence(self) -> int:
        """Number of the last request, from 0."""
        return self._sequence

    @property
    def due_rows(self) -> int:
        """Number of rows of the open request that still run."""
        return 0 if self._request_rows is None else len(self._request_rows)

    def pending_work(self) -> str:
        state = "answered" if self.answered else "waits for an answer" if self.has_request else "has no open request"
        return f"{self.name} {state} with {len(self._rows.running)} rows, {len(self.pending)} grants pending"

    # ------------------------------------------------------------ begin

    def row(self, grant: records.Grant) -> int:
        return grant.row - self.first

    def check(self, starting: Sequence[records.Grant]) -> None:
        """UnfitMessage: one of these grants cannot begin now."""
        taken = {self.row(grant) for grant in self.pending}
        for grant in starting:
            row, ticket = self.row(grant), grant.ticket
            if not (
                0 <= row < len(self._rows.tickets)
                and self._rows.tickets[row] is None
                and row not in taken
                and (row in self._rows.parked or not grant.resume)
                and 0 <= grant.block < self._arena.layout.blocks
                and 0 <= ticket.task < self._tasks > ticket.instruction >= 0
                and max(map(abs, (ticket.number, ticket.noise, ticket.seed, ticket.version))) < FAR
            ):
                raise UnfitMessage("impossible", f"slot {self.name} cannot begin {grant}")
            taken.add(row)

    def begin(self, starting: Sequence[records.Grant]) -> None:
        """Activate rows that were reset or resume a parked episode. `starting` is sorted by row."""
        rows = [self.row(grant) for grant in starting]
        self._rows.begin(starting, rows)
        for grant, row in zip(starting, rows, strict=True):
            self._recorder.show_instruction(grant.block, int(self._rows.instruction[row]))
            parked = self._rows.parked.pop(row, None)
            if grant.resume:
                assert parked is not None, f"row {grant.row} resumes, but no episode is parked there"
                self._recorder.restore(grant.block, parked, self._rows.before[row] / self._max_steps)
        fresh = np.array([row for row, grant in zip(rows, starting, strict=True) if not grant.resume], np.intp)
        if len(fresh):
            if self._metrics:
                self._metrics.begin(self._numbers[fresh])
            nonfinite = self._recorder.observe(fresh, self._rows.entries(fresh), 0.0)
            self._fail_nonfinite(fresh, finite.ENVIRONMENT, nonfinite)

    # ------------------------------------------------------------ request

    def post(self) -> None:
        state, source = self._rows, self._source
        self._request_rows, self.answered = state.running, False
        self._request_size = len(state.running)
        self._due = state.index
        running, at = self._next
        self._at = at if running is state.running else state.entries(state.index)
        self._answer_rows = None
        self._sequence += 1
        self._arena.post(self.name, RequestView(numbers(self._at), state.next_keys(), state.greedy[state.index]))
        self._recorder.post(self._sequence, state.running)
        source.emit(
            records.RequestArrived(
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
        """Store the answer; False if it was not expected. UnfitMessage: wrong number of rows. Rows whose answer is not
        finite fail, so that such actions reach no environment."""
        if self._request_rows is None or self.answered or reply.sequence != self._sequence:
            return False
        if len(reply.answers) != self._request_size:
            given = len(reply.answers)
            raise UnfitMessage("impossible", f"slot {self.name} requested {self._request_size} rows, not {given}")
        answers = reply.answers if self._answer_rows is None else reply.answers[self._answer_rows]
        self._arena.keep(self._at, answers)
        version = int(answers[VERSION][0]) if len(answers) else 0
        self._rows.answered(self._due, version, newest_version(answers))
        self._actions = answers[ACTIONS].copy()
        self.answered = True
        if nonfinite := self._check.first_not_finite(answers):
            self._fail_nonfinite(self._request_rows, finite.POLICY, nonfinite, f", weights of version {version}")
        return True

    # ------------------------------------------------------------ step

    def due(self) -> tuple[NDArray[np.intp], NDArray[np.generic]]:
        """Env rows to step, and their actions [n,C,A]."""
        return self._numbers[self._due], self._actions

    @property
    def may_reach_limit(self) -> bool:
        return self._rows.max_elapsed + self._stride >= self._max_steps

    def steps_left(self) -> NDArray[np.int64]:
        return np.asarray(self._max_steps - self._rows.elapsed(self._due))

    def record(self, result: ChunkResult) -> bool:
        """Store the chunk step's outcome, observe, and emit the samples that ended or failed; True if any did."""
        rows, index, state, arena = self._request_rows, self._due, self._rows, self._arena
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
        if not finite.is_finite(rewards):
            nonfinite |= finite.first_not_finite({"reward": rewards})
        self._request_rows, self.answered = None, False
        over = result.terminated | result.truncated
        ended = over | state.segment_done(index, self._settings.segment_steps) if self._settings.segment_steps else over
        if nonfinite:
            ended = ended & ~np.isin(np.arange(len(rows)), list(nonfinite))
            self._fail_nonfinite(rows, finite.ENVIRONMENT, nonfinite)
        if not np.count_nonzero(ended):
            return bool(nonfinite)
        for place in np.flatnonzero(ended):
            end = records.SampleEnd.TRUNCATED if over[place] else records.SampleEnd.SEGMENT
            if result.terminated[place]:
                end = records.SampleEnd.TERMINATED
            self._finish(int(rows[place]), end, int(result.steps[place]))
        state.end(rows[ended].tolist())
        return True

    def drop_answer(self) -> None:
        """Drop the answer: all rows of the request were cancelled."""
        assert self._request_rows is not None
        assert not len(self._request_rows)
        self._request_rows, self.answered = None, False

    def _finish(self, row: int, end: records.SampleEnd, last: int) -> None:
        """Emit the row's finished sample. last: env steps of its last chunk step."""
        state, arena, source = self._rows, self._arena, self._source
        ticket, block, steps = state.ticket(row), int(state.block[row]), int(state.steps[row])
        success, env_steps = int(state.success[row]), (steps - 1) * self._stride + last
        self.env_steps += last - self._stride
        payload_id = ""
        if not ticket.evaluation or arena.layout.scored:
            arena.finish(
                block,
                steps=steps,
                terminated=end is records.SampleEnd.TERMINATED,
                success=success > 0,
                env_steps=env_steps,
                ticket=ticket.number,
                group=ticket.group,
                task=int(state.task[row]),
            )
            payload_id = str(block)
        if end is records.SampleEnd.SEGMENT:
            state.before[row] += env_steps
            state.parked[row] = self._recorder.final(block + steps * arena.layout.blocks)
        metrics = self._metrics if end is not records.SampleEnd.SEGMENT else None
        source.emit(
            records.SampleFinished(
                simulator=source.simulator,
                incarnation=source.incarnation,
                ticket=ticket.number,
                attempt=ticket.attempt,
                payload_id=payload_id,
                end=end,
                chunk_steps=steps,
                env_steps=env_steps,
                oldest=int(state.oldest[row]),
                newest=int(state.newest[row]),
                success=None if success < 0 else bool(success),
                episode_return=float(state.returns[row]),
                metrics=metrics.summarize(self.first + row) if metrics else (),
                texts=self._env.texts(self.first + row) if ticket.shown else (),
            )
        )

    # ------------------------------------------------------------ fail

    def cancel(self, ticket: int, attempt: int) -> bool:
        """Cancel this attempt, running or pending; False if its sample has already ended."""
        for grant in self.pending:
            if (grant.ticket.number, grant.ticket.attempt) == (ticket, attempt):
                self.pending.remove(grant)
                self.fail_grants([grant], records.DropReason.CANCELLED)
                return True
        row = self._rows.find(ticket, attempt)
        if row is None:
            return False
        self.fail([row], records.DropReason.CANCELLED)
        return True

    def refuse(self, sequence: int, reason: str) -> None:
        """Fail the samples of a request that will not be answered."""
        if self._request_rows is not None and not self.answered and sequence == self._sequence:
            self.fail_request(records.DropReason.REFUSED, reason)

    def _fail_nonfinite(self, rows: NDArray[np.intp], culprit: str, nonfinite: Mapping[int, str], by: str = "") -> None:
        """Fail the rows at these positions, each with the name of its non-finite array. by: detail on the culprit. The
        environment discards its state of such a row, unless it reported the failure itself."""
        reason = (
            records.DropReason.POLICY_NOT_FINITE
            if culprit == finite.POLICY
            else records.DropReason.ENVIRONMENT_NOT_FINITE
        )
        for place, what in nonfinite.items():
            row = int(rows[place])
            fault = self._env.failed.pop(self.first + row, None) if culprit == finite.ENVIRONMENT else None
            if fault is not None:
                log.error("slot %s: row %d: %s%s", self.name, self.first + row, fault, fault.place)
                self.fail([row], records.DropReason.ENVIRONMENT_RAISED, str(fault), fault.place)
                continue
            if culprit == finite.ENVIRONMENT:
                self._env.discard(self.first + row)
            step = int(self._rows.elapsed(np.array([row]))[0])
            self.fail([row], reason, finite.describe_not_finite(culprit, what), f", env step {step}{by}")

    def fail_request(self, reason: records.DropReason, error: str, more: str = "") -> None:
        """Fail the samples of the open request's rows and drop the request. more: added to each detail."""
        assert self._request_rows is not None
        self.fail(self._request_rows.tolist(), reason, error, more)
        self._request_rows, self.answered = None, False

    def fail(self, rows: Sequence[int], reason: records.DropReason, error: str = "", more: str = "") -> None:
        """Fail the samples of these active rows and free the rows. more: added to each detail."""
        lost = [(row, self._rows.ticket(row)) for row in rows]
        self._rows.end(rows)
        if self._request_rows is not None:
            still = self._rows.active[self._request_rows]
            kept = np.arange(len(self._request_rows)) if self._answer_rows is None else self._answer_rows
            self._request_rows, self._answer_rows = self._request_rows[still], kept[still]
            if self.answered:
                self._actions = self._actions[still]
            self._due = as_index(self._request_rows)
            self._at = self._rows.entries(self._due)
            if not len(self._request_rows) and not self.answered:
                self._request_rows = None  # no row waits for the request any more
        for row, ticket in lost:
            self._emit_failed(ticket, reason, error, self._rows.episode(row) + more)

    def fail_grants(
        self, grants: Sequence[records.Grant], reason: records.DropReason, error: str = "", more: str = ""
    ) -> None:
        """Fail grants that have not begun. more: added to each detail."""
        for grant in grants:
            begins = None if grant.resume else grant.ticket
            self._emit_failed(grant.ticket, reason, error, self._rows.episode(self.row(grant), begins) + more)

    def _emit_failed(self, ticket: records.Ticket, reason: records.DropReason, error: str, detail: str) -> None:
        source, attempt = self._source, ticket.attempt
        said = error[:TEXT_CHARS], detail[:TEXT_CHARS]
        source.emit(records.SampleFailed(source.simulator, source.incarnation, ticket.number, attempt, reason, *said))
