"""`placement.start: plan`: a new run starts with the settings of the best placement that its profile predicts."""

from __future__ import annotations

import logging
from pathlib import Path

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.placed import find_devices
from polyrhythm.plugins.planning.arrangement import changed_lines
from polyrhythm.plugins.planning.placing import by_least_change, find_profile, judge_own
from polyrhythm.plugins.planning.problem import problem_of

log = logging.getLogger(__name__)


def planned(config: RunConfig) -> RunConfig:
    """The configuration with the settings of the first row of `polyrhythm plan` for this machine, by the profile in the
    present folder; without one, that of the recipe. ConfigError: the profile is of another recipe or machine."""
    placement = config.placement.model_copy(update={"start": "recipe"})
    config = config.model_copy(update={"placement": placement})
    file = Path(f"{config.name}.profile.json")
    if not file.is_file():
        log.info(
            "placement.start = plan: there is no %s, so the run starts with the recipe's settings; measure one with "
            "`polyrhythm profile %s`",
            *(file, config.name),
        )
        return config
    profile = find_profile(config, str(file))
    problem = problem_of(profile, config, find_devices(config))
    best, own = by_least_change(config, problem.solve())[0], judge_own(problem)
    changed = changed_lines(config, best.arrangement)
    before = "it cannot be placed here" if own is None else f"{own.samples_per_s:.3g} samples/s"
    log.info(
        "placement.start = plan: by %s, measured %s, %.3g samples/s are predicted, for the recipe's own settings %s; "
        "changed: %s",
        *(file, profile.date, best.prediction.samples_per_s, before, " ".join(changed) or "nothing"),
    )
    return load_config(config.model_dump(mode="json"), changed)
