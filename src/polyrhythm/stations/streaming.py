"""Engine of streams: decodes all requests together, one token of each row per step; each request ends independently.

It uses one engine of the policy (`policies.engine`) per copy of the policy.

Invariant: a reply carries the oldest version that sampled one of its request's tokens, and how much newer each token's
version is; it is sent before its `StreamDone`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.errors import RunHalted
from polyrhythm.policies.base import Observations
from polyrhythm.policies.engine import Engine, EngineRequest, Generated, streaming
from polyrhythm.runtime.messages import NEWER, VERSION, Reply
from polyrhythm.runtime.spans import IN_BATCH, PASS, Span
from polyrhythm.scheduler.records import AbortStream, ApplyWeights, StartStream, Stream, StreamDone
from polyrhythm.stations.batch_buffer import BatchLayout, BatchMemory
from polyrhythm.stations.generator import EngineCommand, GeneratorContext, Todo
from polyrhythm.stations.simulator.guard import IDLE

#: Decode steps that follow one another within _GAP_S are one span, of up to _SPAN_S.
_GAP_S, _SPAN_S = 0.01, 0.5


@dataclass(slots=True)
class _Running:
    """A stream under way. begun: its start, by `time.monotonic`; answers: its records [n]. requests: engine request of
    each unfinished row; obs: of each row, [1, ...]; oldest, tokens: over the finished rows."""

    stream: Stream
    begun: float
    answers: NDArray[Any]
    requests: dict[int, EngineRequest] = field(default_factory=dict)
    obs: list[Observations] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    oldest: int = -1
    tokens: int = 0

    def count(self, generated: Generated) -> None:
        if len(generated.versions):
            oldest = int(generated.versions.min())
            self.oldest = oldest if self.oldest < 0 else min(self.oldest, oldest)
            self.tokens += len(generated.tokens)


class StreamingEngine:
    """Answers by streams. places: maximum rows of each copy at a time. resumes: new weights cut running streams, which
    continue from their tokens with nothing kept of the older weights (`on_update: abort`)."""

    commands: ClassVar[tuple[type, ...]] = (StartStream, AbortStream)

    def __init__(self, context: GeneratorContext, *, places: int, resumes: bool = False) -> None:
        self._identity, self._label = (context.name, context.incarnation), context.label
        self._copies, self._arena, self._channels = context.copies, context.arena, context.channels
        self._resumes = resumes
        self._capacity = max(places, *context.arena.layout.slots.values())
        layout = BatchLayout.of(context.arena)
        self._gathered, self._record = BatchMemory(layout, self._capacity), BatchMemory(layout, 1).buffer(1)
        self._streams: dict[int, _Running] = {}
        self._owners: dict[int, _Running] = {}
        self._requests = self._steps = self._rows = self._tokens = self._cut = self._aborted = 0
        self.depth, self.doing = 1, IDLE
        self._past: dict[str, float] = {}  # of engines that are gone
        self._decoding: Span | None = None  # steps that `spans` has not yielded yet
        self._stepped = False  # in the last unit of work
        self._ended: list[_Running] = []  # in the last unit of work
        self._engines = self._make_engines()

    def _make_engines(self) -> dict[bool, Engine]:
        found = {}
        for pinned in (False, True):
            if self._copies.can_serve(pinned=pinned):
                policy, version = self._copies.serving(pinned=pinned)
                found[pinned] = streaming(policy).make_engine(self._capacity)
                found[pinned].weights_changed(version)
        return found

    def accepts(self, command: EngineCommand, todo: Todo) -> bool:
        if not isinstance(command, StartStream):
            return True
        stream = command.stream
        rows = self._arena.layout.slots.get(stream.request.slot, 0)
        new = stream.number not in self._streams and all(
            not isinstance(other, StartStream) or other.stream.number != stream.number for other in todo
        )
        return new and 0 < stream.request.rows <= rows and self._copies.can_serve(pinned=stream.pinned)

    def advance(self, todo: Todo) -> bool:
        """Start and abort streams as commanded, then decode one token of every row."""
        self._ended, self._stepped, obeyed = [], False, False
        while todo and not isinstance(todo[0], ApplyWeights):
            command, obeyed = todo.popleft(), True
            if isinstance(command, StartStream):
                self._start(command.stream)
            elif isinstance(command, AbortStream):
                self._abort(command.stream)
        if todo:  # weights are changed first
            return False
        self._stepped = bool(self._streams)
        if self._stepped:
            self.doing = ("pass", time.monotonic())
            self._step()
            self.doing = IDLE
        return self._stepped or obeyed

    def patience(self, todo: Todo) -> float:  # noqa: ARG002 - the contract of engines
        return 0.0

    def _start(self, stream: Stream) -> None:
        request = stream.request
        buffer = self._gathered.buffer(request.rows)
        self._arena.fetch_requests([(request.slot, request.rows)])
        buffer.put_request(0, self._arena.view(request.slot, request.rows))
        buffer.gather(self._arena)
        obs, greedy, noise_key = buffer.inputs
        policy, _ = self._copies.serving(pinned=stream.pinned)
        run = _Running(stream, time.monotonic(), np.zeros(request.rows, self._arena.layout.answer_dtype))
        device = next(self._copies.module.parameters()).device
        for row in range(request.rows):
            own = {name: tensor[row : row + 1].to(device, copy=True) for name, tensor in obs.items()}
            prompt, most = streaming(policy).prompt_of(own)
            self._requests += 1
            asked = EngineRequest(self._requests, prompt, most, bool(greedy[row]), int(noise_key[row]))
            run.obs.append(own)
            run.requests[asked.request_id], run.rows[asked.request_id] = asked, row
            self._owners[asked.request_id] = run
            self._add(stream, asked)
        self._streams[stream.number] = run

    def _add(self, stream: Stream, asked: EngineRequest) -> None:
        try:
            self._engines[stream.pinned].add(asked)
        except ValueError as wrong:
            raise RunHalted(f"{self._label}: its engine refused {stream.request.slot}'s request: {wrong}") from wrong

    def _abort(self, number: int) -> None:
        """End the stream without a reply; nothing if it has ended."""
        run = self._streams.pop(number, None)
        if run is None:
            return
        for request_id in run.requests:
            del self._owners[request_id]
            run.count(self._engines[run.stream.pinned].abort(request_id))
        self._aborted += run.tokens
        self._channels.emit(StreamDone(*self._identity, number, run.oldest, run.tokens, aborted=True))

    @torch.no_grad()
    def _step(self) -> None:
        """One decode step of each engine with requests; then answer the streams whose rows have all ended."""
        ended: list[_Running] = []
        for pinned, engine in self._engines.items():
            if any(run.stream.pinned == pinned for run in self._streams.values()):
                self._steps += 1
                for generated in engine.step():
                    run = self._owners.pop(generated.request_id)
                    self._answer(run, generated)
                    if not run.requests:
                        ended.append(run)
        if not ended:
            return
        self._channels.reply([self._reply(run) for run in ended])
        for run in ended:
            del self._streams[run.stream.number]
            self._rows, self._tokens = self._rows + run.stream.request.rows, self._tokens + run.tokens
            self._channels.emit(StreamDone(*self._identity, run.stream.number, run.oldest, run.tokens))
        self._ended = ended

    def _answer(self, run: _Running, generated: Generated) -> None:
        del run.requests[generated.request_id]
        row = run.rows[generated.request_id]
        policy, _ = self._copies.serving(pinned=run.stream.pinned)
        act = streaming(policy).act_of(run.obs[row], generated)
        if wrong := self._record.form_error(act):
            raise RunHalted(f"{self._label}: act_of returned {wrong}; correct act_of")
        self._record.answer(act)
        run.answers[row] = self._record.answers[0]
        newer = run.answers[NEWER][row]
        steps = min(len(newer), len(generated.versions))
        newer[:steps] = generated.versions[:steps]
        if steps:
            newer[steps - 1] = generated.versions[-1]  # if an action of fewer steps takes more tokens
        run.count(generated)

    def _reply(self, run: _Running) -> Reply:
        """All rows of a request carry its oldest version, so a sample is never younger than reported."""
        request = run.stream.request
        run.answers[VERSION] = run.oldest
        np.maximum(run.answers[NEWER] - run.oldest, 0, out=run.answers[NEWER])  # zero behind an answer's end
        return Reply(request.reply_to, request.slot, request.sequence, run.answers)

    def change_weights(self, command: ApplyWeights) -> int:
        """Overwrite in place; streams continue, or are cut before and resumed from their tokens."""
        engine = self._engines[command.pinned]
        cut: list[tuple[_Running, EngineRequest]] = []
        if self._resumes:
            for run in self._streams.values():
                for asked in run.requests.values() if run.stream.pinned == command.pinned else ():
                    generated = engine.abort(asked.request_id)
                    cut.append((run, asked._replace(prefix=generated if len(generated.tokens) else None)))
        self._cut += len(cut)
        version = self._copies.apply(command)
        engine.weights_changed(version)
        for run, asked in cut:
            run.requests[asked.request_id] = asked
            self._add(run.stream, asked)
        return version

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of merged decode steps and of ended requests. A span of decode steps carries the most requests in one
        step, and is delayed while further steps may follow at once."""
        before = self._decoding
        if before is not None and (not self._stepped or begin - before.end > _GAP_S or end - before.begin > _SPAN_S):
            yield before
            before = self._decoding = None
        if not self._stepped:
            return
        step = Span(self._identity[0], PASS, begin, end, len(self._streams) + len(self._ended))
        joined = step if before is None else before._replace(end=end, number=max(before.number, step.number))
        self._decoding = joined if self._streams else None
        if not self._streams:
            yield joined
        for run in self._ended:
            yield Span(run.stream.request.slot, IN_BATCH, run.begun, end, run.stream.request.sequence)

    def suspend(self) -> None:
        assert not self._streams, f"{self._identity[0]} has streams under way"
        self._past = self._engine_counts()
        self._engines.clear()  # `resume` makes others

    def resume(self) -> None:
        self._engines = self._make_engines()

    def pending_work(self) -> list[str]:
        return [f"{self._identity[0]} answers {run.stream.request.slot}" for run in list(self._streams.values())]

    def statistics(self) -> dict[str, float]:
        """passes: decode steps; rows: answered; tokens: in the answers; aborted_tokens: of aborted streams. resumed:
        generations cut by weights and continued; further ones from `Engine.statistics`, over all engines."""
        counts = {
            "passes": self._steps,
            "rows": self._rows,
            "tokens": self._tokens,
            "aborted_tokens": self._aborted,
            "resumed": self._cut,
            **self._engine_counts(),
        }
        return {name: float(count) for name, count in counts.items()}

    def _engine_counts(self) -> dict[str, float]:
        found = dict(self._past)
        for engine in self._engines.values():
            for name, count in engine.statistics().items():
                found[name] = found.get(name, 0) + count
        return found

    def close(self) -> None:
        self._streams.clear()
