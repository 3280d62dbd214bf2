"""The run's record of a joined simulator's samples; its messages are checked against it before they are written.

The simulator supplies observations, rewards and the end of an episode, which must be finite and of the run's shapes.
Everything else is the run's: tickets, versions, noise keys, step counts, and the answers, which are recorded as they
are sent.

Invariant: an answer is written only to blocks whose attempt is still under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.cluster.hosts.pieces import Received, request_of, write_request, write_rest
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import VERSION, Reply, newest_version
from polyrhythm.scheduler.records import (
    DropReason,
    RequestArrived,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    StartRows,
    Ticket,
)
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.simulator.slot import TEXT_CHARS, StepSettings

#: Share of the sum of absolute rewards by which a return may differ from their sum: rewards are kept as float32.
_ROUNDING = 1e-5
#: Reasons for which a simulator fails a sample; all others are the run's own.
_REASONS = frozenset(
    {
        DropReason.CANCELLED,
        DropReason.ENVIRONMENT_RAISED,
        DropReason.EPISODE_REFUSED,
        DropReason.ENVIRONMENT_NOT_FINITE,
        DropReason.POLICY_NOT_FINITE,
        DropReason.REFUSED,
    }
)


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt under way. steps: answered requests; oldest, newest: versions of the answers;
    newest_own: of its own rows."""

    ticket: Ticket
    slot: str
    block: int
    steps: int = 0
    oldest: int = 2**62
    newest: int = -1
    newest_own: int = -1

    @property
    def key(self) -> tuple[int, int]:
        return self.ticket.number, self.ticket.attempt


@dataclass(frozen=True, slots=True)
class _Open:
    """An unanswered request and the attempts of its rows."""

    sequence: int
    entries: NDArray[np.int64]
    attempts: tuple[_Attempt, ...]


