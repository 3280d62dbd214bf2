"""The scorer station: calls the run's reward function on finished samples, one at a time or several in threads. Imports
torch only if that function does.

Invariants: a sample is read only between `ScoreSample` and the answer to it; each `ScoreSample` has one answer. A call
that never returns is ended with the process, by supervision (`supervision.score_s`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from polyrhythm.config.registry import resolve
from polyrhythm.conformance import own_place
from polyrhythm.plugins.scoring.reward_function import RewardFunction, WrongScore, as_score, load_reward, view_of
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Channels, Order, Station, StationTraits
from polyrhythm.runtime.spans import SCORE, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import SampleScored, ScorerJoined, ScoreSample, ScoringFailed
from polyrhythm.specs import EnvSpec, SampleView
from polyrhythm.stations.simulator.guard import IDLE

if TYPE_CHECKING:
    from polyrhythm.pipeline.context import AddedStations, StationPlan

log = logging.getLogger(__name__)


class Scorer:
    """Scores samples of an environment by `reward`. env: its settings. places: samples at a time, each in a thread if
    there are several and `overlap` allows threads."""

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        name: str,
        incarnation: int,
        reward: RewardFunction,
        env: object,
        spec: EnvSpec,
        arena: Arena,
        channels: Channels,
        places: int = 1,
        *,
        overlap: bool = False,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self._reward, self._spec, self._arena, self._channels = reward, spec, arena, channels
        self._env = env
        self._places = places
        self._todo: SimpleQueue[ScoreSample | None] = SimpleQueue()
        self._under_way: set[int] = set()
        self._calls: dict[int, tuple[float, int]] = {}  # begin and thread of each call under way, by number
        self._reading = threading.Lock()
        self._last = -1  # ticket of the last unit of work
        self._scored = self._failed = 0
        self._busy_s = 0.0
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True)
            for index in range(places if overlap and places > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    def joined(self) -> ScorerJoined:
        return ScorerJoined(self.name, self.incarnation, self._places)

    def handle(self, command: Order) -> None:
        if not isinstance(command, ScoreSample) or command.scorer != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        known = 0 <= command.task < len(self._spec.tasks)
        if not known or command.number in self._under_way or len(self._under_way) >= self._places:
            raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
        self._under_way.add(command.number)
        self._todo.put(command)

    def work(self) -> bool:
        """Score one sample, unless threads do.

        Consumes: samples, in command order. Waits for: the reward function. Unblocked by: `handle`. Produces:
        `SampleScored` or `ScoringFailed`.
        """
        if self._threads or self._todo.empty():
            return False
        command = self._todo.get()
        assert command is not None, "there are no threads to end"
        self._last = command.ticket
        self._score(command)
        return True

    def _serve(self) -> None:
        """Consumes: samples. Waits for: one, or the function. Unblocked by: `handle`, `close`. Produces: answers."""
        while (command := self._todo.get()) is not None:
            self._score(command)

    def _score(self, command: ScoreSample) -> None:
        begin = time.monotonic()
        self._calls[command.number] = begin, threading.get_ident()
        answer = self._answer(command)
        del self._calls[command.number]
        end = time.monotonic()
        with self._reading:
            self._busy_s += end - begin
            self._scored += isinstance(answer, SampleScored)
            self._failed += isinstance(answer, ScoringFailed)
            self._under_way.discard(command.number)
        self._channels.emit(answer)

    def _answer(self, command: ScoreSample) -> SampleScored | ScoringFailed:
        identity = (self.name, self.incarnation, command.number, command.ticket)
        detail = f"task {self._spec.tasks[command.task].name}, seed {command.seed}"
        try:
            score = as_score(self._reward(self._view(command)))
        except (_SampleGone, WrongScore) as error:
            return ScoringFailed(*identity, f"{self._reward.label}: {error}", detail)
        except (Exception, SystemExit) as error:  # of the user's code: the sample fails alone
            log.error("%s: ticket %d, %s", self.name, command.ticket, detail, exc_info=error)
            what = f"{self._reward.label}: {type(error).__name__}: {error}"
            return ScoringFailed(*identity, what, detail + own_place(error))
        return SampleScored(*identity, score.reward, score.success)

    def _view(self, command: ScoreSample) -> SampleView:
        with self._reading:  # a sample of another host is fetched by one thread at a time
            if not self._arena.holds(command.payload_id, command.ticket):
                raise _SampleGone("the sample is not there any more")
            trajectory = replace(self._arena.read(command.payload_id), task=command.task)
        return view_of(self._env, self._spec, trajectory, seed=command.seed, evaluation=command.evaluation)

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Span of the scored sample; none with threads, since a lane shows one activity at a time."""
        yield Span(self.name, SCORE, begin, end, self._last)

    def current_call(self) -> tuple[str, float]:
        """The longest-running call."""
        begun = list(self._calls.values())
        return (SCORE, min(begun)[0]) if begun else IDLE

    @property
    def traits(self) -> StationTraits:
        return StationTraits(calling_thread=self.calling_thread)

    def calling_thread(self) -> int | None:
        begun = list(self._calls.values())
        return min(begun)[1] if begun else None

    def pending_work(self) -> list[str]:
        count = len(self._under_way)
        return [f"{self.name} has {count} samples to score"] if count else []

    def statistics(self) -> dict[str, float]:
        """scored, scoring_failed: samples; busy_s: seconds in calls, divided by the places."""
        return {
            "scored": float(self._scored),
            "scoring_failed": float(self._failed),
            "busy_s": self._busy_s / self._places,
        }

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)


class _SampleGone(Exception):
    """The sample's payload is gone: its host is lost."""


@dataclass(frozen=True, slots=True)
class ScorerFactory:
    """function, options: of `scoring`; env: the environment's settings as plain data; places: samples at a time."""

    name: str
    function: str
    env: dict[str, Any]
    spec: EnvSpec
    places: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        def make() -> Station:
            reward, env = load_reward(self.function, self.options), resolve("env", self.env)
            arena, channels, overlap = context.arena, context.channels, context.overlap
            identity, places = (self.name, incarnation), self.places
            return Scorer(*identity, reward, env, self.spec, arena, channels, places, overlap=overlap)

        return [(f"{self.name}.{incarnation}", make)]

    def announcements(self, incarnation: int) -> Sequence[ScorerJoined]:
        return [ScorerJoined(self.name, incarnation, self.places)]


def add_scorers(plan: StationPlan) -> AddedStations:
    from polyrhythm.pipeline.context import AddedStations  # in main alone: a scorer's process has no use for it
    from polyrhythm.pipeline.placed import scorer_names

    config = plan.context.config
    scoring, env = config.scoring, config.env.model_dump(mode="json")
    assert scoring is not None, "asked for where the recipe has the section"
    return AddedStations(
        [
            ScorerFactory(name, scoring.function, env, plan.spec, scoring.at_a_time, dict(scoring.options))
            for name in scorer_names(config)
        ]
    )
