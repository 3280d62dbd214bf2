"""Builds conductors: the scheduler's own, plus the optional parts that the settings select.

The scheduler imports nothing outside itself, so this module is outside of it. Optional parts have the kind `scheduler`
(`polyrhythm.plugin`) and these names:

    tuner     class whose `begin(settings)` returns the `Tuner` of `batching: auto`
    scoring   subclass of `SampleScoring`, used if `SchedulerSettings.scoring` is set
    lease     function that wraps a Conductor in an `AnyConductor`, used if `SchedulerSettings.lease` is set
"""

from __future__ import annotations

from typing import Any

from polyrhythm import plugin
from polyrhythm.scheduler.conductor import AnyConductor, Conductor
from polyrhythm.scheduler.settings import SchedulerSettings


def build_conductor(settings: SchedulerSettings) -> AnyConductor:
    """A new conductor. PluginError: an optional part that the settings select is not installed."""
    tuner = plugin.load("scheduler", "tuner").begin(settings) if settings.batching == "auto" else None
    scoring = plugin.load("scheduler", "scoring")() if settings.scoring is not None else None
    conductor: AnyConductor = Conductor(settings, tuner, scoring)
    return plugin.load("scheduler", "lease")(conductor) if settings.lease is not None else conductor


def restore_conductor(settings: SchedulerSettings, data: dict[str, Any]) -> AnyConductor:
    """The conductor whose `save` returned this data, under the same settings. ValueError: another version saved it."""
    conductor = build_conductor(settings)
    conductor.load(data)
    return conductor
