"""Builds conductors: the scheduler's own, with what the settings ask for of the optional parts.

The scheduler imports nothing outside itself, so this module stands beside it. Optional parts are of the kind
`scheduler` (`polyrhythm.plugin`), by these names:

    tuner     class whose `begin(settings)` gives the `Tuner` of `batching: auto`
    scoring   subclass of `SampleScoring`, where `SchedulerSettings.scoring` is set
    lease     Conductor → `AnyConductor` around it, where `SchedulerSettings.lease` is set
"""

from __future__ import annotations

from typing import Any

from polyrhythm import plugin
from polyrhythm.scheduler.conductor import AnyConductor, Conductor
from polyrhythm.scheduler.settings import SchedulerSettings


def build_conductor(settings: SchedulerSettings) -> AnyConductor:
    """A fresh conductor. PluginError: the optional part that the settings ask for is not installed."""
    tuner = plugin.load("scheduler", "tuner").begin(settings) if settings.batching == "auto" else None
    scoring = plugin.load("scheduler", "scoring")() if settings.scoring is not None else None
    conductor: AnyConductor = Conductor(settings, tuner, scoring)
    return plugin.load("scheduler", "lease")(conductor) if settings.lease is not None else conductor


def restore_conductor(settings: SchedulerSettings, data: dict[str, Any]) -> AnyConductor:
    """The conductor whose `save` gave this data, under the same settings. ValueError: another version saved it."""
    conductor = build_conductor(settings)
    conductor.load(data)
    return conductor