class JoinedSamples:
    """Attempts under way and open requests of one incarnation; writes its observations and rewards to `arena`."""

    def __init__(self, arena: Arena, spec: EnvSpec, step: StepSettings) -> None:
        self._arena, self._spec, self._step = arena, spec, step
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    # ------------------------------------------------------------ sent by the run

    def start(self, start: StartRows) -> None:
        for grant in start.grants:
            attempt = _Attempt(grant.ticket, start.slot, grant.block)
            self._attempts[attempt.key] = attempt

    def answer(self, reply: Reply) -> None:
        asked = self._open.get(reply.slot)
        if asked is None or asked.sequence != reply.sequence or len(reply.answers) != len(asked.attempts):
            return
        del self._open[reply.slot]
        held = [place for place, attempt in enumerate(asked.attempts) if self._attempts.get(attempt.key) is attempt]
        self._arena.keep(asked.entries[held], reply.answers[held])
        newest = newest_version(reply.answers)
        for place in held:
            attempt, own = asked.attempts[place], reply.answers[place : place + 1]
            attempt.steps += 1
            attempt.oldest = min(attempt.oldest, int(own[VERSION][0]))
            attempt.newest = max(attempt.newest, newest)
            attempt.newest_own = max(attempt.newest_own, newest_version(own))

    def refuse(self, slot: str, sequence: int) -> None:
        if slot in self._open and self._open[slot].sequence == sequence:
            del self._open[slot]

    # ------------------------------------------------------------ received from the simulator

    def request(self, event: RequestArrived, pieces: Sequence[Received]) -> None:
        """Write the observations of a request. ValueError: it is not the next request of its rows' samples."""
        entries = np.frombuffer(pieces[0] if pieces else b"", np.int64)
        by_block = {attempt.block: attempt for attempt in self._attempts.values() if attempt.slot == event.slot}
        layout = self._arena.layout
        found = [by_block.get(entry % layout.blocks) for entry in entries.tolist()]
        attempts = tuple(attempt for attempt in found if attempt is not None)
        due = [each.block + each.steps % layout.entries * layout.blocks for each in attempts]
        if len(entries) != event.rows or entries.tolist() != due or len(set(due)) != len(due):
            raise ValueError(f"a request of slot {event.slot} has entries that are not the next ones of its blocks")
        if event.slot in self._open:
            raise ValueError(f"slot {event.slot} has an open request already")
        tickets = [attempt.ticket for attempt in attempts]
        asked = (event.version, event.evaluation)
        if asked != (max(ticket.version for ticket in tickets), any(ticket.evaluation for ticket in tickets)):
            raise ValueError(f"a request of slot {event.slot} has another version or evaluation flag than its tickets")
        request = request_of(layout, event.rows, pieces[1:])
        keys = mix_array(
            np.array([ticket.noise for ticket in tickets], np.int64), np.array([each.steps for each in attempts])
        )
        if not (
            np.array_equal(request.noise_key, keys) and request.greedy.tolist() == [ticket.greedy for ticket in tickets]
        ):
            raise ValueError(f"a request of slot {event.slot} has noise keys or greedy flags of other tickets")
        assert request.obs is not None, "it came with its observations"
        _check_finite(request.obs)
        write_request(self._arena, event.slot, entries, request)
        self._open[event.slot] = _Open(event.sequence, entries, attempts)

    def finish(self, event: SampleFinished, pieces: Sequence[Received]) -> None:
        """Write the rest of a finished sample. ValueError: it contradicts the run's record."""
        attempt = self._attempts[event.ticket, event.attempt]
        self._check_end(event, attempt)
        if event.payload_id:

            def check(arrays: dict[str, NDArray[Any]]) -> None:
                _check_finite(arrays)
                rewards, size = arrays["reward"], float(np.abs(arrays["reward"]).sum(dtype=np.float64))
                total = float(rewards.sum(dtype=np.float64))
                if abs(event.episode_return - total) > _ROUNDING * (size + 1.0):
                    raise ValueError(f"a return of {event.episode_return:g}; its rewards sum up to {total:g}")

            write_rest(self._arena, attempt.block, event.chunk_steps, pieces, check)
            self._arena.finish(
                attempt.block,
                steps=event.chunk_steps,
                terminated=event.end is SampleEnd.TERMINATED,
                success=event.success is True,
                env_steps=event.env_steps,
                ticket=event.ticket,
                group=attempt.ticket.group,
                task=attempt.ticket.task,
            )
        del self._attempts[event.ticket, event.attempt]

    def fail(self, event: SampleFailed) -> None:
        """End a failed attempt. ValueError: a simulator cannot give this reason, or its texts are too long."""
        if event.reason not in _REASONS:
            raise ValueError(f"a sample that failed by {event.reason.value!r}, which is for the run to decide")
        if max(len(event.error), len(event.detail)) > TEXT_CHARS:
            raise ValueError(f"an error of {len(event.error)} and {len(event.detail)} characters")
        del self._attempts[event.ticket, event.attempt]

    def _check_end(self, event: SampleFinished, attempt: _Attempt) -> None:
        steps, stride, segment = event.chunk_steps, self._step.stride, self._step.segment_steps
        if steps != attempt.steps:
            raise ValueError(f"a sample of {steps} steps; {attempt.steps} were answered")
        if not (steps - 1) * stride < event.env_steps <= min(steps * stride, self._spec.max_steps):
            raise ValueError(f"a sample of {event.env_steps} env steps in {steps} chunk steps")
        if event.end is SampleEnd.SEGMENT and (steps != segment or attempt.ticket.evaluation):
            raise ValueError(f"a segment of {steps} steps; they have {segment}")
        if event.oldest != attempt.oldest or not attempt.newest_own <= event.newest <= attempt.newest:
            raise ValueError(
                f"versions {event.oldest} to {event.newest}; those answered were {attempt.oldest} to {attempt.newest}"
            )
        names = [name for name, _ in event.metrics]
        if len(set(names)) != len(names) or not self._spec.metrics.keys() >= set(names):
            raise ValueError(f"metrics {[name[:40] for name in names[:3]]}; declared are {[*self._spec.metrics]}")
        if not all(map(math.isfinite, (event.episode_return, *(value for _, value in event.metrics)))):
            raise ValueError("its return or a metric is not finite")


def _check_finite(arrays: Mapping[str, NDArray[Any]]) -> None:
    if bad := first_not_finite({name: array for name, array in arrays.items() if array.dtype.kind == "f"}):
        raise ValueError(f"{next(iter(bad.values()))} is not finite")
