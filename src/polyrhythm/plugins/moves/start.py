"""`placement.start: plan`: a new run starts with the settings of the best placement that its profile predicts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm.config.recipes import recipe_word
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import find_devices
from polyrhythm.plugins.planning.arrangement import Arrangement, changed_lines
from polyrhythm.plugins.planning.judging import Judges, forkable_cores
from polyrhythm.plugins.planning.placing import by_least_change, find_profile, judge_own
from polyrhythm.plugins.planning.problem import problem_of
from polyrhythm.plugins.planning.profile import refuse_other_machine, this_machine
from polyrhythm.readable import three_digits
from polyrhythm.runtime.devices import Devices

log = logging.getLogger(__name__)


def planned(config: RunConfig, begun: RunConfig | None = None, devices: Devices | None = None) -> RunConfig:
    """The configuration with the settings of the first row of `polyrhythm plan`, by the profile in the present folder;
    without one, that of the recipe; for a run that is resumed, those with which it began.

    begun: the settings of that run; devices: of another machine (None: find this one's). ConfigError: the profile is of
    another recipe or machine, or its numbers are assumed.
    """
    placement = config.placement.model_copy(update={"start": "recipe"})
    config = config.model_copy(update={"placement": placement})
    if begun is not None:
        return _as_begun(config, begun)
    file = Path(f"{config.name}.profile.json")
    if not file.is_file():
        log.info(
            "placement.start = plan: there is no %s, so the run starts with the recipe's settings; measure one with "
            "`polyrhythm profile %s`",
            *(file, recipe_word(config.name)),
        )
        return config
    profile = find_profile(config, str(file))
    if profile.assumed:
        raise ConfigError(
            f"profile {str(file)!r}: its numbers are assumed, not measured; measure them with "
            f"`polyrhythm profile {recipe_word(config.name)}`, or set placement.start=recipe"
        )
    if devices is None and config.launcher != "ray":  # the machine of a job, or of a cluster's node, is not known here
        refuse_other_machine(profile, this_machine())
    problem = problem_of(profile, config, find_devices(config) if devices is None else devices)
    log.info("placement.start = plan: planning by %s, which takes some seconds …", file)
    with Judges(forkable_cores()) as judges:
        best = by_least_change(config, problem.solve(judges=judges))[0]
    own = judge_own(problem)
    changed = changed_lines(config, best.arrangement)
    before = "it cannot be placed here" if own is None else f"{three_digits(own.samples_per_s)} samples/s"
    log.info(
        "placement.start = plan: by %s, measured %s, %s samples/s are predicted, for the recipe's own settings %s; "
        "changed: %s",
        *(file, profile.date, three_digits(best.prediction.samples_per_s), before, " ".join(changed) or "nothing"),
    )
    return load_config(config.model_dump(mode="json"), changed)


def _as_begun(config: RunConfig, begun: RunConfig) -> RunConfig:
    """The configuration with what a plan may set as it is in `begun`."""
    here, there = config.model_dump(mode="json"), begun.model_dump(mode="json")
    kept = dict[str, Any]()
    for name in Arrangement(1, 1, 1, 1).settings():
        (*sections, key), own, theirs = name.split("."), here, there
        for section in sections:
            own, theirs = own[section], theirs[section]
        if key in own and key in theirs and own[key] != theirs[key]:
            kept[name] = theirs[key]
    log.info("placement.start = plan: a resumed run keeps its settings: %s", " ".join(kept) or "the recipe's own")
    return load_config(here, [kept])
