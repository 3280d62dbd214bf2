"""What a run with `placement.moves` says: what may be moved, and in its metrics what is in force."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.moves.operation import neighbours, starting

if TYPE_CHECKING:
    from polyrhythm.pipeline.build import Pipeline
    from polyrhythm.plugins.moves.conductor import MovingConductor

log = logging.getLogger(__name__)


class MovesPart(RunPart):
    """The operation in force, in each update's line: `stations/generators_off`, `staleness/max_lag`, and where they may
    change `stations/micro_batch_steps` and `stations/together`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pipeline: Pipeline | None = None

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        from polyrhythm.pipeline.placed import generator_names  # with what a run alone needs

        self._pipeline = pipeline
        settings = pipeline.loop.conductor.settings
        if settings.moves is not None:
            names = generator_names(self._config)
            now = starting(settings, settings.moves)
            those = [now.describe(one) for one in neighbours(now, names, settings, settings.moves)]
            if those:
                log.info("placement.moves: tried between versions where a forecast promises more: %s", "; ".join(those))
        return ()

    def metrics(self) -> Mapping[str, float]:
        if self._pipeline is None:
            return {}
        conductor = self._pipeline.loop.conductor
        found = {
            "stations/generators_off": float(len(conductor.serving.generators.off)),
            "staleness/max_lag": min(conductor.rollout.max_lag, conductor.settings.max_lag),
        }
        rules = conductor.settings.moves
        if rules is not None and rules.micro_batches:
            found["stations/micro_batch_steps"] = float(conductor.updates.micro_batch)
        if rules is not None and rules.together:
            found["stations/together"] = float(cast("MovingConductor", conductor).mover.operation.together)
        return found


class MovesHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart | None:
        return MovesPart(config) if config.placement.moves else None


HOOKS = MovesHooks()
