"""Makes a profile: the stations alone, then together, within a budget of time. What was left out is said in it."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.planning.alone import measure_alone
from polyrhythm.plugins.planning.alone_parts import RunParts
from polyrhythm.plugins.planning.cluster import cluster_settings
from polyrhythm.plugins.planning.profile import Profile, settings_digest, this_machine
from polyrhythm.plugins.planning.together import measure_together
from polyrhythm.plugins.virtual.simulate import simulate

log = logging.getLogger(__name__)

#: Longest profile, in minutes.
LONGEST_MIN = 600.0
#: Share of the time for the stations alone, if there is enough for both.
_ALONE = 0.6
#: Seconds of a run together below which it would not come beyond its start.
_SHORTEST_RUN_S = 10.0


def measure(config: RunConfig, minutes: float) -> Profile:
    """Measure the recipe's stations on this machine. The checks and imports before come on top of the minutes.

    ConfigError and others of `validate_run`: the recipe cannot run here. RunHalted: the environment fails.
    """
    if not 0 < minutes <= LONGEST_MIN:
        raise ConfigError(f"--minutes = {minutes:g}: not a time; write minutes of more than 0, at most {LONGEST_MIN:g}")
    if config.launcher not in ("local", "inline"):  # stations of other machines are profiled there
        config = config.model_copy(update={"launcher": "local"})
    validate_run(config)
    begin, seconds = time.monotonic(), 60.0 * minutes
    together_s = (1 - _ALONE) * seconds
    runs = together_s >= _SHORTEST_RUN_S and not config.join.simulators
    parts = RunParts(config)
    stations, left_out = measure_alone(parts, begin + (_ALONE if runs else 1.0) * seconds)
    profile = Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
        episodes=parts.episodes(),
        weights=parts.weights.nbytes,
        stations=stations,
        left_out=tuple(left_out),
    )
    del parts
    if profile.machine.devices:  # else the run's processes have less memory than on their own
        import torch

        torch.cuda.empty_cache()
    if not runs:
        why = "simulators that join are not here" if config.join.simulators else "the time is too short for it"
        return _without(profile, f"the stations together: {why}; give more --minutes")
    try:
        return with_simulated_rate(measure_together(config, profile, begin + seconds), config)
    except PolyrhythmError as error:
        return _without(profile, f"the stations together: {error}")


def with_simulated_rate(profile: Profile, config: RunConfig) -> Profile:
    """The profile with the rate of the simulated cluster for the run of these settings."""
    try:
        found = simulate(cluster_settings(profile, config))
    except ConfigError as error:  # such as passes that were not measured
        return _without(profile, f"the simulated rate: {error}")
    return profile.model_copy(update={"simulated": found["throughput"]["transitions_per_s"]})


def _without(profile: Profile, sentence: str) -> Profile:
    return profile.model_copy(update={"left_out": (*profile.left_out, sentence)})
