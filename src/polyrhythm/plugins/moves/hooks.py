"""What a run with `placement.moves` says: what may be moved, and in its metrics what is in force."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.moves.operation import Operation, neighbours

if TYPE_CHECKING:
    from polyrhythm.pipeline.build import Pipeline

log = logging.getLogger(__name__)


class MovesPart(RunPart):
    """`stations/generators_off` and `staleness/max_lag` of each update's line."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pipeline: Pipeline | None = None

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        from polyrhythm.pipeline.placed import generator_names  # with what a run alone needs

        self._pipeline = pipeline
        settings = pipeline.loop.conductor.settings
        if settings.moves is not None:
            names = generator_names(self._config)
            now = Operation((), settings.max_lag)
            those = [now.describe(one) for one in neighbours(now, names, settings, settings.moves)]
            log.info("placement.moves: tried between versions where a forecast promises more: %s", "; ".join(those))
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
        return MovesPart(config) if config.placement.moves else None


HOOKS = MovesHooks()
