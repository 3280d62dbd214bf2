"""Builds a scorer from plain data. Imports torch only if the reward function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.config.registry import resolve
from polyrhythm.plugins.scoring.reward_function import load_reward
from polyrhythm.plugins.scoring.scorer import Scorer
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Station
from polyrhythm.scheduler.records import ScorerJoined
from polyrhythm.specs import EnvSpec

if TYPE_CHECKING:
    from polyrhythm.pipeline.context import AddedStations, StationPlan


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
            return Scorer(
                self.name,
                incarnation,
                load_reward(self.function, self.options),
                resolve("env", self.env),
                self.spec,
                context.arena,
                context.channels,
                self.places,
                overlap=context.overlap,
            )

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
