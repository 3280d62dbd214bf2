"""Metrics of a run with `placement.moves`: what is in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer

if TYPE_CHECKING:
    from polyrhythm.pipeline.build import Pipeline


class MovesPart(RunPart):
    """`stations/generators_off` and `staleness/max_lag` of each update's line."""

    def __init__(self) -> None:
        self._pipeline: Pipeline | None = None

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        self._pipeline = pipeline
        return ()

    def metrics(self) -> Mapping[str, float]:
        if self._pipeline is None:
            return {}
        conductor = self._pipeline.loop.conductor
        return {
            "stations/generators_off": float(len(conductor.serving.generators.off)),
            "staleness/max_lag": min(conductor.rollout.max_lag, conductor.settings.max_lag),
        }


class MovesHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart | None:
        return MovesPart() if config.placement.moves else None


HOOKS = MovesHooks()
